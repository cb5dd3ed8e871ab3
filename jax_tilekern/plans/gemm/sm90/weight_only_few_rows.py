"""Plans of ``gemm/sm90/weight_only_few_rows.cuh``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES, cxx_config
from jax_tilekern.plans.gemm.epilogue_text import kernel_with_epilogue
from jax_tilekern.plans.gemm.sm90.weight_only import WeightOnlyProduct
from jax_tilekern.plans.gpu import RESERVED_SHARED_BYTES, VECTOR_BYTES, WARP, Gpu
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, Scalars, overlapping

_ROWS = 16  # of weights in a tile
_STRIDE = _ROWS + 4
_MOST_ROWS = 16
# Measured on an H200: warps of a team where all teams have a tile, with the least k-tiles, or where
# they have more; and CTAs of an SM where x has at most so many rows.
_TEAMS, _LEAST_WARPS = ((16, 48), (8, 16)), 4
_MOST_CTAS, _MOST_LOADED_ROWS = 4, 2
# Fitted to times on an H200 with arguments beyond L2: microseconds of a launch; and, for each
# microsecond, elements of x that an SM loads, and millions of weights, by bits, that columns of one
# and of two MMAs multiply.
_LAUNCH, _LOADED = 3.0, 27e3
_WEIGHTS_IN_A_MICROSECOND = {4: (7.3, 4.7), 8: (4.0, 3.2)}
# Vectors of a row of weights that four lanes load.
_SPAN_BYTES = 4 * VECTOR_BYTES


@dataclass(frozen=True)
class FewRows:
    """Rows of ``x`` in shared memory, warps of a team, teams of a CTA, and CTAs of an SM."""

    rows: int
    warps: int
    teams: int
    ctas: int

    def shared_memory_bytes(self, problem: WeightOnlyProduct) -> int:
        """Those of ``x``, and twice those of the sums of warps."""
        x = self.rows * problem.k_tiles * problem.block_k * problem.dtype.itemsize
        return x + 2 * self.teams * self.warps * self.rows * _STRIDE * 4


def few_rows(problem: WeightOnlyProduct, gpu: Gpu) -> FewRows | None:
    """Return how a product has few rows, or nothing if the kernel does not cover it.

    ``refusal`` has been asked.
    """
    span = _SPAN_BYTES * 8 // problem.bits
    if problem.ragged or problem.m > _MOST_ROWS:
        return None
    if problem.group < problem.k and problem.group % span:
        return None
    if problem.batch * problem.n * problem.groups >= 2**31 or problem.batch > MAX_GRID[1]:
        return None
    rows = 1 << (problem.m - 1).bit_length()
    # What takes registers beside weights leaves fewer warps to an SM.
    more = (rows > 8) + (problem.zero_dtype is not None) + (problem.k % problem.block_k > 0)
    sm_warps = 32 - 8 * ((more + 1) // 2)
    tiles = _tiles(problem) / gpu.available_sms
    warps = next(
        (
            warps
            for warps, k_tiles in _TEAMS
            if sm_warps // warps >= tiles and problem.k_tiles >= k_tiles
        ),
        _LEAST_WARPS,
    )
    teams = sm_warps // warps
    # CTAs of few warps begin sooner, and each of them loads x.
    several = rows <= _MOST_LOADED_ROWS
    for ctas in (math.gcd(teams, _MOST_CTAS), 1) if several else (1,):
        found = FewRows(rows, warps, teams // ctas, ctas)
        room = (gpu.shared_memory_bytes + RESERVED_SHARED_BYTES) // ctas - RESERVED_SHARED_BYTES
        if found.shared_memory_bytes(problem) <= room:
            return found
    return None


def microseconds(problem: WeightOnlyProduct, found: FewRows, gpu: Gpu) -> float:
    """Return the predicted time of the kernel."""
    sms = gpu.available_sms
    weights = math.ceil(_tiles(problem) / sms) * sms * _ROWS * problem.k / 1e6
    rate = _WEIGHTS_IN_A_MICROSECOND[problem.bits][found.rows > 8]
    return _LAUNCH + found.ctas * found.rows * problem.k / _LOADED + weights / rate


def _tiles(problem: WeightOnlyProduct) -> int:
    return math.ceil(problem.n / _ROWS) * problem.batch


def plan_few_rows(problem: WeightOnlyProduct, found: FewRows, gpu: Gpu) -> LaunchPlan:
    """Plan the kernel of few rows, with the buffers of ``plan_weight_only``."""
    has_zeros = problem.zero_dtype is not None
    epilogue = problem.epilogue
    read, outputs = (epilogue.operands, epilogue.outputs) if epilogue else ((), ())
    out = 3 + has_zeros + len(read)
    kernel = kernel_of(problem, found)
    compiled = compile_kernels(kernel, arch=gpu.arch)
    places = math.ceil(gpu.available_sms * found.ctas / problem.batch)
    launch = Launch(
        entry=compiled.entry(kernel.name),
        grid=(min(_tiles(problem) // problem.batch, places), problem.batch, 1),
        block=(WARP * found.warps * found.teams, 1, 1),
        parameters=(
            Buffer(0),
            Buffer(1),
            Buffer(2),
            Buffer(2 + has_zeros),
            Buffer(out),
            problem.shape_scalars(problem.k_tiles),
            Scalars.pack("i", problem.k),
            *(epilogue.parameters(out) if epilogue else ()),
        ),
        shared_memory_bytes=found.shared_memory_bytes(problem),
    )
    return LaunchPlan(
        name=f"weight_only_few_rows {problem.weights_name} {problem.dtype}",
        gpu=gpu,
        launches=overlapping(gpu, launch),
        alignments=(
            *(VECTOR_BYTES,) * 2,
            *(4,) * (1 + has_zeros),
            *(x.alignment for x in read),
            VECTOR_BYTES,
            *(x.alignment for x in outputs),
        ),
        reason=f"{problem.m} rows of x in shared memory, {problem.bits}-bit weights by registers",
    )


def kernel_of(problem: WeightOnlyProduct, found: FewRows) -> Kernel:
    """Return the kernel."""
    config = cxx_config(
        "FewRowsConfig",
        rows=found.rows,
        warps=found.warps,
        teams=found.teams,
        ctas=found.ctas,
        whole=problem.k % problem.block_k == 0,
    )
    dtypes = (problem.dtype, problem.scale_dtype, problem.zero_dtype or problem.scale_dtype)
    types = ", ".join(CXX_TYPES[x] for x in (*dtypes, problem.out_dtype))
    group = min(problem.group, problem.block_k) if problem.group < problem.k else problem.block_k
    zeros = "true" if problem.zero_dtype else "false"
    plain = Kernel(
        "gemm/sm90/weight_only_few_rows.cuh",
        f"tilekern::weight_only_few_rows<{types}, {problem.weights_type}, {config}, {group}, "
        f"{zeros}>",
    )
    if problem.epilogue is None:
        return plain
    return kernel_with_epilogue(
        plain,
        problem.epilogue,
        columns=problem.n,
        within_rows=problem.m == found.rows,
        within_columns=problem.n % _ROWS == 0,
        tile_columns=_ROWS,
    )

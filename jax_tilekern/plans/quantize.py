"""Plans of ``quantize.cuh``: a matrix in blocks, and a GPU, to a launch plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import Candidate, Costed
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16, F32, FP8
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu, xla_pass_us
from jax_tilekern.plans.launch import MAX_INT32, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.policy import plan_choice
from jax_tilekern.plans.policy.workload import Workload

# Rows and columns of a block.
BLOCK = 128
# Rows and columns of a thread, adjacent ones if rows are aligned.
_PATCH = 8
QUANTIZED_DTYPES = (BF16, F16, F32)
# Elements of a row that a scale may have besides whole rows, and the types of integers.
GROUPS = (32, 64, BLOCK)
INTEGERS = (np.dtype(ml_dtypes.int4), np.dtype(np.int8))
# The first GPUs that convert to 8-bit floats.
_CAPABILITY = (8, 9)


def fp8_type(what: str, dtype: Any) -> np.dtype[Any]:
    """Return a type as one of 8-bit floats; ``what`` begins the message about another one."""
    return _one_of(what, dtype, FP8, "float8_e4m3fn or float8_e5m2")


def quantized_type(what: str, dtype: Any) -> np.dtype[Any]:
    """Return a type as one of 8-bit floats and of 4- and 8-bit integers."""
    return _one_of(what, dtype, (*FP8, *INTEGERS), "float8_e4m3fn, float8_e5m2, int4 or int8")


def _one_of(what: str, dtype: Any, types: Collection[np.dtype[Any]], named: str) -> np.dtype[Any]:
    found: np.dtype[Any] | None = None
    with contextlib.suppress(TypeError):
        found = None if dtype is None else np.dtype(dtype)
    if found is None or found not in types:
        given = repr(dtype) if found is None else found
        raise TypeError(f"{what} {named}, not {given}")
    return found


def flag(what: str, value: Any) -> bool:
    """Return a value that is true or false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{what} is True or False, not {value!r}")
    return bool(value)


@dataclass(frozen=True)
class Quantized:
    """Matrices that are quantised in blocks."""

    # Sizes of the row-major array.
    matrices: int
    rows: int
    columns: int
    # Types of the elements, and of the quantised ones.
    dtype: np.dtype[Any]
    quantized: np.dtype[Any]
    square: bool  # whether blocks are 128x128, and not 1x128
    transposed: bool  # whether the transpose is quantised, too
    power_of_two: bool  # whether scales are powers of two

    @property
    def aligned(self) -> bool:
        """Whether rows, and those of a transpose, consist of whole vectors."""
        return self.columns % _PATCH == 0 and not (self.transposed and self.rows % _PATCH)

    @property
    def tile_rows(self) -> int:
        """Rows of a CTA's tile, which has 128 columns. Short tiles share SMs more evenly."""
        return BLOCK if self.square or self.transposed else 32

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of a matrix, in rows and in columns of them."""
        return math.ceil(self.rows / self.tile_rows), math.ceil(self.columns / BLOCK)

    @property
    def kernel(self) -> Kernel:
        types = f"{CXX_TYPES[self.dtype]}, {CXX_TYPES[self.quantized]}"
        flags = (self.square, self.transposed, self.power_of_two, self.aligned)
        text = ", ".join(str(int(flag)) for flag in flags)
        return Kernel("quantize.cuh", f"tilekern::quantize<{types}, {text}>")


# Microseconds of the kernel's launch, and of a pass of XLA's, which reads the array for the scales
# and again for the values; the shares of the bandwidth of both, and of the kernel where rows are
# unaligned. Measured on an H200: calls of 0.5 KB to 1.4 GB took 1.7 to 640 us.
_LAUNCH, _XLA_PASS = 1.6, 1.0
_SHARE, _UNALIGNED_SHARE = 0.85, 0.6


@dataclass(frozen=True)
class QuantizeCandidate(Candidate, Costed):
    """The kernel."""

    problem: Quantized
    cycles: float

    @property
    def key(self) -> str:
        return "tiles"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        problem, kernel = self.problem, self.problem.kernel
        tiles = problem.tiles
        # Without a transpose, the kernel does not use the last two.
        results = (1, 2, 3, 4) if problem.transposed else (1, 2, 1, 2)
        launch = Launch(
            entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
            grid=(problem.matrices * math.prod(tiles), 1, 1),
            block=(problem.tile_rows * BLOCK // _PATCH**2, 1, 1),
            parameters=(
                Buffer(0),
                *map(Buffer, results),
                Scalars.pack("q4i", problem.matrices, problem.rows, problem.columns, *tiles),
            ),
        )
        own = problem.dtype.itemsize
        read = min(VECTOR_BYTES, _PATCH * own) if problem.aligned else own
        written = (_PATCH if problem.aligned else 1, F32.itemsize)
        blocks = "128x128" if problem.square else "1x128"
        return LaunchPlan(
            name=f"quantize {problem.dtype}",
            gpu=gpu,
            launches=(launch,),
            alignments=(read, *written * (2 if problem.transposed else 1)),
            reason=f"{blocks}{', and of the transpose' if problem.transposed else ''}",
        )


def plan_quantize(problem: Quantized, transposed: Sequence[int], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the kernel; ``transposed`` has the size of an operand that a transpose makes."""
    if gpu.compute_capability < _CAPABILITY:
        return NoKernel(f"{gpu.arch} has no instruction that rounds to 8-bit floats")
    if problem.dtype not in QUANTIZED_DTYPES or problem.quantized not in FP8:
        return NoKernel(f"no kernel quantises {problem.dtype} to {problem.quantized}")
    ctas = problem.matrices * math.prod(problem.tiles)
    if max(ctas, problem.rows, problem.columns) > MAX_INT32 - BLOCK:
        return NoKernel("a launch has at most 2**31 CTAs")
    rates, elements = gpu.rates, problem.matrices * problem.rows * problem.columns
    read, written = elements * problem.dtype.itemsize, elements * (1 + problem.transposed)
    share = _SHARE if problem.aligned else _UNALIGNED_SHARE
    launches = _LAUNCH + sum(xla_pass_us(size, gpu) for size in transposed)
    cycles = launches * rates.cycles_per_microsecond
    cycles += (read + written) / (share * rates.memory_bandwidth)
    passes = 2 * (1 + problem.transposed)
    moved = (passes * read + written) / (_SHARE * rates.memory_bandwidth)
    workload = Workload(
        "quantize", 0, read + written, "", (),
        estimate=passes * _XLA_PASS + moved / rates.cycles_per_microsecond, is_xlas=False,
    )  # fmt: skip
    return plan_choice(workload, [QuantizeCandidate(problem, cycles)], gpu)

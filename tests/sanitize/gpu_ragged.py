"""Small ragged products on the GPU, to be run under compute-sanitizer; see ``.ci/sanitize``.

Groups begin and end anywhere, are empty or have all rows; what rows of no group hold must not
matter. Arguments are arithmetics, all by default, so that several processes can share the work.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from gpu_matmul import TYPES

sys.path.insert(0, str(Path(__file__).parent.parent))
from candidate_calls import jitted

import jax_tilekern as jtk
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.launch import NoKernel

# By arithmetic: racecheck, on one core, did not end in minutes with all of them.
PARTS = list(TYPES)
# The batch size for each kind of bounds below.
BATCH = 3


@dataclasses.dataclass(frozen=True)
class Call:
    """A product to run; ``order`` tells which operands are transposed in memory."""

    arithmetic: str
    ragged: Literal["m", "k"]
    order: str
    groups: int
    m: int
    n: int
    k: int

    @property
    def rows(self) -> int:
        """Rows of all groups, and of none."""
        return self.m if self.ragged == "m" else self.k


# Rows of whole vectors, output rows that are none, and all odd; more than a tile of rows.
SHAPES: list[tuple[Literal["m", "k"], tuple[str, ...], tuple[int, int, int, int]]] = [
    ("m", ("NN", "NT", "TN"), (7, 300, 144, 112)),
    ("m", ("NT",), (5, 261, 131, 112)),
    ("m", ("NN", "TT"), (4, 131, 61, 83)),
    ("m", ("NN", "NT"), (3, 200, 272, 208)),
    ("k", ("TN", "NN"), (7, 144, 272, 300)),
    ("k", ("TN",), (4, 520, 136, 150)),
    ("k", ("TN", "NT"), (5, 67, 61, 131)),
]
# A public call treats negative sizes as 0 and ends groups at the last row.
SIZES = [(-5, 30, -(2**31), 50), (2**31 - 1,) * 4, (0, 0, 0, 0), (7, 2**31 - 1, -1, 9)]


def operands(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return small integers: every sum is exact in every arithmetic, and 16 bits hold it."""
    rng = np.random.default_rng([call.groups, call.m, call.n, call.k])
    of_rhs = (call.groups,) if call.ragged == "m" else ()
    shapes = (BATCH, call.m, call.k), (BATCH, *of_rhs, call.k, call.n)
    lhs, rhs, _ = TYPES[call.arithmetic]
    return tuple(
        rng.integers(-1, 2, shape).astype(dtype)
        for shape, dtype in zip(shapes, (lhs, rhs), strict=True)
    )


def in_memory(x: np.ndarray, order: str) -> np.ndarray:
    """Return the array that an operand is a view of."""
    return np.ascontiguousarray(x.swapaxes(-1, -2) if order == "T" else x)


def out_shape(call: Call) -> tuple[int, ...]:
    """Return the result's shape."""
    return (BATCH, *(() if call.ragged == "m" else (call.groups,)), call.m, call.n)


def product_of(call: Call) -> Product:
    """Return the product of the operands as they lie in memory."""

    def strides(shape: tuple[int, ...], order: str, has_groups: bool) -> tuple[int, ...]:
        x = in_memory(np.empty(shape, np.int8), order)
        outer, matrix = x.strides[:-2], x.strides[-2:]
        return (*outer, *(() if has_groups else (0,)), *(matrix[::-1] if order == "T" else matrix))

    lhs, rhs = (x.shape for x in operands(call))
    of_rows = call.ragged == "m"
    geometry = MatmulGeometry(
        (BATCH, call.groups),
        call.m,
        call.n,
        call.k,
        strides(lhs, call.order[0], has_groups=False),
        strides(rhs, call.order[1], has_groups=of_rows),
        strides(out_shape(call), "N", has_groups=not of_rows),
    )
    ragged = GroupedGeometry.of(geometry, call.ragged, (call.groups + 1,))
    return Product(ragged, *map(np.dtype, TYPES[call.arithmetic]), call.arithmetic)


def kinds_of_bounds(call: Call) -> list[np.ndarray]:
    """Return bounds of all batches, twice: each batch has its own kind."""
    groups, rows = call.groups, call.rows
    rng = np.random.default_rng(rows)
    anywhere = np.sort(rng.integers(0, rows + 1, groups + 1))
    nowhere = np.full(groups + 1, rng.integers(1, rows))
    one_has_all = np.where(np.arange(groups + 1) > groups // 2, rows, 0)
    everywhere = np.sort(rng.integers(0, rows + 1, groups + 1))
    everywhere[0], everywhere[-1] = 0, rows
    single_rows = np.arange(groups + 1) + 65
    last_rows = np.maximum(rows - 3 * np.arange(groups, -1, -1), 0)
    return [
        np.asarray(kinds, np.int32)
        for kinds in ((anywhere, nowhere, one_has_all), (everywhere, single_rows, last_rows))
    ]


def expected_and_operands(
    call: Call, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the result, and operands with NaN, where types have it, in rows of no group."""
    lhs, rhs = operands(call)
    left, right = lhs.astype(np.float64), rhs.astype(np.float64)
    expected = np.zeros(out_shape(call))
    for b in range(BATCH):
        for g, rows in enumerate(map(slice, bounds[b, :-1], bounds[b, 1:])):
            if call.ragged == "m":
                expected[b, rows] = left[b, rows] @ right[b, g]
            else:
                expected[b, g] = left[b, :, rows] @ right[b, rows]
        no_group = np.r_[0 : bounds[b, 0], bounds[b, -1] : call.rows]
        if call.arithmetic != "int8":
            if call.ragged == "m":
                lhs[b, no_group] = np.nan
            else:
                lhs[b, :, no_group] = rhs[b, no_group] = np.nan
    return expected, in_memory(lhs, call.order[0]), in_memory(rhs, call.order[1])


def choices() -> list[tuple[Call, Candidate]]:
    """Choose kernels for each call: of every family the one that was chosen least so far."""
    gpu = current_gpu()
    used: Counter[str] = Counter()
    chosen: list[tuple[Call, Candidate]] = []
    for arithmetic in TYPES:
        for ragged, orders, sizes in SHAPES:
            for order in orders:
                call = Call(arithmetic, ragged, order, *sizes)
                found = candidates(product_of(call), gpu)
                if isinstance(found, NoKernel):
                    continue
                keys = {choice: f"{arithmetic} {ragged} {choice.key}" for choice in found}
                found.sort(key=lambda choice, keys=keys: (used[keys[choice]], used[choice.key]))
                for choice in {type(choice): choice for choice in reversed(found)}.values():
                    used.update((keys[choice], choice.key))
                    chosen.append((call, choice))
    return chosen


def check_products(arithmetics: list[str]) -> int:
    """Run every product; return how many were wrong."""
    gpu = current_gpu()
    work = [item for item in choices() if item[0].arithmetic in arithmetics]
    # NVRTC compiles on as many cores as there are; under a sanitizer all of it is cached.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        plans = list(pool.map(lambda item: item[1].plan(gpu), work))
    wrong = []
    for (call, candidate), plan in zip(work, plans, strict=True):
        for bounds in kinds_of_bounds(call):
            expected, lhs, rhs = expected_and_operands(call, bounds)
            dtype = np.dtype(TYPES[call.arithmetic][2])
            result = jitted(plan, out_shape(call), dtype)(lhs, rhs, bounds)
            got = np.asarray(result).astype(np.float64)
            # bfloat16 results beyond 256 are rounded.
            if not np.allclose(got, expected, rtol=2.0**-8, atol=0):
                wrong.append(f"{call} by {candidate.key}")
    kinds = len({candidate.key for _, candidate in work})
    print(f"ragged: {len(work)} products, {kinds} kinds, {len(wrong)} wrong {wrong or ''}")
    return len(wrong)


def check_sizes() -> int:
    """Run public calls with sizes that make no sense; return how many were wrong."""
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-1, 2, shape).astype(np.float32) for shape in ((70, 96), (4, 96, 64)))
    wrong = []
    for sizes in SIZES:
        expected, begin = np.zeros((70, 64)), 0
        for size, matrix in zip(sizes, rhs.astype(np.float64), strict=True):
            end = min(begin + max(size, 0), len(lhs))
            expected[begin:end] = lhs[begin:end] @ matrix
            begin = end
        got = np.asarray(jax.jit(jtk.ragged_dot)(lhs, rhs, np.asarray(sizes, np.int32)))
        if not np.array_equal(got, expected):
            wrong.append(sizes)
    print(f"group sizes: {len(SIZES)}, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    with jax.enable_x64(True):
        sys.exit(check_products(sys.argv[1:] or list(TYPES)) + check_sizes() > 0)

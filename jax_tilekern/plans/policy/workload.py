"""A call as numbers: what predictions of its time depend on."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_tilekern.plans.candidate import Costed, CostedCandidate
from jax_tilekern.plans.cpu import Cpu
from jax_tilekern.plans.gemm.geometry import distinct_matrices
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.policy.xla_sorts import xla_sort_us

if TYPE_CHECKING:
    from jax_tilekern.plans.add import AddedDims
    from jax_tilekern.plans.attention.problem import Pass
    from jax_tilekern.plans.gemm.problem import Product
    from jax_tilekern.plans.reduction.problem import SummedDims
    from jax_tilekern.plans.transpose.permutation import Permutation

# Each is a feature.
FEATURED_ARITHMETICS = (
    "bf16", "f16", "tf32", "f32", "f32_emulated", "f64", "int8", "fp8", "fp8_fast",
)  # fmt: skip
_SHORT_NAMES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
# Data counts a feature for each; no candidate of a product has the last two.
_FAMILIES = ("wgmma", "split", "small", "mma", "simt", "rows", "columns")
# Common tiles, and the SMs of the GPUs that share them.
_TILE, _SMS = 128, 132
_MOST_ZEROS = 7
_XLA_BATCHED, _SMALL_SYMMETRIC = 32, 4
# The operation of a product with an epilogue.
FUSED = "fused product"
ATTENTION = "attention"  # values and gradients
# Those of float32, of which there are estimates alone.
ATTENTION_OF_FLOAT32 = "attention of float32"


@dataclass(frozen=True)
class Workload:
    """The work of a call, as numbers."""

    # Which model predicts it: "product", "vector product" (that the kernel of sums computes on
    # GPUs), "fused product", "attention", "matrix svd", "sum", "transpose" or "add".
    operation: str
    operations: float  # multiply-adds
    bytes: float  # that are read and written, each once
    arithmetic: str  # of the multiply-adds
    features: tuple[float, ...]
    product: Product | None = None
    # XLA's microseconds by other models. Data, if there are any, correct this in place of a
    # roofline, and where there are none it stands.
    estimate: float | None = None
    # Whether XLA computes it on devices without data.
    is_xlas: bool = True
    # Whether XLA calls a library, whose kernels begin as late in a program as a custom call's.
    by_library: bool = False


def product_workload(product: Product) -> Workload:
    g = product.geometry
    arithmetic = _SHORT_NAMES.get(product.arithmetic, product.arithmetic)
    batch = math.prod(g.batch)
    arrays = (
        (g.lhs_strides, g.m * g.k, product.lhs_dtype.itemsize),
        (g.rhs_strides, g.k * g.n, product.rhs_dtype.itemsize),
        (g.out_strides, g.m * g.n, product.out_dtype.itemsize),
    )
    total = sum(distinct_matrices(g.batch, s) * size * item for s, size, item in arrays)
    tiles = batch * math.ceil(g.m / _TILE) * math.ceil(g.n / _TILE)
    features = (
        *map(math.log2, (batch, g.m, g.n, g.k, batch * g.m * g.n * g.k, tiles)),
        math.ceil(tiles / _SMS) * _SMS / tiles,
        *map(_trailing_zeros, (g.m, g.n, g.k)),
        g.lhs_strides[-1] == 1,
        g.rhs_strides[-2] == 1,
        *(_aligned_bytes(s, item) for s, _, item in arrays),
        *(item for *_, item in arrays),
        # An operand that all matrices of a batch share, and a batch that lies inside a matrix.
        *(_is_broadcast(s, g.batch) for s, *_ in arrays[:2]),
        *(bool(g.batch) and s[0] < max(s[-2:]) for s, *_ in arrays),
        *(arithmetic == name for name in FEATURED_ARITHMETICS),
    )
    operations = batch * g.m * g.n * g.k
    return Workload("product", operations, total, arithmetic, tuple(map(float, features)), product)


def fused_workload(product: Product, estimate: float) -> Workload:
    """Return the work of a product with an epilogue, of which XLA takes about ``estimate`` us."""
    epilogue, work = product.epilogue, product_workload(product)
    assert epilogue is not None
    matrices = (all(x.strides[-2:]) for x in epilogue.operands)
    features = (
        math.log2(1 + product.epilogue_bytes),
        epilogue.instructions,
        sum(matrices),
        len(epilogue.operands),
        len(epilogue.results),
        len(epilogue.reductions),
    )
    return dataclasses.replace(
        work,
        operation=FUSED,
        bytes=work.bytes + product.epilogue_bytes,
        features=(*work.features, *map(float, features)),
        estimate=estimate,
    )


def _aligned_bytes(strides: Sequence[int], itemsize: int) -> int:
    return math.gcd(VECTOR_BYTES, max(strides[-2:]) * itemsize)


def _is_broadcast(strides: Sequence[int], batch: Sequence[int]) -> bool:
    return any(s == 0 and size > 1 for s, size in zip(strides, batch, strict=False))


def _trailing_zeros(size: int) -> int:
    return min(_MOST_ZEROS, (size & -size).bit_length() - 1)


def candidate_numbers(
    candidate: Any, first: Any, workload: Workload, device: Gpu | Cpu
) -> tuple[float, ...]:
    """Return the numbers of a candidate: its estimate, and what its key says of a product's tile.

    ``first`` is the candidate with the best estimate. A candidate without an estimate has no
    numbers.
    """
    if not (isinstance(candidate, Costed) and isinstance(device, Gpu)):
        return ()
    estimates = math.log2(candidate.cycles), math.log2(candidate.cycles / first.cycles)
    if not (isinstance(candidate, CostedCandidate) and workload.operation in ("product", FUSED)):
        return (*estimates, *candidate.numbers)
    tile = _tile_of(candidate.key)
    batch, m, n = (2**x for x in workload.features[:3])
    if tile.swapped:
        m, n = n, m
    tiles = batch * math.ceil(m / tile.rows) * math.ceil(n / tile.columns) * tile.splits
    return (
        *estimates,
        *tile.families,
        *map(math.log2, (tile.rows, tile.columns, tile.splits, tiles)),
        math.ceil(tiles / device.sm_count) * device.sm_count / tiles,
        *tile.variant,
    )


class _Tile(NamedTuple):
    """The tile of a product, from a candidate's key."""

    rows: int
    columns: int
    splits: int
    swapped: bool
    families: tuple[float, ...]
    variant: tuple[float, ...]


@functools.lru_cache(maxsize=1024)
def _tile_of(key: str) -> _Tile:
    tile, splits = re.search(r"(\d+)x(\d+)", key), re.search(r"in (\d+) splits", key)
    warps = re.search(r"by (\d+)x(\d+)x(\d+)", key)
    rows, columns = (int(x) for x in tile.groups()) if tile else (1, 1)
    family = key.partition(" ")[0]
    return _Tile(
        rows,
        columns,
        int(splits[1]) if splits else 1,
        "swapped" in key,
        tuple(float(family == name) for name in _FAMILIES),
        (
            *(float(word in key) for word in ("swapped", "ping-pong")),
            *(map(float, warps.groups()) if warps else (0.0, 0.0, 0.0)),
        ),
    )


def attention_workload(call: Pass, estimate: float) -> Workload:
    """Return the work of a pass of attention, of which XLA takes about ``estimate`` us."""
    sizes = call.sizes
    heads = sizes.batch * sizes.heads
    tiles = heads * math.ceil(sizes.queries / _TILE)
    features = (
        *map(math.log2, (heads, sizes.queries, sizes.keys, sizes.features, sizes.value_features)),
        math.log2(sizes.heads / sizes.key_heads),
        math.log2(heads * sizes.queries * sizes.keys * call.share),
        math.log2(tiles),
        math.ceil(tiles / _SMS) * _SMS / tiles,
        call.share,
        call.is_gradient,
        call.has_mask,
        call.has_window,
        call.has_score,
        call.arrays,
        call.of_bias,
        call.of_arrays,
        *(sizes.dtype.name == name for name in ("bfloat16", "float16")),
    )
    arithmetic = _SHORT_NAMES[sizes.dtype.name]
    is_wide = sizes.dtype.itemsize > 2
    operation = ATTENTION_OF_FLOAT32 if is_wide else ATTENTION
    return Workload(
        operation, call.operations, call.bytes, arithmetic, tuple(map(float, features)),
        estimate=estimate, is_xlas=False,
    )  # fmt: skip


def matrices_workload(
    kernel: str,
    sizes: tuple[int, int, int],
    sides: int,
    dtype: np.dtype[Any],
    *,
    vectors: bool = True,
) -> Workload:
    """Return the work of a batch of small matrices.

    Features are of one scale: between calls that differ by one, times differ about alike.

    Parameters
    ----------
    kernel
        Such as "svd" or "inverse".
    sizes
        The number of matrices, their rows, and their columns.
    sides
        Right-hand sides of a system, or 0.
    vectors
        Whether a decomposition has vectors.
    """
    count, rows, columns = sizes
    least, most = sorted((rows, columns))
    features = (
        math.log2(max(1, count)) / 2,
        *(math.log2(max(1, size)) for size in (least, most)),
        math.log2(1 + sides),
        dtype.itemsize > 4,
        vectors,
        # XLA decomposes one matrix, and larger ones, by other functions than batches.
        2 * (count == 1),
        2 * (most > _XLA_BATCHED),
    )
    return Workload(
        f"matrix {kernel}",
        count * rows * columns * (least + sides),
        count * rows * (2 * columns + sides) * dtype.itemsize,
        _SHORT_NAMES[dtype.name],
        tuple(map(float, features)),
        # On an H200 kernels are faster at almost all sizes, but for eigenvectors.
        is_xlas=kernel == "eigh" and rows > _SMALL_SYMMETRIC,
        by_library=True,
    )


def sum_workload(dims: SummedDims, dtype: np.dtype[Any], out_dtype: np.dtype[Any]) -> Workload:
    sizes, reduced = dims.sizes or (1,), dims.reduced or (True,)
    elements = math.prod(sizes)
    k = math.prod(size for size, is_reduced in zip(sizes, reduced, strict=True) if is_reduced)
    total = elements * dtype.itemsize + elements // k * out_dtype.itemsize
    features = (
        *map(math.log2, (elements, k, elements / k, sizes[-1], sizes[-2] if sizes[1:] else 1)),
        reduced[-1],
        len(sizes),
        dtype.itemsize,
        out_dtype.itemsize,
        math.gcd(VECTOR_BYTES, sizes[-1] * dtype.itemsize),
        *(dtype.kind == kind for kind in "ifc"),
    )
    return Workload("sum", 0, total, "", tuple(map(float, features)))


def transpose_workload(permutation: Permutation) -> Workload:
    widened = permutation.widened
    sizes, order, itemsize = widened.sizes or (1,), widened.order or (0,), widened.itemsize
    rows, columns = sizes[order[-1]], sizes[-1]
    features = (
        *map(math.log2, (math.prod(sizes), rows, columns)),
        itemsize,
        len(sizes),
        widened.keeps_innermost,
        order[-1],
        order.index(len(sizes) - 1),
        math.gcd(VECTOR_BYTES, rows * itemsize),
        math.gcd(VECTOR_BYTES, columns * itemsize),
    )
    return Workload("transpose", 0, 2 * permutation.size_bytes, "", tuple(map(float, features)))


def add_workload(dims: AddedDims, dtype: np.dtype[Any]) -> Workload:
    read = [
        math.prod(size for size, stride in zip(dims.sizes, strides, strict=True) if stride)
        for strides in (dims.lhs_strides, dims.rhs_strides)
    ]
    elements, columns = math.prod(dims.sizes), dims.sizes[-1]
    features = (
        *map(math.log2, (elements, columns, *sorted(read))),
        len(dims.sizes),
        dims.lhs_strides[-1] == dims.rhs_strides[-1],
        dtype.itemsize,
        math.gcd(VECTOR_BYTES, columns * dtype.itemsize),
        *(dtype.kind == kind for kind in "iuf"),
    )
    total = (elements + sum(read)) * dtype.itemsize
    return Workload("add", 0, total, "", tuple(map(float, features)))


def weight_workload(
    multiply_adds: float, weight_bytes: float, dtype: np.dtype[Any], estimate: float
) -> Workload:
    """Return the work of a product by integers, of which XLA takes about ``estimate`` us."""
    return Workload(
        "product by weights", multiply_adds, weight_bytes, _SHORT_NAMES[dtype.name], (),
        estimate=estimate,
    )  # fmt: skip


def sort_workload(rows: int, columns: int, dtype: np.dtype[Any], indices: bool = False) -> Workload:
    """Return the work of a sort of rows, with an estimate of XLA's time."""
    elements = rows * columns
    features = (
        *map(math.log2, (rows, columns)),
        dtype.itemsize,
        dtype.kind in "iu",
    )
    estimate = xla_sort_us(rows, columns, dtype.itemsize, indices)
    total = 2 * elements * dtype.itemsize
    return Workload("sort", 0, total, "", tuple(map(float, features)), estimate=estimate)

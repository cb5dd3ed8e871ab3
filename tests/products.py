"""Matrix products to plan for, given or random, that tests of planners share."""

import dataclasses

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.config import MMA_ARITHMETICS
from jax_tilekern.plans.gpu import KNOWN_GPUS, known_gpu
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.launch import NoKernel

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)

MODERN = [gpu for gpu in KNOWN_GPUS if gpu.compute_capability >= (8, 0)]
H100 = known_gpu("sm_90")

# Types that lead to each arithmetic.
TYPES = {
    "bf16": (BF16, BF16, BF16),
    "f16": (F16, F16, F16),
    "tf32": (F32, F32, F32),
    "f32": (F32, F32, F32),
    "f64": (F64, F64, F64),
    "int8": (INT8, INT8, INT32),
    "fp8": (E4M3, E5M2, F32),
    "fp8_fast": (E5M2, E4M3, BF16),
}


def batch_strides(batch, step, broadcast=()):
    """Strides of row-major batch dimensions of matrices `step` apart; 0 where broadcast."""
    strides = []
    for dim, size in reversed(list(enumerate(batch))):
        strides.insert(0, 0 if dim in broadcast else step)
        step *= 1 if dim in broadcast else size
    return tuple(strides)


def row_major(m, n, k, batch=(), *, lhs_k_major=True, rhs_k_major=False, padding=0, broadcast=()):
    """Geometry of arrays in row-major order, rows `padding` elements apart.

    `broadcast` has the batch dimensions that lhs is broadcast over.
    """

    def strides(rows, columns, transposed, broadcast):
        row = (rows if transposed else columns) + padding
        outer = batch_strides(batch, row * (columns if transposed else rows), broadcast)
        return (*outer, *((1, row) if transposed else (row, 1)))

    return MatmulGeometry(
        batch=tuple(batch),
        m=m,
        n=n,
        k=k,
        lhs_strides=strides(m, k, not lhs_k_major, broadcast),
        rhs_strides=strides(k, n, rhs_k_major, ()),
        out_strides=strides(m, n, False, ()),
    )


def product_of(arithmetic, *sizes, types=None, **layout):
    """A product of row-major arrays; see `row_major`."""
    return Product(row_major(*sizes, **layout), *(types or TYPES[arithmetic]), arithmetic)


def ragged_product_of(arithmetic, ragged, groups, *sizes, batch=(), types=None, **layout):
    """A ragged product of row-major arrays: one that has groups, and two that have not."""
    geometry = row_major(*sizes, **layout)
    m, n, k = sizes
    grouped = {"m": "rhs", "k": "out"}[ragged]
    strides = {}
    for name, matrix in (("lhs", (m, k)), ("rhs", (k, n)), ("out", (m, n))):
        own = getattr(geometry, f"{name}_strides")
        # The outer of the two dimensions has the larger, whatever the rows' padding.
        step = max(size * stride for size, stride in zip(matrix, own, strict=True))
        has_groups = name == grouped
        outer = batch_strides(batch, step * (groups if has_groups else 1))
        strides[f"{name}_strides"] = (*outer, step if has_groups else 0, *own)
    geometry = dataclasses.replace(geometry, batch=(*batch, groups), **strides)
    bounds_strides = batch_strides(batch, groups + 1)
    grouped = GroupedGeometry.of(geometry, ragged, bounds_strides)
    return Product(grouped, *(types or TYPES[arithmetic]), arithmetic)


def taken(family, product, gpu):
    """Candidates of a family of kernels; none if it does not take the product."""
    if product.arithmetic not in family.arithmetics:
        return []
    found = family.candidates(product, gpu)
    return [] if isinstance(found, NoKernel) else found


def geometries(sizes, most_batch_dims):
    """Geometries of row-major arrays, of sizes from a strategy."""
    return st.builds(
        row_major,
        m=sizes,
        n=sizes,
        k=sizes,
        batch=st.lists(st.integers(1, 5), max_size=most_batch_dims),
        lhs_k_major=st.booleans(),
        rhs_k_major=st.booleans(),
        padding=st.sampled_from([0, 0, 1, 4, 8]),
        broadcast=st.sets(st.integers(0, 3)),
    )


@st.composite
def products(draw, arithmetics, geometries):
    """A product in one of `arithmetics`, of types that it takes."""
    name = draw(st.sampled_from(sorted(arithmetics)))
    how = MMA_ARITHMETICS[name]
    operands = st.sampled_from(how.types.operands)
    types = (draw(operands), draw(operands), draw(st.sampled_from(how.types.results)))
    return Product(draw(geometries), *types, name)

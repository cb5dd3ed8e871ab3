"""Products and sums that are left to XLA, whose kernels were measured or predicted to be faster.

Ratios are XLA's time over ours on an H100 (``docs/tuning-log.md``). Tuning a product overrides
these rules.
"""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.arithmetic import FP8
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.xla_cost import load_costs, xla_microseconds
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.reduction.problem import Reduction

_SIXTEEN_BITS = ("bf16", "f16")
# Shorter products are bound by their launch.
_LONG_MICROSECONDS = 10
# Dot products of fewer bytes take little longer than their two launches.
_SHORT_DOT_BYTES = 256 << 20
_SHORT_ROW_BYTES = 256
# XLA's sums of fewer bytes than this takes are faster, by rows and by columns. It casts 8-bit
# integers first, and takes up to 2.9 times as long for the longer ones.
_SHORT_SUM_MICROSECONDS, _SHORT_8_BIT_SUM_MICROSECONDS = 10, 6
# So few rows are added up in the registers of one thread of XLA's kernel.
_FEW_ROWS, _FEW_ROWS_OF_8_BITS = 8, 64
_FEW_RESULTS = 128 * 128
_SHORT_FP8 = 256
# From these sizes on, cuBLAS takes less time than the cost model of XLA says; in float8 that is an
# m and n, and a k.
_LARGE_INT8 = 512
_LARGE_FP8, _LONG_FP8 = 512, 3584
# A kernel has to be predicted to take at most this part of XLA's time. With 0.95, 23 % instead of
# 12 % of 56 unseen kernels took over 1.03 times XLA's time, and the mean was no better.
_REQUIRED = 0.9
# The same for short products, of which XLA's time is estimated worse. With 0.9, 9 instead of 4 of
# 39 kernels took over 1.03 times XLA's time, and the mean was 1.16 instead of 1.18.
_REQUIRED_SHORT = 0.85
# XLA's time is estimated worse in float64: 0.55 to 1.5 times what 9 products took.
_REQUIRED_F64 = 0.6
# XLA doubles products of int8 into int32 over a k that is no multiple of 4, in 82 of 171 that were
# tried, all below 128; of 48 from 128 to 255 it doubled none (H100, jax 0.11.2). Float16 has all
# integers of 8 bits, and their sums are exact in float32. That took 1.1 times as long in the mean.
_SHORT_INTEGER_K, _WORD = 128, 4
_AS_FLOAT16 = 1.1
# Kernels took longer than their cost model predicts, by this part of the time of writing the result
# (regression over 222 products).
_EXPOSED_STORES = 0.4
# XLA's products of a vector are faster below these: of contiguous rows of one matrix, in float64,
# and of a batch; of columns of one matrix and of a batch.
_ROWS_MICROSECONDS, _F64_ROWS_MICROSECONDS, _BATCHED_ROWS_MICROSECONDS = 10.0, 40.0, 50.0
_COLUMNS_MICROSECONDS, _BATCHED_COLUMNS_MICROSECONDS = 0.3, 20.0
_SHORT_VECTOR, _FEW_COLUMNS = 32, 16
_SHORT_COLUMN, _SHORT_COLUMNS_MICROSECONDS = 128, 3.0
_SHORT_F64_ROW = 128
# Rows that do not begin at multiples of 16 bytes are read in small pieces, which costs less the
# longer they are.
_ALIGNMENT, _LONG_ROW_BYTES = 16, 1 << 15


def sum_left_to_xla(reduction: Reduction, gpu: Gpu) -> str | None:
    """Return why a sum is XLA's, or ``None``."""
    if gpu.compute_capability != (9, 0):
        return None
    # A total of complex numbers is two sums, of the real and of the imaginary parts.
    if reduction.outputs <= 2 and math.prod(reduction.batch) == 1:
        return "XLA's totals are faster (0.74 to 0.99)"
    row_bytes = reduction.k * reduction.dtype.itemsize
    if reduction.lhs_strides[-1] == 1 and row_bytes < _SHORT_ROW_BYTES:
        return f"XLA's sums of rows of {row_bytes} bytes are faster (0.76)"
    return None


def small_sum_left_to_xla(reduction: Reduction, gpu: Gpu) -> str | None:
    """Return why a short sum is XLA's, or ``None``."""
    if gpu.compute_capability != (9, 0):
        return None
    microseconds = reduction.bytes / gpu.rates.memory_bandwidth / gpu.rates.cycles_per_microsecond
    is_8_bit = reduction.dtype.itemsize == 1
    if microseconds < (_SHORT_8_BIT_SUM_MICROSECONDS if is_8_bit else _SHORT_SUM_MICROSECONDS):
        return "XLA's short sums are faster (0.64 to 1.02)"
    if reduction.lhs_strides[-1] == 1:
        return None
    if reduction.k < (_FEW_ROWS_OF_8_BITS if is_8_bit else _FEW_ROWS):
        return f"XLA's sums of {reduction.k} rows are faster (0.53 to 0.64)"
    return None


def predicted_to_be_xlas(product: Product, cycles: float, gpu: Gpu) -> str | None:
    """Return why XLA's kernel of a product is predicted to be faster, or ``None``.

    Parameters
    ----------
    product
        What is computed.
    cycles
        What the cheapest of our kernels takes, by the cost model.
    gpu
        What it is for.
    """
    geometry = product.geometry
    if gpu.compute_capability != (9, 0):
        return None
    per_microsecond = gpu.rates.cycles_per_microsecond
    if min(geometry.m, geometry.n) == 1:
        memory = product.memory_cycles(gpu) / per_microsecond
        return _short_product_with_a_vector(product, memory)
    results = math.prod(geometry.batch) * geometry.m * geometry.n
    if product.lhs_dtype in FP8 and not geometry.batch:
        # XLA pads and transposes these first in most cases, which the cost model leaves out.
        if geometry.k < _SHORT_FP8:
            return f"XLA's float8 products over {geometry.k} elements are faster (0.37 to 0.95)"
        if results > _FEW_RESULTS:
            return None
    ours = our_microseconds(product, cycles, gpu)
    xlas = xla_microseconds(product, gpu, load_costs())
    if product.arithmetic == "int8" and is_short_sum_of_integers(geometry.k):
        xlas *= _AS_FLOAT16
    if product.arithmetic == "f64":
        required = _REQUIRED_F64
    else:
        required = _REQUIRED if _is_long(xlas) else _REQUIRED_SHORT
    if ours <= required * xlas:
        return None
    return (
        f"XLA's kernel is predicted to take {xlas:.1f} us, ours {ours:.1f} us, "
        f"which is not {1 - required:.0%} less"
    )


def is_short_sum_of_integers(k: int) -> bool:
    """Return whether XLA may get a product of int8 wrong, which it then multiplies as float16."""
    return k < _SHORT_INTEGER_K and k % _WORD != 0


def our_microseconds(product: Product, cycles: float, gpu: Gpu) -> float:
    """Return what our kernel takes; see :func:`predicted_to_be_xlas`."""
    geometry = product.geometry
    results = math.prod(geometry.batch) * geometry.m * geometry.n
    stores = results * product.out_dtype.itemsize / gpu.rates.memory_bandwidth
    # The cost model has the time of single elements, which unaligned rows are stored by.
    aligned = max(geometry.out_strides[-2:]) * product.out_dtype.itemsize % _ALIGNMENT == 0
    exposed = _EXPOSED_STORES * stores if aligned else 0
    return (cycles + exposed) / gpu.rates.cycles_per_microsecond


def _short_product_with_a_vector(product: Product, memory: float) -> str | None:
    """Return why such a product is XLA's, or ``None``; ``memory`` is its time in microseconds."""
    geometry = product.geometry
    batched = math.prod(geometry.batch) > 1
    by_rows = (geometry.lhs_strides[-1] if geometry.n == 1 else geometry.rhs_strides[-2]) == 1
    if geometry.k < _SHORT_VECTOR and (batched or by_rows):
        return f"XLA's products with vectors of {geometry.k} elements are faster (0.5 to 0.85)"
    if not by_rows and max(geometry.m, geometry.n) < _FEW_COLUMNS:
        return "XLA's products of a vector with few columns are faster (0.53 to 0.84)"
    if by_rows and _has_unaligned_rows(product):
        return "XLA's products of a vector with unaligned rows are faster (0.64 to 0.93)"
    if by_rows and product.arithmetic == "f64" and geometry.k < _SHORT_F64_ROW:
        return f"XLA's float64 products with rows of {geometry.k} elements are faster (0.69)"
    is_short = memory < _SHORT_COLUMNS_MICROSECONDS and geometry.k < _SHORT_COLUMN
    if not by_rows and not batched and is_short:
        return f"XLA's products of a vector with columns of {geometry.k} are faster (0.73 to 0.98)"
    if by_rows:
        of_one = _F64_ROWS_MICROSECONDS if product.arithmetic == "f64" else _ROWS_MICROSECONDS
        least = _BATCHED_ROWS_MICROSECONDS if batched else of_one
    else:
        least = _BATCHED_COLUMNS_MICROSECONDS if batched else _COLUMNS_MICROSECONDS
    if memory < least:
        return "XLA's short products with a vector are faster (0.5 to 0.98)"
    return None


def _has_unaligned_rows(product: Product) -> bool:
    """Return whether rows, of which there are several, are short and not aligned to vectors."""
    row_bytes = product.geometry.k * product.lhs_dtype.itemsize
    return row_bytes % _ALIGNMENT != 0 and row_bytes < _LONG_ROW_BYTES


def left_to_xla(product: Product, gpu: Gpu) -> str | None:
    """Return why a product is XLA's, or ``None``."""
    if gpu.compute_capability != (9, 0):
        return None
    geometry, arithmetic = product.geometry, product.arithmetic
    m, n, k = geometry.m, geometry.n, geometry.k
    batches = math.prod(geometry.batch)
    is_long = _is_long(product.memory_cycles(gpu) / gpu.rates.cycles_per_microsecond)
    if m == n == 1:
        # In 16 bits they would be sums in float32 there, which take 1.5 times as long.
        if batches > 1 and _has_unaligned_rows(product) and arithmetic not in _SIXTEEN_BITS:
            return "XLA's dot products of unaligned vectors are faster (0.89 to 0.93)"
        short = 2 * k * batches * product.lhs_dtype.itemsize < _SHORT_DOT_BYTES
        if short:
            return "XLA's dot products of short vectors are faster (0.83 to 0.95)"
        return None
    if min(m, n) == 1 and is_long and arithmetic in (*_SIXTEEN_BITS, "tf32", "f32"):
        strides, dtype = (
            (geometry.lhs_strides[-2:], product.lhs_dtype)
            if n == 1
            else (geometry.rhs_strides[:-3:-1], product.rhs_dtype)
        )
        if strides[0] == 1 and strides[1] * dtype.itemsize % 16 == 0:
            return "XLA's products of a vector with a matrix's columns are faster (0.94 to 0.99)"
    both_k_major = geometry.lhs_strides[-1] == 1 and geometry.rhs_strides[-2] == 1
    is_cublas = both_k_major and k % _ALIGNMENT == 0 and batches == 1
    is_large = min(m, n) >= _LARGE_FP8 and k >= _LONG_FP8
    # XLA pads an n that is not aligned.
    if arithmetic == "fp8_fast" and is_cublas and is_large and n % _ALIGNMENT == 0:
        return "XLA's large float8 products of two k-major operands are faster (0.85 to 1.01)"
    if arithmetic == "int8" and is_cublas and min(m, n, k) >= _LARGE_INT8:
        return "XLA's large int8 products of two k-major operands are mostly faster (0.81 to 1.16)"
    return None


def _is_long(microseconds: float) -> bool:
    return microseconds > _LONG_MICROSECONDS

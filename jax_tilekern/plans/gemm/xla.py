"""What is left to XLA although there is a kernel, because its own was measured to be faster.

Ratios are XLA's time over ours on an H100 (``docs/tuning-log.md``). Where somebody has tuned a
product, that decides instead.
"""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.reduction.problem import Reduction

_SIXTEEN_BITS = ("bf16", "f16")
# Shorter products are bound by their launch.
_LONG_MICROSECONDS = 10
# Fewer bytes than this take little longer than the two launches.
_SHORT_DOT_BYTES = 256 << 20
_SHORT_ROW_BYTES = 256


def sum_left_to_xla(reduction: Reduction, gpu: Gpu) -> str | None:
    """Return why a sum is XLA's, or ``None``."""
    if gpu.compute_capability != (9, 0):
        return None
    if reduction.dtype.kind not in "iub" and reduction.lines == math.prod(reduction.batch) == 1:
        return "XLA's totals of floats are faster (0.77 to 0.99)"
    row_bytes = reduction.k * reduction.dtype.itemsize
    if reduction.lhs_strides[-1] == 1 and row_bytes < _SHORT_ROW_BYTES:
        return f"XLA's sums of rows of {row_bytes} bytes are faster (0.76)"
    return None


def left_to_xla(product: Product, gpu: Gpu) -> str | None:
    """Return why a product is XLA's, or ``None``."""
    if gpu.compute_capability != (9, 0):
        return None
    geometry, arithmetic = product.geometry, product.arithmetic
    m, n, k = geometry.m, geometry.n, geometry.k
    batches = math.prod(geometry.batch)
    is_long = product.memory_cycles(gpu) > _LONG_MICROSECONDS * gpu.rates.cycles_per_microsecond
    if arithmetic == "f64" and min(m, n, k) >= 1024:
        return "XLA's large float64 products are faster (0.91 to 0.93)"
    if arithmetic == "tf32" and is_long and batches > 1 and max(m, n, k) <= 32:
        return "XLA's many small float32 products are faster (0.76 for matrices of 16)"
    if m == n == 1:
        # Of 16-bit operands XLA rounds each product to 16 bits.
        short = 2 * k * batches * product.lhs_dtype.itemsize < _SHORT_DOT_BYTES
        if short and arithmetic not in _SIXTEEN_BITS:
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
    if arithmetic in _SIXTEEN_BITS and is_long and min(m, n) > 1:
        return _left_16_bit(product)
    both_k_major = geometry.lhs_strides[-1] == 1 and geometry.rhs_strides[-2] == 1
    if arithmetic == "fp8_fast" and both_k_major and min(m, n, k) >= 4096:
        return "XLA's large float8 products of two k-major operands are faster (0.96)"
    return None


def _left_16_bit(product: Product) -> str | None:
    geometry = product.geometry
    m, n, k = geometry.m, geometry.n, geometry.k
    few, many = min(m, n), max(m, n)
    if math.prod(geometry.batch) > 1:
        if k <= 128:
            return "XLA's batched products over a short k are faster (0.83 to 0.92)"
        return None
    neither_k_major = geometry.lhs_strides[-1] != 1 and geometry.rhs_strides[-1] == 1
    if neither_k_major and k <= 2048 and few >= 4096:
        return "XLA's products of two transposed operands over a short k are faster (0.91 to 0.96)"
    if max(few, k) <= 512 and many >= 16384:
        return "XLA's long products of a small matrix are faster (0.93)"
    if 64 < few <= 128 and many > 2 * k:
        return "XLA's products of so few rows over a short k are faster (0.96)"
    return None

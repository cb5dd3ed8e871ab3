"""Products and sums that are left to XLA, whose kernels were measured to be faster.

Ratios are XLA's time over ours on an H100 (``docs/tuning-log.md``). Tuning
a product overrides these rules.
"""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.reduction.problem import Reduction

_SIXTEEN_BITS = ("bf16", "f16")
# Shorter products are bound by their launch.
_LONG_MICROSECONDS = 10
# Dot products of fewer bytes take little longer than their two launches.
_SHORT_DOT_BYTES = 256 << 20
_SHORT_ROW_BYTES = 256
# Small products: microseconds of XLA's launch, of an index of k, of a split and of the reduction of
# splits; and the bytes' time over that of a long read.
_SMALL_LAUNCH, _LOOP_OVER_K, _SPLIT, _REDUCTION, _SMALL_MEMORY = 1.4, 0.0065, 0.1, 1.8, 1.25
_SHORT_K, _FEW_RESULTS = 64, 128 * 128
_SHORT_COLUMN = 1500
# XLA's estimate must be less than ours by so much.
_CONFIDENCE = 1.15


def sum_left_to_xla(reduction: Reduction, gpu: Gpu) -> str | None:
    """Return why a sum is XLA's, or ``None``."""
    if gpu.compute_capability != (9, 0):
        return None
    if reduction.dtype.kind not in "iub" and reduction.outputs == math.prod(reduction.batch) == 1:
        return "XLA's totals of floats are faster (0.77 to 0.99)"
    row_bytes = reduction.k * reduction.dtype.itemsize
    if reduction.lhs_strides[-1] == 1 and row_bytes < _SHORT_ROW_BYTES:
        return f"XLA's sums of rows of {row_bytes} bytes are faster (0.76)"
    return None


def small_sum_left_to_xla(reduction: Reduction, gpu: Gpu) -> str | None:
    """Return why a short sum over columns is XLA's, or ``None``."""
    if gpu.compute_capability != (9, 0) or reduction.lhs_strides[-1] == 1:
        return None
    is_long = _is_long(reduction.bytes / gpu.rates.memory_bandwidth, gpu)
    if reduction.k > _SHORT_COLUMN or is_long:
        return None
    return f"XLA's short sums of columns of {reduction.k} are faster (0.39 to 0.7)"


def small_left_to_xla(product: Product, cycles: float, gpu: Gpu) -> str | None:
    """Return why a product over a short ``k``, or with few results, is XLA's, or ``None``.

    There XLA's kernels start faster. What they take is estimated: by the bytes over a short ``k``,
    and by the latency of a loop over ``k`` for few results. The constants are of 12 products on an
    H100, ten of them drawn at random, of which the estimate is within 22 %.

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
    m, n, k = geometry.m, geometry.n, geometry.k
    if gpu.compute_capability != (9, 0) or product.arithmetic == "f32":
        return None
    if min(m, n) == 1:
        narrow = product.lhs_dtype.itemsize <= 2 and math.prod(geometry.batch) > 1
        if narrow and max(m, n) > 1 and not _is_long(product.memory_cycles(gpu), gpu):
            return "XLA's short batches of products with a vector are faster (0.44 to 0.7)"
        return None
    per_microsecond = gpu.rates.cycles_per_microsecond
    memory = _SMALL_MEMORY * product.memory_cycles(gpu) / per_microsecond
    if k <= _SHORT_K:
        theirs, what = _SMALL_LAUNCH + memory, "products over so short a k"
    elif math.prod(geometry.batch) * m * n <= _FEW_RESULTS:
        loop = min(
            k / splits * _LOOP_OVER_K + (_REDUCTION + _SPLIT * splits if splits > 1 else 0)
            for splits in (1, 2, 4, 8, 16, 32)
        )
        theirs, what = _SMALL_LAUNCH + max(loop, memory), "products with so few results"
    else:
        return None
    ours = cycles / per_microsecond
    if ours < _CONFIDENCE * theirs:
        return None
    return f"XLA's {what} are faster (estimated at {theirs:.1f} us, ours at {ours:.1f} us)"


def left_to_xla(product: Product, gpu: Gpu) -> str | None:
    """Return why a product is XLA's, or ``None``."""
    if gpu.compute_capability != (9, 0):
        return None
    geometry, arithmetic = product.geometry, product.arithmetic
    m, n, k = geometry.m, geometry.n, geometry.k
    batches = math.prod(geometry.batch)
    is_long = _is_long(product.memory_cycles(gpu), gpu)
    if arithmetic == "f64" and min(m, n, k) >= 1024:
        return "XLA's large float64 products are faster (0.91 to 0.93)"
    if m == n == 1:
        # XLA rounds each product of 16-bit operands to 16 bits.
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


def _is_long(cycles: float, gpu: Gpu) -> bool:
    return cycles > _LONG_MICROSECONDS * gpu.rates.cycles_per_microsecond


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

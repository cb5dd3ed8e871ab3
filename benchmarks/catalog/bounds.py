"""Exact values, and bounds on errors that follow from the arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_tilekern.plans.gpu import current_gpu, target_is_set

BF16, F8E4, F8E5 = (
    np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
)
INT4, INT8 = np.dtype(ml_dtypes.int4), np.dtype(np.int8)
F32, F64, F16 = (np.dtype(t) for t in (np.float32, np.float64, np.float16))
FLOATS = (F32, BF16, F16, F64)
FP8 = (F8E4, F8E5)
COMPLEX = (np.dtype(np.complex64), np.dtype(np.complex128))
NARROW = (BF16, F16)

UNIT_ROUNDOFF = {
    F64: 2.0**-53,
    F32: 2.0**-24,
    F16: 2.0**-11,
    BF16: 2.0**-8,
    F8E4: 2.0**-4,
    F8E5: 2.0**-3,
}
TF32_ROUNDOFF = 2.0**-11
# Hopper's tensor cores accumulate products of 8-bit floats with about 14 bits. At the default
# precision the accumulators are not promoted to float32.
FP8_SUM_ROUNDOFF = 2.0**-12


def on_gpu():
    """Whether a GPU computes: JAX's, or the one that ``gpu_target`` names."""
    return jax.default_backend() == "gpu" or target_is_set()


def supported(dtype):
    """Whether the device multiplies the type; a GPU does 8-bit floats from 8.9 on."""
    if not on_gpu() or np.dtype(dtype) not in FP8:
        return True
    return current_gpu().compute_capability >= (8, 9)


def is_float(dtype):
    """Whether a type is a real floating-point type."""
    return jnp.issubdtype(dtype, jnp.floating)


def wide(x):
    """Return the value in a type in which sums are exact, or nearly."""
    x = np.asarray(x)
    if x.dtype.kind == "c":
        return x.astype(np.clongdouble if x.dtype == np.complex128 else np.complex128)
    if x.dtype.kind in "iub":
        return x.astype(np.int64)
    return x.astype(np.longdouble if x.dtype == F64 else np.float64)


def as_promoted(x, types):
    """Return the operand with the rounding by which JAX promotes integers to 8-bit floats."""
    narrow = [dtype for dtype in types if dtype in FP8]
    return np.asarray(x).astype(narrow[0]) if narrow and x.dtype.kind in "iub" else x


def unit(*types):
    """Return the unit roundoff of sums: of float64 if all types are as wide."""
    return 2.0 ** (
        -53 if all(np.dtype(t).name in ("float64", "complex128") for t in types) else -24
    )


def operand_rounding(types, precision, backward=False):
    """Return by how much the arithmetic of a GPU rounds the operands, beside sums in float32."""
    if not on_gpu():
        return 0.0
    if all(t in FP8 for t in types) and not backward:
        return FP8_SUM_ROUNDOFF
    exact = precision in ("highest", "float32") or all(t in (*NARROW, *FP8) for t in types)
    is_tf32 = backward or not exact
    return 2 * TF32_ROUNDOFF if is_tf32 and not all(t == F64 for t in types) else 0.0


def compared(found, expected, slack):
    """Return error and bound of a result that is rounded to its type once.

    Where the value may exceed the type's largest, anything is right. Booleans and integers are
    exact, modulo their type.
    """
    found = np.asarray(found)
    if found.shape != np.shape(expected):
        return np.full(1, np.inf), np.zeros(1)
    if found.dtype.kind == "b":
        return (found != (np.asarray(expected) != 0)).astype(float), np.zeros(found.shape)
    if found.dtype.kind in "iu":
        return (found != np.asarray(expected).astype(found.dtype)).astype(float), np.zeros(
            found.shape
        )
    info = jnp.finfo(found.dtype)
    rounding = UNIT_ROUNDOFF[np.dtype(np.zeros((), found.dtype).real.dtype)]
    size = np.abs(expected)
    bound = slack + rounding * np.maximum(size, float(info.smallest_normal)) * (1 + 2.0**-20)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(wide(found) - expected)
        may_overflow = size + bound >= float(info.max)
    # The same NaNs and infinities.
    same = (np.isnan(found) & np.isnan(expected)) | (wide(found) == expected)
    error = np.where(same | (may_overflow & np.isfinite(size)), 0, error)
    error = np.where(np.isnan(error), np.inf, error)
    return error, np.where(np.isfinite(bound), bound, 0)


def einsum(subscripts, *operands):
    """Return NumPy's einsum, which broadcasts, the sum of the terms' sizes, and their number."""
    inputs, out = subscripts.split("->")
    sizes: dict[str, int] = defaultdict(int)
    for labels, x in zip(inputs.split(","), operands, strict=True):
        for label, size in zip(labels, x.shape, strict=True):
            sizes[label] = max(sizes[label], size) if 0 not in x.shape else min(size, 1)
    terms = math.prod(size for label, size in sizes.items() if label not in out)
    with np.errstate(invalid="ignore", over="ignore"):
        value = np.einsum(subscripts, *operands)
        magnitude = np.einsum(subscripts, *(np.abs(x).astype(np.longdouble) for x in operands))
    return value, magnitude, terms

"""Operands, the products under test, and error bounds that follow from the arithmetic."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.test_util import check_grads

import jax_tilekern as jtk
from benchmarks.catalog.bounds import (
    FP8_SUM_ROUNDOFF,
    TF32_ROUNDOFF,
    UNIT_ROUNDOFF,
    on_gpu,
)
from benchmarks.catalog.bounds import (
    supported as supported,
)

BF16, F8E4, F8E5 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

# Row- and column-major operands of a matrix product.
MAJORS = ("mk,kn", "km,kn", "mk,nk", "km,nk")


def roundoff(dtype, precision=None):
    """Rounding beside float32's: of operands to TF32, and of sums of 8-bit floats on Hopper."""
    if not on_gpu():
        return 0.0
    if np.dtype(dtype) == np.float32 and precision is None:
        return TF32_ROUNDOFF
    hopper = jax.devices()[0].compute_capability == "9.0"
    return FP8_SUM_ROUNDOFF if hopper and np.dtype(dtype) in (F8E4, F8E5) else 0.0


def random(rng, shape, dtype):
    """Normal values in ``dtype`` (so that the operands themselves are exact), or all integers."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return jnp.asarray(rng.integers(info.min, info.max, shape, dtype, endpoint=True))
    if dtype.kind == "c":
        return jnp.asarray(
            (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
        )
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def whole(rng, *shape, largest=8, dtype=np.float32):
    """Small integers, of which products and sums are exact in float32, in any order."""
    return jnp.asarray(rng.integers(-largest, largest + 1, shape).astype(dtype))


def assert_equal(got, expected):
    """Trees of the same numbers and shapes; what was computed from ``whole`` has no rounding."""
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), got, expected)


def assert_close(found, expected, tolerance=1e-4, *, terms=1.0):
    """Compare trees of arrays in the norm of the maximum, shapes and NaNs included.

    Each error is at most ``tolerance`` times the largest of the expected values and of ``terms``,
    the size of what is added up: a sum errs by a share of its terms, and they may cancel.
    """

    def compare(x, y):
        assert np.shape(x) == np.shape(y)
        x, y = exact(x), exact(y)
        largest = np.abs(y[np.isfinite(y)]).max(initial=terms)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest)

    jax.tree.map(compare, found, expected)


# The step of central differences in float64 is about the cube root of the roundoff, which balances
# truncation and rounding.
_STEP = 1e-5


def check_derivatives(function, arguments, order=2):
    """Check them up to ``order``, in float64: finite differences of float32 say little.

    The function is jitted, so that XLA compiles a few programs and not one for each operation.
    """
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arguments]
        check_grads(
            jax.jit(function), wide, order, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4, eps=_STEP
        )


def operands(rng, subscripts, sizes, *types):
    """Random operands of an einsum; ``sizes`` is by label."""
    labels = subscripts.split("->")[0].split(",")
    return [
        random(rng, [sizes[label] for label in operand], dtype)
        for operand, dtype in zip(labels, types, strict=True)
    ]


def operands_with_nan_and_inf(rng, m, n, k, dtype):
    """Two matrices with NaN, both infinities and zero in them, and their product in float64."""
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    for x in (a, b):
        for value in (np.nan, np.inf, -np.inf, 0.0):
            x[tuple(rng.integers(0, s) for s in x.shape)] = value
    a, b = jnp.asarray(a.astype(dtype)), jnp.asarray(b.astype(dtype))
    with np.errstate(invalid="ignore"):
        return a, b, exact(a) @ exact(b)


def product(subscripts, lhs, rhs, out=None, precision=None):
    """The library's ``dot_general`` of two matrices, one of ``MAJORS``."""
    left, right = subscripts.split(",")
    dims = (((left.index("k"),), (right.index("k"),)), ((), ()))
    return jtk.dot_general(lhs, rhs, dims, precision, preferred_element_type=out)


def einsum(subscripts, lhs, rhs, out):
    """JAX's einsum with the library's ``dot_general``."""
    return jnp.einsum(
        subscripts, lhs, rhs, preferred_element_type=out, _dot_general=jtk.dot_general
    )


def exact(x):
    """The value in float64, complex128 or int64."""
    x = np.asarray(x)
    wide = {"i": np.int64, "u": np.int64, "c": np.complex128, "b": np.int64}
    return x.astype(wide.get(x.dtype.kind, np.float64))


def frobenius(x):
    return float(np.sqrt(np.sum(np.abs(x) ** 2)))


def accumulator(dtype):
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def rounding(values, dtype):
    """By how much each value may err when it is rounded to ``dtype``.

    Below the smallest normal number, numbers lie as far apart as there.
    """
    smallest = float(jnp.finfo(dtype).smallest_normal)
    return UNIT_ROUNDOFF[np.dtype(dtype)] * np.maximum(np.abs(values), smallest)


def error_bound(lhs, rhs, subscripts, out_dtype, operand_roundoff=0.0):
    """Bound on the Frobenius norm of the error of ``einsum(subscripts, lhs, rhs)``.

    A sum of k products in precision u, in any order, errs by at most lambda sqrt(k) u sum|a||b|
    with a probability that grows with lambda (Higham and Mary, SIAM J. Sci. Comput. 41, 2019);
    lambda is 4 here. To that come the rounding of the result and, where the arithmetic rounds
    its operands (TF32), that of both operands.
    """
    a, b = exact(lhs), exact(rhs)
    product = np.einsum(subscripts, a, b)
    inputs, output = subscripts.split("->")
    sizes = dict(zip(inputs.replace(",", ""), a.shape + b.shape, strict=True))
    k = math.prod(size for label, size in sizes.items() if label not in output)
    magnitude = frobenius(np.einsum(subscripts, np.abs(a), np.abs(b)))
    u = UNIT_ROUNDOFF[accumulator(lhs.dtype)]
    sums = (4 * math.sqrt(k + 1) * u + 2 * operand_roundoff) * magnitude
    return sums + frobenius(rounding(product, out_dtype))


def assert_product(out, lhs, rhs, subscripts, operand_roundoff=0.0):
    """``out`` is the einsum of the operands, within the arithmetic's error (exact for integers)."""
    reference = np.einsum(subscripts, exact(lhs), exact(rhs))
    assert out.shape == reference.shape
    if np.dtype(out.dtype).kind in "iu":
        np.testing.assert_array_equal(np.asarray(out), reference.astype(out.dtype))
        return
    error = frobenius(exact(out) - reference)
    bound = error_bound(lhs, rhs, subscripts, out.dtype, operand_roundoff)
    assert error <= bound, f"error {error:.3e} exceeds {bound:.3e}"


def assert_same_nan_and_inf(out, reference):
    out = np.asarray(out)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(out), test(reference), test.__name__)


def poison(shape, dtype):
    """Leave NaN (or a pattern) in freed memory of this size, where a result is likely to land."""
    dtype = np.dtype(dtype)
    value = -1 if dtype.kind in "iu" else np.nan
    for _ in range(2):
        junk = jax.device_put(np.full(shape, value, dtype))
        junk.block_until_ready()
        junk.delete()

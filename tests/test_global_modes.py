"""JAX's global modes are the user's: they change no rule and no inside of an operation.

Each operation is compared with the same function of ``jax.numpy``, where one of JAX's modes is a
context around the call, or around a part of the function.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from operations import OPERATIONS, arrays_of

import jax_tilekern as jtk


def operands(name, dtype):
    with jax.enable_x64(True):
        arrays = arrays_of(np.random.default_rng(7), name, np.float64)
        return tuple(jnp.asarray(x, dtype) for x in arrays)


def gradients(function):
    """Return the gradients of a weighted sum of the result."""

    def total(*xs):
        y = function(*xs)
        weights = jnp.arange(1, y.size + 1).reshape(y.shape).astype(y.dtype)
        return lax.reduce_sum(y * weights, tuple(range(y.ndim)))

    return lambda *xs: jax.grad(total, tuple(range(len(xs))))(*xs)


def in_float64(function):
    """Return a function that computes in float64 where x64 is a context inside it."""

    def scoped(*xs):
        with jax.enable_x64(True):
            results = function(*(x.astype(np.float64) for x in xs))
            return jax.tree.map(lambda y: y.astype(np.float32), results)

    return scoped


def compare(ours, theirs, tolerance):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        wide = [np.asarray(array, np.float64) for array in (x, y)]
        scale = max(1, np.abs(wide[1]).max())
        np.testing.assert_allclose(*wide, rtol=0, atol=tolerance * scale)


# They keep the type of their values. JAX sums in float32, and fails to compute a log-sum-exp.
_WITHOUT_TYPE_OF_JAX = {"row_sum", "row_max", "row_logsumexp", "linear_cross_entropy"} | {
    "segment_sum", "segment_max", "segment_reduce",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"lu"}))
@pytest.mark.one_in(3)
def test_float64_arrays_where_x64_is_off(name):
    """The result has JAX's type, and the context is as good as before."""
    ours, theirs, _ = OPERATIONS[name]
    xs = operands(name, np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns that a type is truncated.
        result = ours(*xs)
        if name not in _WITHOUT_TYPE_OF_JAX:
            assert result.dtype == jax.eval_shape(theirs, *xs).dtype
    with jax.enable_x64(True):
        expected = theirs(*xs)
        compare(result, expected, 1e-6)
        compare(ours(*xs), expected, 1e-13)


def test_systems_in_float64_where_x64_is_off():
    with jax.enable_x64(True):
        a, b = jnp.array([[1, 0.9999], [1.0001, 1]]), jnp.ones(2)
    x = jtk.linalg.solve(a, b)
    assert x.dtype == np.float64
    np.testing.assert_allclose(x, [10000.00002762, -10000.00002762], rtol=1e-9)


def test_rank_promotion_is_an_error_in_second_derivatives():
    ours, theirs, _ = OPERATIONS["linear_cross_entropy"]
    xs = operands("linear_cross_entropy", np.float32)
    results = []
    for function in (ours, theirs):
        with jax.numpy_rank_promotion("raise"):
            results.append(jax.jvp(gradients(function), xs, xs)[1])
    compare(*results, 1e-5)


def test_slogdet_of_more_matrices_than_rows():
    with jax.numpy_rank_promotion("raise"):
        sign, logarithm = jtk.linalg.slogdet(jnp.stack([3 * jnp.eye(4)] * 5))
    assert sign.tolist() == [1] * 5
    np.testing.assert_allclose(logarithm, 4.394449, rtol=1e-6)


def test_precision_is_that_of_the_call():
    """The context is over when a derivative is computed and when a call is lowered."""

    @jax.jit
    def product(x, w):
        with jax.default_matmul_precision("highest"):
            return jtk.linear(x, w, None, jnp.tanh)

    jaxpr = jax.make_jaxpr(jax.grad(lambda *xs: product(*xs).sum()))(
        *operands("matmul", np.float32)
    )
    text = str(jaxpr)
    assert text.count("precision=(Precision.HIGHEST, ") == text.count("precision=") >= 2


def test_a_reference_runs_in_the_modes_of_the_call():
    """The context is over when the call is lowered."""
    kernel = jtk.cuda_kernel(
        "__global__ void f(const float* x, float* y) {}",
        out=lambda x: x,
        grid=1,
        block=1,
        reference=lambda x: (x.astype(np.float64) + 1e-9 - x).astype(np.float32),
    )

    @jax.jit
    def difference(x):
        with jax.enable_x64(True):
            return kernel(x)

    with jtk.policy("xla"):
        np.testing.assert_allclose(difference(jnp.ones(3)), 1e-9, rtol=1e-6)


def test_functions_of_settings_run_in_the_modes_of_the_call():
    """The context is over when the call is lowered."""
    seen = []

    def grid(x):
        seen.append((jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion))
        return 1

    kernel = jtk.cuda_kernel(
        "__global__ void f(const float* x, float* y) {}",
        out=lambda x: x,
        grid=grid,
        block=1,
        reference=lambda x: x,
    )

    @jax.jit
    def function(x):
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
            return kernel(x)

    function(jnp.ones(3))
    assert set(seen) == {(True, "strict")}


def test_outputs_of_64_bits_of_a_kernel_in_a_scope():
    kernel = jtk.cuda_kernel(
        "__global__ void f(const double* x, double* y) {}",
        out=lambda x: x,
        grid=1,
        block=1,
        reference=lambda x: 2 * x,
    )
    kernel.deflinear(0, lambda cotangent, x: 2 * cotangent)
    x = operands("transpose", np.float32)[0]
    derived = jax.jit(jax.grad(lambda x: in_float64(kernel)(x).sum()))(x)
    np.testing.assert_array_equal(derived, np.full(x.shape, 2, np.float32))

"""JAX's global modes are the user's: they change no rule and no inside of an operation.

Each operation is compared with the same function of ``jax.numpy``, where one of JAX's modes is a
context around the call, or around a part of the function.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk


def in_float64(function):
    """Return a function that computes in float64 where x64 is a context inside it."""

    def scoped(*xs):
        with jax.enable_x64(True):
            results = function(*(x.astype(np.float64) for x in xs))
            return jax.tree.map(lambda y: y.astype(np.float32), results)

    return scoped


def test_systems_in_float64_where_x64_is_off():
    with jax.enable_x64(True):
        a, b = jnp.array([[1, 0.9999], [1.0001, 1]]), jnp.ones(2)
    x = jtk.linalg.solve(a, b)
    assert x.dtype == np.float64
    np.testing.assert_allclose(x, [10000.00002762, -10000.00002762], rtol=1e-9)


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
        jnp.ones((8, 4)), jnp.ones((4, 4))
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
    x = jnp.ones((8, 4))
    derived = jax.jit(jax.grad(lambda x: in_float64(kernel)(x).sum()))(x)
    np.testing.assert_array_equal(derived, np.full(x.shape, 2, np.float32))

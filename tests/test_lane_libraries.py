"""Solvers and samplers of other libraries as kernels: emulated, against ``vmap``."""

import jax
import jax.numpy as jnp
import lane_functions
import numpy as np
import pytest
from emulated_plans import COMPILER
from lanes import Emulated
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk

diffrax = pytest.importorskip("diffrax")
optimistix = pytest.importorskip("optimistix")
lineax = pytest.importorskip("lineax")

N = 7


def oscillator(start, adjoint=None):
    """Solve van der Pol's equation by adaptive steps, of which each lane takes its own."""

    def velocity(t, y, args):
        return jnp.stack([y[1], 2 * (1 - y[0] ** 2) * y[1] - y[0]])

    return diffrax.diffeqsolve(
        diffrax.ODETerm(velocity),
        diffrax.Tsit5(),
        t0=0.0,
        t1=2.0,
        dt0=None,
        y0=start,
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
        adjoint=adjoint or diffrax.RecursiveCheckpointAdjoint(),
        max_steps=256,
        throw=False,
    ).ys[0]


def slope(start):
    return jax.grad(lambda y: jnp.sum(oscillator(y) ** 2))(start)


def along(start):
    forward = diffrax.ForwardMode()
    return jax.jvp(lambda y: oscillator(y, forward), (start,), (jnp.ones_like(start),))[1]


def root(target):
    def residual(y, args):
        return jnp.tanh(y) + 0.1 * y.sum() - args

    newton = optimistix.Newton(rtol=1e-5, atol=1e-5)
    found = optimistix.root_find(residual, newton, jnp.zeros(3), args=target, throw=False)
    return found.value


def conjugate_gradients(matrix):
    definite = matrix @ matrix.T + jnp.eye(4)
    operator = lineax.MatrixLinearOperator(definite, lineax.positive_semidefinite_tag)
    solver = lineax.CG(rtol=1e-6, atol=1e-6)
    return lineax.linear_solve(operator, matrix[0], solver, throw=False).value


# Lanes end after different numbers of steps, whose roundings the solvers amplify.
CASES = {
    "diffrax": (oscillator, (lane_functions.normal(N, 2),), 2e-3),
    "diffrax, gradient": (slope, (lane_functions.normal(N, 2),), 5e-3),
    "diffrax, jvp": (along, (lane_functions.normal(N, 2),), 5e-3),
    "optimistix": (root, (0.3 * lane_functions.normal(N, 3),), 1e-4),
    "lineax": (conjugate_gradients, (lane_functions.normal(N, 4, 4),), 1e-3),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("there is no g++")
    traced = {
        name: jax.make_jaxpr(jtk.kernel(function))(*args)
        for name, (function, args, _) in CASES.items()
    }
    return Emulated(traced, tmp_path_factory.mktemp("libraries") / "lock")


@pytest.mark.xdist_group("libraries")
@pytest.mark.parametrize("name", CASES)
def test_is_vmap(emulated, name):
    function, args, tolerance = CASES[name]
    (found,) = emulated(name, *args)
    wanted = np.asarray(jax.jit(jax.vmap(function))(*args))
    assert np.isfinite(wanted).all()
    bound = tolerance * max(1, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, 0, bound)


def test_gradient_of_a_kernel():
    """Reverse mode of the mapped solver, as of ``vmap``."""
    (starts,) = CASES["diffrax"][1]

    def gradient(map_):
        return jax.jit(jax.grad(lambda y: jnp.sum(map_(oscillator)(y) ** 2)))(starts)

    wanted = gradient(jax.vmap)
    np.testing.assert_allclose(gradient(jtk.kernel), wanted, 0, 5e-3 * np.abs(wanted).max())


@needs_nvrtc
@pytest.mark.defaults
@pytest.mark.parametrize("name", ["diffrax", "optimistix", "lineax"])
def test_the_default_is_a_kernel(name):
    """It compiles, and ``vmap`` is predicted to be slower."""
    function, args, _ = CASES[name]
    with jtk.gpu_target("H100"), jtk.strict():
        (choice,) = jtk.explain(jtk.kernel(function), *args)
    assert choice.kernel


@needs_nvrtc
def test_a_primitive_that_cannot_be_traced_is_named():
    equinox = pytest.importorskip("equinox")

    def checked(x):
        return equinox.error_if(x, x < 0, "negative")

    with (
        jtk.gpu_target("H100"),
        jtk.strict(),
        pytest.raises(jtk.FallbackError, match="no CUDA for"),
    ):
        jtk.explain(jtk.kernel(checked), jnp.ones(3))

"""Solvers and samplers of other libraries as kernels: emulated, against ``vmap``."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import lane_functions
import numpy as np
import pytest
from emulated_plans import COMPILER
from lanes import Emulated
from nvrtc_mark import needs_emulator, needs_nvrtc

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


def noisy(key, spread, path, adjoint):
    """Solve a stochastic equation, whose increments are drawn in the lane.

    Times are exact, because their bits decide the draws of an unsafe path.
    """
    drift = diffrax.ODETerm(lambda t, y, args: -y)
    terms = diffrax.MultiTerm(drift, diffrax.ControlTerm(lambda t, y, args: spread, path(key)))
    return diffrax.diffeqsolve(
        terms, diffrax.Euler(), 0.0, 1.0, 0.125, jnp.float32(1), max_steps=16, throw=False,
        adjoint=adjoint,
    ).ys[0]  # fmt: skip


def by_steps(key, spread):
    def path(key):
        return diffrax.UnsafeBrownianPath((), key)

    return noisy(key, spread, path, diffrax.ForwardMode())


def by_tree(key, spread):
    def path(key):
        return diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (), key)

    return noisy(key, spread, path, diffrax.RecursiveCheckpointAdjoint())


def slope_by_spread(key, spread):
    return jax.grad(by_tree, 1)(key, spread)


SPREADS = np.linspace(0.1, 0.5, N, dtype=np.float32)
KEYS = jax.random.split(jax.random.key(1), N)

# Lanes end after different numbers of steps, whose roundings the solvers amplify.
CASES = {
    "diffrax": (oscillator, (lane_functions.normal(N, 2),), 2e-3),
    "diffrax, gradient": (slope, (lane_functions.normal(N, 2),), 5e-3),
    "diffrax, jvp": (along, (lane_functions.normal(N, 2),), 5e-3),
    "optimistix": (root, (0.3 * lane_functions.normal(N, 3),), 1e-4),
    "steps of noise": (by_steps, (KEYS, SPREADS), 1e-4),
    "tree of noise": (by_tree, (KEYS, SPREADS), 1e-4),
    "tree of noise, gradient": (slope_by_spread, (KEYS, SPREADS), 1e-4),
    "lineax": (conjugate_gradients, (lane_functions.normal(N, 4, 4),), 1e-3),
}


@pytest.fixture(autouse=True, scope="module")
def errors_are_nan():
    """Let Equinox report by NaN that a time is out of a Brownian tree's bounds."""
    with mock.patch("equinox._errors.EQX_ON_ERROR", "nan"):
        yield


@pytest.fixture(scope="module")
def emulated(tmp_path_factory, errors_are_nan):
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


def test_gradient_of_a_kernel_of_keys():
    """Functions with custom derivatives keep the keys that they are given."""

    def gradient(map_):
        return jax.jit(jax.grad(lambda s: jnp.sum(map_(by_tree)(KEYS, s) ** 2)))(SPREADS)

    np.testing.assert_allclose(gradient(jtk.kernel), gradient(jax.vmap), 0, 1e-4)


def test_gradient_of_a_kernel():
    """Reverse mode of the mapped solver, as of ``vmap``."""
    (starts,) = CASES["diffrax"][1]

    def gradient(map_):
        return jax.jit(jax.grad(lambda y: jnp.sum(map_(oscillator)(y) ** 2)))(starts)

    wanted = gradient(jax.vmap)
    np.testing.assert_allclose(gradient(jtk.kernel), wanted, 0, 5e-3 * np.abs(wanted).max())


def eight_schools():
    """Return a function of a key that runs a chain of numpyro's NUTS, warm-up included."""
    numpyro = pytest.importorskip("numpyro")
    hmc = pytest.importorskip("numpyro.infer.hmc").hmc
    normal = numpyro.distributions.Normal
    effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def model():
        mean = numpyro.sample("mean", normal(0, 5))
        spread = numpyro.sample("spread", numpyro.distributions.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            effect = numpyro.sample("effect", normal(0, 1))
            numpyro.sample("seen", normal(mean + spread * effect, errors), obs=effects)

    found = numpyro.infer.util.initialize_model(jax.random.key(0), model)
    begin, proceed = hmc(found.potential_fn, algo="NUTS")

    def chain(key):
        def step(state, _):
            state = proceed(state)
            return state, (state.z["mean"], state.num_steps)

        start = begin(found.param_info, num_warmup=2, rng_key=key)
        return jax.lax.scan(step, start, None, length=4)[1]

    return chain


@pytest.mark.thorough
@needs_emulator
def test_nuts_of_numpyro_is_vmap(tmp_path):
    chain = eight_schools()
    traced = {"chain": jax.make_jaxpr(jtk.kernel(chain))(KEYS)}
    means, steps = Emulated(traced, tmp_path / "lock")("chain", KEYS)
    wanted, wanted_steps = jax.jit(jax.vmap(chain))(KEYS)
    np.testing.assert_array_equal(steps, wanted_steps)
    np.testing.assert_allclose(means, wanted, 0, 1e-2)


@needs_nvrtc
def test_nuts_of_numpyro_is_a_kernel():
    with jtk.gpu_target("H200"), jtk.policy("kernels"), jtk.strict():
        keys = jax.random.split(jax.random.key(0), 1024)
        (choice,) = jtk.explain(jtk.kernel(eight_schools()), keys)
    assert "s_chain<" in choice.kernel


@needs_nvrtc
@pytest.mark.defaults
@pytest.mark.parametrize("name", ["diffrax", "optimistix", "lineax"])
def test_the_default_is_a_kernel(name):
    """It compiles, and ``vmap`` is predicted to be slower."""
    function, args, _ = CASES[name]
    with jtk.gpu_target("H100"), jtk.strict():
        (choice,) = jtk.explain(jtk.kernel(function), *args)
    assert choice.kernel


def test_checks_of_what_all_lanes_read_are_made():
    """Before the kernel: of constants when it is traced, of arguments by XLA."""
    error_if = functools.partial(pytest.importorskip("equinox").error_if, on_error="raise")

    def checked(x, n):
        at = error_if(jnp.arange(3.0), jnp.arange(3)[2] < 0, "constant")
        n = jax.jit(lambda n: error_if(n, n < 0, "argument"))(n)
        return x * n + at[2]

    kernel = jtk.kernel(checked, in_axes=(0, None))
    with jtk.strict():
        np.testing.assert_array_equal(kernel(jnp.ones(2), 3.0), [5, 5])
        assert jax.grad(lambda n: kernel(jnp.ones(2), n).sum())(3.0) == 2
    with pytest.raises(Exception, match="argument"):
        jax.block_until_ready(kernel(jnp.ones(2), -3.0))
    with pytest.raises(Exception, match="constant"):
        jtk.kernel(lambda x: x * error_if(jnp.ones(2), jnp.ones(2) > 0, "constant"))(jnp.ones(2))


@needs_nvrtc
def test_a_primitive_that_cannot_be_traced_is_named():
    equinox = pytest.importorskip("equinox")

    def checked(x):
        return equinox.error_if(x, x < 0, "negative", on_error="raise")

    with (
        jtk.gpu_target("H100"),
        jtk.strict(),
        pytest.raises(jtk.FallbackError, match=r"a lane cannot call Python.*throw=False"),
    ):
        jtk.explain(jtk.kernel(checked), jnp.ones(3))

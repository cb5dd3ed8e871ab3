"""Models and solvers that nobody here wrote compute the same with the library's products."""

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import products, traced
from numerics import assert_close, on_gpu, random

import jax_tilekern as jtk

pytestmark = pytest.mark.usefixtures("highest_precision")

optax = pytest.importorskip("optax")

_FILE = Path(__file__).parent.parent / "examples" / "frameworks.py"
_SPEC = importlib.util.spec_from_file_location("example_frameworks", _FILE)
frameworks = importlib.util.module_from_spec(_SPEC)
sys.modules["example_frameworks"] = frameworks
_SPEC.loader.exec_module(frameworks)

PACKAGES = {"Equinox": "equinox", "Haiku": "haiku"}
WAYS = [
    *((name, "hook") for name in frameworks.HOOKED),
    *((name, "patch") for name in frameworks.MODELS),
]
# Each float32 product has an error of a few roundings of 6e-8, and over 50 steps of training the
# parameters diverge by about their sum.
DRIFT = 2e-5


@functools.cache
def losses(name, way, optimizer="adam"):
    return np.array(frameworks.train(name, way, optimizer))


@pytest.mark.parametrize(("name", "way"), WAYS)
@pytest.mark.thorough
def test_fifty_steps_have_the_same_losses(name, way):
    pytest.importorskip(PACKAGES.get(name, "flax"))
    found = losses(name, way)
    np.testing.assert_allclose(found, losses(name, "jax"), rtol=DRIFT)
    assert found[-1] < found[0] / 3


@pytest.mark.parametrize("name", frameworks.MODELS)
@pytest.mark.thorough
def test_a_fused_step_has_the_same_loss(name):
    """The whole training step of an attention block: gradient and optimizer."""
    pytest.importorskip(PACKAGES.get(name, "flax"))
    model, optimizer = frameworks.made(name, False), optax.adam(3e-3)
    step = frameworks.training_step(model, optimizer)

    def train(step):
        params, state = model.params, optimizer.init(model.params)
        for _ in range(30):
            value, params, state = step(params, state, *frameworks.task())
        return value

    np.testing.assert_allclose(train(jax.jit(jtk.fuse(step))), train(jax.jit(step)), rtol=DRIFT)


def arguments(name, hook, optimizer="adam"):
    model = frameworks.made(name, hook)
    optimizer = frameworks.OPTIMIZERS[optimizer]()
    step = frameworks.training_step(model, optimizer)
    state = jax.eval_shape(optimizer.init, model.params)
    return step, model.params, state, *jax.eval_shape(frameworks.task)


@pytest.mark.parametrize(
    ("name", "way", "optimizer"),
    [
        *((*way, "adam") for way in WAYS),
        *(
            pytest.param(*way, "muon", marks=pytest.mark.thorough)
            for way in WAYS
            if "flax.linen" in way
        ),
    ],
)
@pytest.mark.one_in(3)
def test_every_product_of_a_step_is_named(name, way, optimizer):
    pytest.importorskip(PACKAGES.get(name, "flax"))
    expected = traced(*arguments(name, False, optimizer))[1]
    step, *args = arguments(name, way == "hook", optimizer)
    if way == "patch":
        step = jtk.patch()(step)
    ours, jaxs = traced(step, *args)
    if (way, optimizer) == ("hook", "muon"):
        # A hook is the layers'. Newton and Schulz's iterations are the optimizer's.
        assert ours < expected == ours + jaxs
        return
    # One layer's attention is one operation in place of two products, and of four in its gradient,
    # but for a GPU, which has no kernel of float32.
    in_attention = 6 if name == "flax.nnx" and not on_gpu() else 0
    assert (ours + in_attention, jaxs) == (expected, 0)
    choices = jtk.explain(step, *args)
    # A function that is jitted and called several times is lowered once.
    assert 0 < len(choices) <= expected
    assert all(choice.reason for choice in choices)
    assert sum(choice.kernel is not None for choice in choices) > len(choices) / 2


def stable(rng, size):
    """A matrix near minus one, whose solutions decay."""
    return random(rng, (size, size), np.float64) / (2 * size) - np.eye(size)


def same_inside(function, *args, tolerance):
    """Compare values and gradients, and see that all products were taken over."""
    value_and_grad = jax.value_and_grad(function)
    expected = jax.jit(value_and_grad)(*args)
    with jtk.patch():
        jaxpr = jax.make_jaxpr(value_and_grad)(*args)
    ours, jaxs = products(jaxpr)
    assert ours > 0
    assert jaxs == 0
    found = jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*args)
    assert_close(list(found), jax.tree.leaves(expected), tolerance)


@pytest.mark.thorough
def test_an_implicit_solver_of_diffrax(rng, x64):
    diffrax = pytest.importorskip("diffrax")

    def solved(matrix, start):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, matrix: jnp.tanh(matrix @ y)),
            diffrax.ImplicitEuler(root_finder=diffrax.VeryChord(rtol=1e-6, atol=1e-6)),
            0.0,
            1.0,
            0.1,
            start,
            matrix,
            max_steps=16,
        ).ys.sum()

    # The iterations of each of the 10 steps end where the error is 1e-6.
    same_inside(solved, stable(rng, 5), random(rng, (5,), np.float64), tolerance=1e-4)


def test_conjugate_gradients_of_lineax(rng, x64):
    """The operator is a function, of which the solver takes the transpose."""
    lineax = pytest.importorskip("lineax")

    def solved(matrix, vector):
        operator = lineax.FunctionLinearOperator(
            lambda x: matrix @ x, jax.ShapeDtypeStruct((7,), np.float64)
        )
        solver = lineax.Normal(lineax.CG(rtol=1e-12, atol=1e-12))
        return (lineax.linear_solve(operator, vector, solver).value ** 2).sum()

    # The error that is left, by the square of a condition number of a few.
    same_inside(solved, stable(rng, 7), random(rng, (7,), np.float64), tolerance=1e-8)

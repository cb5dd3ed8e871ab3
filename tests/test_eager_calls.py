"""Public functions are compiled once and inlined where they are traced, as JAX's own are."""

import functools
import gc
import weakref

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from described import call_of, differentiable

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS
from jax_tilekern.ops import jitted

X = jax.ShapeDtypeStruct((6, 6), jnp.float32)
# Before jax 0.11, in gradients outside of jit.
TRACED_AGAIN = {"kernel", "kernel, branch", "ring_attention"}
# Static arguments as lists, of which jax.jit takes no hash.
CALLS = {
    "matmul": lambda x: jtk.matmul(x, x),
    "dot_general": lambda x: jtk.dot_general(x, x, [[[1], [0]], [[], []]]),
    "einsum": lambda x: jtk.einsum("ij,jk->ki", x, x),
    "dot": lambda x: jtk.dot(x, x),
    "vdot": lambda x: jtk.vdot(x, x),
    "matvec": lambda x: jtk.matvec(x, x),
    "vecmat": lambda x: jtk.vecmat(x, x),
    "ragged_dot": lambda x: jtk.ragged_dot(x, jnp.stack([3 * jnp.eye(6)] * 2), np.array([2, 3])),
    "sum": lambda x: jtk.sum(x, axis=[0]),
    "transpose": lambda x: jtk.transpose(x, np.array([1, 0])),
    "add": lambda x: jtk.add(x, x),
}


class ArrayLike:
    """What JAX's functions take although it is no array."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_call_is_inlined(name):
    """Each call has equations of its own, so that each is planned where its operands lie."""
    jaxpr = jax.make_jaxpr(lambda x: (CALLS[name](x), CALLS[name](x)))(X)
    assert f"jit[name={name} " not in str(jaxpr)
    assert len(jtk.explain(lambda x: (CALLS[name](x), CALLS[name](x)), X)) == 2


@pytest.fixture
def traced():
    """How many functions JAX has traced since the test began."""
    jax.clear_caches()
    before = len(_traces)
    return lambda: len(_traces) - before


_traces, _compilations = [], []


def _count(event, seconds, **_):
    if "jaxpr_trace" in event:
        _traces.append(event)
    if "backend_compile" in event:
        _compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


def _compilations_of_calls(function, arrays):
    """How many programs XLA compiles in each of three calls with new values."""
    found = []
    for share in (1, 0.5, 0.25):
        floats = differentiable(arrays)
        scaled = [(x * share).astype(x.dtype) if i in floats else x for i, x in enumerate(arrays)]
        operands = list(map(jnp.asarray, scaled))
        before = len(_compilations)
        function(*operands)
        found.append(len(_compilations) - before)
    return found


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.one_in(24)
def test_a_repeated_call_compiles_nothing(name, derivative):
    call, arrays = call_of(name)
    function, floats = functools.partial(call.function, jtk), differentiable(arrays)

    def total(*operands):
        results = jax.tree.leaves(call.function(jtk, *operands))
        return sum(x.sum() for x in results if jnp.issubdtype(x.dtype, jnp.inexact))

    if derivative:
        if not DESCRIPTIONS[name].derivatives or not floats:
            pytest.skip("has no derivatives")
        results = jax.tree.leaves(jax.eval_shape(function, *arrays))
        if not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in results):
            pytest.skip("has no float results")
        function = jax.grad(total, floats)
        if name in TRACED_AGAIN and jax.__version_info__ < (0, 11):
            pytest.xfail("JAX traces the function of each gradient again: docs/limits.md")
    _, *repeated = _compilations_of_calls(function, arrays)
    assert repeated == [0, 0]


def test_programs_of_the_last_functions_are_kept(monkeypatch):
    monkeypatch.setattr(jitted, "MOST_FUNCTIONS", 2)
    apply = jitted.jitted(functions=["function"])(lambda x, function: function(x))
    x, functions = jnp.ones(3), []
    for i in range(4):
        functions.append(lambda x, i=i: x + i)
        np.testing.assert_array_equal(apply(x, functions[i]), 1.0 + i)
    kept, references = functions[2], [weakref.ref(function) for function in functions]
    before = len(_compilations)
    apply(x, kept)
    assert len(_compilations) == before
    del functions
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, False, False]


@pytest.mark.parametrize(("further", "named"), [((), {"activation": jnp.sin}), ((1,), {})])
def test_too_many_arguments(further, named):
    x = jnp.ones((4, 4))
    np.testing.assert_array_equal(jtk.linear(x, x, x[0], jnp.cos), jnp.cos(x @ x + x))
    with pytest.raises(TypeError, match=r"multiple values|positional argument"):
        jtk.linear(x, x, x[0], jnp.cos, *further, **named)


def test_equal_methods_are_different_functions():
    """The object that they belong to may have changed."""

    class Scale:
        factor = 2.0

        def apply(self, x):
            return self.factor * x

    scale, x = Scale(), jnp.ones((4, 4))
    for scale.factor in (2.0, 3.0):
        np.testing.assert_array_equal(jtk.matmul(x, x, epilogue=scale.apply), 4 * scale.factor * x)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(2)
def test_a_repeated_call_is_not_traced_again(name, traced):
    x = jnp.ones((6, 6))
    CALLS[name](x)
    first = traced()
    assert first > 0
    CALLS[name](x)
    assert traced() == first
    # A function around it is traced, and nothing in it.
    jax.jit(lambda x: CALLS[name](x)).trace(x)
    assert traced() <= first + 1


@pytest.mark.parametrize("name", CALLS)
def test_jax_array_objects(name, rng):
    x = jnp.asarray(rng.standard_normal((6, 6)), jnp.float32)
    np.testing.assert_array_equal(CALLS[name](ArrayLike(x)), CALLS[name](x))
    np.testing.assert_array_equal(
        jax.jit(lambda x: CALLS[name](ArrayLike(x)))(x), jax.jit(CALLS[name])(x)
    )


def test_clear_caches_drops_what_is_remembered_of_calls():
    """Also the functions of epilogues, and what they close over."""
    x = np.ones((6, 6), np.float32)
    kept = []

    def call_with_functions():
        def scaled(y):
            return 2 * jnp.tanh(y)

        def shifted(y):
            return y + 1

        jtk.matmul(x, x, epilogue=scaled)
        jax.grad(lambda w: jtk.linear(x, w, None, shifted).sum())(x)
        jtk.linear(x, x, x[0], shifted)
        jtk.gated_linear(x, x, x, shifted)
        kept.extend((weakref.ref(scaled), weakref.ref(shifted)))

    call_with_functions()
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]

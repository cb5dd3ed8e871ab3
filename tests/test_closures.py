"""Functions of elements that read values of the program: values and gradients on every mesh."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from numerics import random
from sharded import AUTO, EXPLICIT, mesh_of, put

import jax_tilekern as jtk
from jax_tilekern.epilogue.scalar_function import trace_scalars

pytestmark = pytest.mark.usefixtures("highest_precision")

# Functions of an element and a value of the program. JAX traces by itself what is inside a jitted
# function, a branch, a loop and a function with a derivative of its own.
FUNCTIONS = {
    "elementary": lambda x, s: s * jnp.tanh(x * s) + jnp.ones_like(x),
    "jitted": lambda x, s: jax.nn.silu(x) * s,
    "own derivative": lambda x, s: jax.nn.relu(s * x) + jax.nn.softplus(x) * s,
    "branch": lambda x, s: lax.cond(x > 0, lambda x: 2 * x, jax.nn.silu, s * x),
    "loop": lambda x, s: lax.fori_loop(0, 3, lambda _, y: jnp.sin(s * y), x),
}
CHOSEN, SHARES = np.array([[0, 1], [2, 0], [1, 1], [2, 3]]), np.float32([[0.5, 0.5]] * 4)
SIDE = 16


def _elements(f):
    return jax.vmap(jax.vmap(f, (0, None)), (0, None))


def _epilogue(f, s, x, w, _):
    return jtk.matmul(x, w[0], epilogue=lambda y: f(y, s))


def _gated(f, s, x, w, _):
    return jtk.gated_linear(x, w[0], w[1], activation=lambda y: f(y, s))


def _rows(f, s, x, w, _):
    return jtk.matmul(x, w[0], epilogue=lambda y: (f(y, s), jtk.row_logsumexp(f(y, s))))


def _experts(f, s, x, w, chosen):
    chosen, shares = chosen
    return jtk.moe(x, w, w, shares, chosen, activation=lambda y: f(y, s))


def _plain_rows(f, s, x, w):
    y = _elements(f)(x @ w[0], s)
    return y, jax.nn.logsumexp(y, -1)


def _plain_experts(f, s, x, w):
    results = jnp.stack([_elements(f)(x @ matrix, s) @ matrix for matrix in w])
    return sum(SHARES[:, i, None] * results[CHOSEN[:, i], np.arange(len(CHOSEN))] for i in range(2))


OPERATIONS = {
    "epilogue": (_epilogue, lambda f, s, x, w: _elements(f)(x @ w[0], s)),
    "gated": (_gated, lambda f, s, x, w: _elements(f)(x @ w[0], s) * (x @ w[1])),
    "rows": (_rows, _plain_rows),
    "experts": (_experts, _plain_experts),
}


def _loss(results):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(results))


def test_messages_in_a_shard_map(rng):
    x, ids = random(rng, (8, 4), np.float32), np.array([0, 1, 1, 2, 0, 1, 0, 2])
    mesh = mesh_of((AUTO, AUTO))
    by_device = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P()
    )

    def total(f, s, x, ids):
        return lax.psum(jtk.segment_reduce(f(s), x, segment_ids=ids, num_segments=3), "d")

    def loss(s, f):
        return _loss(by_device(functools.partial(total, f))(s, x, ids))

    def plain(s):
        return _loss(jax.ops.segment_sum(jax.nn.silu(x) * s, ids, 3))

    found = jax.grad(loss)(np.float32(1.5), lambda s: lambda x: jax.nn.silu(x) * s)
    np.testing.assert_allclose(found, jax.grad(plain)(np.float32(1.5)), rtol=1e-4)
    with pytest.raises(NotImplementedError, match="an array of one row"):
        loss(np.float32(1.5), lambda s: lambda x: jax.nn.relu(x) * s)
    # The value is a row that all edges gather.
    y = jtk.segment_reduce(
        lambda x, s: jax.nn.relu(x) * s, x, np.full((1, 4), 1.5, np.float32),
        gather=(None, np.zeros(8, int)), segment_ids=ids, num_segments=3,
    )  # fmt: skip
    np.testing.assert_allclose(y, jax.ops.segment_sum(jax.nn.relu(x) * 1.5, ids, 3), rtol=1e-5)


def test_kernels_of_explicit_axes(rng):
    mesh, x = mesh_of((EXPLICIT, EXPLICIT)), random(rng, (8, 4), np.float32)

    def of(function):
        return jax.grad(lambda s, x: _loss(jtk.kernel(lambda x: function(x, s))(x)))

    with jax.set_mesh(mesh):
        s, rows = put(mesh, np.float32(1.5), P()), put(mesh, x, P("d"))
        found = jax.jit(of(lambda x, s: x * s))(s, rows)
        np.testing.assert_allclose(found, 2 * 1.5 * np.sum(x**2), rtol=1e-5)
        with pytest.warns(RuntimeWarning, match="in_axes=None"):
            found = jax.jit(of(lambda x, s: jax.nn.silu(x) * s))(s, rows)
    np.testing.assert_allclose(found, 3 * np.sum(jax.nn.silu(x) ** 2), rtol=1e-5)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("mesh_types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.one_in(36)
def test_values_of_the_program(rng, name, kind, mesh_types):
    f, (ours, plain) = FUNCTIONS[kind], OPERATIONS[name]
    x, w = (random(rng, shape, np.float32) for shape in ((4, SIDE), (4, SIDE, SIDE)))
    operands = np.float32(1.5), x, w / 4
    chosen = (CHOSEN, SHARES)

    def gradients(loss):
        return jax.value_and_grad(loss, (0, 1, 2))

    def close(found):
        def compare(a, b):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max(initial=1))

        jax.tree.map(compare, found, wanted)

    wanted = gradients(lambda *xs: _loss(plain(f, *xs)))(*operands)
    close(jax.jit(gradients(lambda *xs: _loss(ours(f, *xs, chosen))))(*operands))
    mesh = mesh_of((mesh_types, mesh_types))
    with jax.set_mesh(mesh):
        placed = [put(mesh, x, spec) for x, spec in zip(operands, (P(), P("d"), P()), strict=True)]
        rows = [put(mesh, x, P("d")) for x in chosen]
        needs_arguments = name == "experts" and kind in ("own derivative", "branch", "loop")
        if needs_arguments and mesh_types == EXPLICIT:
            with pytest.raises(NotImplementedError, match="Closing over inputs to shard_map"):
                jax.jit(gradients(lambda *xs: _loss(ours(f, *xs, rows))))(*placed)
        else:
            close(jax.jit(gradients(lambda *xs: _loss(ours(f, *xs, rows))))(*placed))

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(), P("d"), P(), (P("d"), P("d"))),
            out_specs=P(),
        )
        def by_hand(*xs):
            return lax.psum(_loss(ours(f, *xs)), "d")

        close(jax.jit(gradients(lambda *xs: by_hand(*xs, tuple(rows))))(*placed))


ONE, IDS = np.ones((2, 2), np.float32), np.int32([[0, 0]])
CALLS = {
    "matmul": lambda f: jtk.matmul(ONE, ONE, epilogue=f),
    "linear": lambda f: jtk.linear(ONE, ONE, ONE[0], f),
    "moe": lambda f: jtk.moe(ONE, ONE[None], ONE[None], ONE[:, :1], IDS.T, activation=f),
    "segment_reduce": lambda f: jtk.segment_reduce(f, ONE, segment_ids=IDS[0], num_segments=1),
    "kernel": lambda f: jtk.kernel(f)(ONE),
}  # fmt: skip
SCALE = 1.0


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_reads_variables_anew(call):
    """A function object reads its variables when it is called, and no trace keeps their values."""

    def first(scale):
        s = scale
        f = lambda y: s * y  # noqa: E731
        one = call(f)
        s = 10 * scale
        return one, call(f)

    for program in (first, jax.jit(first)):
        one, ten = program(3.0)
        np.testing.assert_allclose(ten, 10 * one)
        assert np.all(np.asarray(one) != 0)


@pytest.mark.parametrize("call", [*CALLS.values(), jtk.kernel], ids=[*CALLS, "kept kernel"])
def test_a_call_reads_globals_anew(call, monkeypatch):
    def f(y):
        return SCALE * y

    kept = call(f) if call is jtk.kernel else None
    found = []
    for scale in (1.0, 3.0, 1.0):
        monkeypatch.setitem(f.__globals__, "SCALE", scale)
        found.append(np.asarray(kept(ONE) if kept else call(f)))
    np.testing.assert_allclose(found[1], 3 * found[0])
    np.testing.assert_array_equal(found[2], found[0])


WEIGHTS = np.ones((2, 2), np.int8), None, np.ones((2, 1), np.float32)
LAYERS = CALLS | {
    "gated_linear": lambda f: jtk.gated_linear(ONE, ONE, ONE, f),
    "scaled_matmul": lambda f: jtk.scaled_matmul(ONE, *WEIGHTS, epilogue=f),
    "ragged_dot": lambda f: jtk.ragged_dot(ONE, ONE[None], IDS[0, :1], epilogue=f),
}  # fmt: skip


@pytest.mark.parametrize("call", LAYERS.values(), ids=LAYERS)
def test_values_of_a_program_do_not_outlive_its_trace(call):
    def loss(s):
        return call(lambda y: s * y).sum()

    with jax.checking_leaks():
        jax.jit(loss)(3.0)
        jax.jit(jax.grad(loss))(3.0)


FOUR = np.ones((1, 2, 1, 2), np.float32)
VARYING = LAYERS | {
    "symmetric_matmul": lambda f: jtk.symmetric_matmul(ONE, epilogue=f),
    "associative_scan": lambda f: jtk.associative_scan(lambda x, y: f(x + y), ONE),
    "attention": lambda f: jtk.attention(FOUR, FOUR, FOUR, score_mod=lambda x, *_: f(x)),
}


@pytest.mark.parametrize("call", VARYING.values(), ids=VARYING)
@pytest.mark.parametrize("axes", [{"d"}, {"d", "m"}], ids=["some axes", "all axes"])
@pytest.mark.one_in(4)
def test_values_that_vary_over_a_mesh(call, axes):
    """Each device's function reads the device's own value, and one that all devices have."""

    def on_device(own, shared):
        (s,) = own
        return call(lambda y: jnp.tanh(s * y) * shared)[None]

    def gradients(function):
        return jax.value_and_grad(lambda *xs: _loss(function(*xs)), (0, 1))

    # XLA's compiler crashes on the gradient of lax.associative_scan inside a shard_map.
    compared = (lambda f: f) if call is VARYING["associative_scan"] else gradients
    mesh = mesh_of((AUTO, AUTO))
    by_hand = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), axis_names=axes
    )
    own, shared = np.linspace(0.5, 1.5, mesh.shape["d"], dtype=np.float32), np.float32(1.5)
    found = jax.jit(compared(by_hand))(own, shared)
    by_map = jax.vmap(lambda x, shared: on_device(x[None], shared)[0], (0, None))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4),
        found,
        jax.jit(compared(by_map))(own, shared),
    )


def test_equal_variables_are_one_program():
    traces = []

    def f(y):
        traces.append(y.shape)
        return SCALE * y

    jtk.matmul(ONE, ONE, epilogue=f)
    first = len(traces)
    jtk.matmul(ONE, ONE, epilogue=f)
    assert len(traces) == first


@pytest.mark.parametrize("f", [jnp.tanh, jax.nn.silu], ids=["elementary", "jitted"])
def test_what_is_traced_does_not_keep_a_model(f):
    """Caches keep what is traced of a function, and not the objects that the function reads."""

    class Model:
        scale = 2.0

    def traced():
        model = Model()
        return weakref.ref(model), trace_scalars(lambda y: f(y) * model.scale, *2 * [ONE.dtype], ())

    model, kept = traced()
    gc.collect()
    assert model() is None
    x = jnp.float32(1.5)
    np.testing.assert_allclose(kept.function(x), [2 * f(x)], rtol=1e-6)


def test_functions_that_call_each_other():
    def f(y, depth=0):
        return y if depth == 3 else g(2 * y, depth + 1)

    def g(y, depth):
        return f(y, depth)

    np.testing.assert_array_equal(jtk.matmul(ONE, ONE, epilogue=f), 16.0)
    np.testing.assert_array_equal(jtk.kernel(f)(ONE), 8.0)

"""``fuse``: values, what remains beside the products, and transformations, on any backend."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jaxprs import FUSED, equations, name_of
from numerics import BF16, assert_close, assert_equal, random

import jax_tilekern as jtk

pytestmark = pytest.mark.usefixtures("highest_precision")

PRODUCTS = ("dot_general", "tilekern_contract", FUSED)
# What moves no data or belongs to the products' operands, and is no elementwise computation.
_OTHERS = {
    *PRODUCTS, "broadcast_in_dim", "squeeze", "reshape", "transpose", "reduce_sum", "scan", "cond",
    "while", "remat2", "checkpoint", "jit", "pjit", "custom_vjp_call", "custom_jvp_call",
}  # fmt: skip


def names(function, *args):
    """The primitives of a function's equations, the inner ones too."""
    return [name_of(eqn) for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)]


def assert_all_fused(function, *args):
    """A fused function has as many products as before, and no elementwise equation beside them."""
    found, before = names(jtk.fuse(function), *args), names(function, *args)
    assert sum(map(found.count, PRODUCTS)) == sum(map(before.count, PRODUCTS))
    assert found.count(FUSED) > 0
    assert set(found) <= _OTHERS, set(found) - _OTHERS


def assert_same(found, expected, tolerance=1e-5):
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, expected)
    assert_close(found, expected, tolerance)


def compiled_products(call, caplog):
    """The number of programs of fused products that a call compiles."""
    caplog.clear()
    with jax.log_compiles():
        call()
    return sum("Compiling jit(tilekern_contract)" in x.getMessage() for x in caplog.records)


def layer(x, w, b):
    return jax.nn.gelu(x @ w + b)


def masked(x, w, b, keep, residual):
    return residual + jnp.where(keep, jax.nn.silu(x @ w + b), 0)


@pytest.fixture
def operands(rng):
    shapes = (16, 24), (24, 32), (32,), (16, 32), (16, 32)
    x, w, b, keep, residual = (random(rng, shape, np.float32) for shape in shapes)
    return x, w, b, keep > 0, residual


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize(("function", "count"), [(layer, 3), (masked, 5)])
def test_a_layer_is_one_call(operands, function, count, dtype):
    args = [x if x.dtype == bool else x.astype(dtype) for x in operands[:count]]
    found = jtk.fuse(function)(*args)
    # Every operation on 16 bits is rounded, unless XLA leaves that out: a few roundings of values
    # of about 20.
    assert_same(found, function(*args), {BF16: 0.25, np.float16: 0.03}.get(dtype, 1e-5))
    assert_all_fused(function, *args)
    assert names(jtk.fuse(function), *args).count(FUSED) == 1


def test_every_operation_is_rounded_to_its_type(rng):
    """As in the function itself: the product too, and what is cast is as wide as it says."""

    def after(y, b):
        y = y + b
        return y, (y * y).astype(np.float32) + np.float32(1 / 7)

    def f(x, w, b):
        return after(x @ w, b)

    x, w, b = jnp.ones((8, 64), BF16), jnp.ones((64, 8), BF16), random(rng, (8, 8), BF16)
    traced = jax.make_jaxpr(jtk.fuse(f))(x, w, b)
    (call,) = (eqn for eqn in equations(traced.jaxpr) if name_of(eqn) == FUSED)
    # Not jitted, because XLA leaves out roundings inside a fusion.
    for accumulator, operand in zip(random(rng, (8,), np.float32) * 100, b[0], strict=True):
        found = call.params["function"](accumulator, operand)
        assert_equal(found, list(after(accumulator.astype(BF16), operand)))


def test_operands_of_every_shape(rng):
    x, w = random(rng, (2, 6, 5), np.float32), random(rng, (5, 7), np.float32)
    scale, column, batch = (random(rng, s, np.float32) for s in ((), (6, 1), (2, 1, 1)))

    def f(x, w, scale, column, batch):
        return jnp.sin(x @ w * scale + column) * batch + jnp.arange(7)

    args = x, w, scale, column, batch
    assert_same(jtk.fuse(f)(*args), f(*args))
    # The operand arange is converted by itself.
    assert names(jtk.fuse(f), *args).count("sin") == 0


def test_products_of_this_library(operands):
    x, w, b, *_ = operands

    def f(x, w, b):
        return jnp.tanh(jtk.matmul(x, w) + b)

    assert_same(jtk.fuse(f)(x, w, b), f(x, w, b))
    assert_all_fused(f, x, w, b)
    with jtk.patch():
        assert_all_fused(layer, x, w, b)


# -- What is stored. -------------------------------------------------------------------------------


def outputs(function, *args):
    """The number of results of each fused product."""
    return [
        len(eqn.outvars)
        for eqn in equations(jax.make_jaxpr(jtk.fuse(function))(*args).jaxpr)
        if name_of(eqn) == FUSED
    ]


def both_used(x, w, b):
    y = x @ w
    return jnp.tanh(y + b), y


def reduced(x, w, b):
    y = (jnp.abs(x) @ jnp.abs(w) + jnp.abs(b)).astype(BF16)
    z = y.astype(np.float32)
    return y, z.sum(), (z * z).sum()


def several(x, w, b):
    y = x @ w + b
    return jnp.tanh(y), jnp.sin(y), y.sum()


def gated(x, w, b):
    return jax.nn.silu(x @ w) * (x @ (2 * w) + b)


@pytest.mark.parametrize(
    ("function", "expected"), [(both_used, [2]), (reduced, [1]), (several, [3]), (gated, [1])]
)
def test_what_is_used_elsewhere_is_another_result(operands, function, expected):
    x, w, b, *_ = operands
    assert outputs(function, x, w, b) == expected
    # XLA may leave out that terms of the sums are rounded to 16 bits.
    tolerance = 2**-8 if function is reduced else 1e-4
    assert_same(jtk.fuse(function)(x, w, b), function(x, w, b), tolerance)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: x @ w,
        lambda x, w, b: (x @ w).sum(),
        lambda x, w, b: jnp.tanh((x @ w).T),
        lambda x, w, b: x[:, :, None] * w,
        lambda x, w, b: lax.dot_general(x, b, (((), ()), ((), ()))) + 1,
        lambda x, w, b: jnp.tanh(x.astype(np.complex64) @ w),
    ],
)
def test_products_without_an_epilogue(operands, function):
    x, w, b, *_ = operands
    found = names(jtk.fuse(function), x, w, b)
    assert FUSED not in found
    assert found.count("tilekern_contract") == names(function, x, w, b).count("dot_general")
    assert "dot_general" not in found
    assert_same(jtk.fuse(function)(x, w, b), function(x, w, b))


@pytest.mark.parametrize("ragged_dot", [lax.ragged_dot, jtk.ragged_dot])
def test_grouped_products_have_no_epilogue(operands, ragged_dot):
    """An epilogue would leave rows of no group zeros."""
    x, w, *_ = operands

    def f(x, w):
        return jnp.cos(ragged_dot(x, jnp.stack([w, w]), np.array([3, 5], np.int32)))

    assert FUSED not in names(jtk.fuse(f), x, w)
    assert_same(jtk.fuse(f)(x, w), f(x, w))
    gradients = (jax.grad(lambda w, f=f: f(x, w).sum())(w) for f in (jtk.fuse(f), f))
    assert_same(*gradients)


def test_a_function_without_products_is_unchanged(operands):
    def f(x, w):
        y = jax.jit(lambda x: jnp.where(x > 0, jax.nn.relu(x), jnp.cumsum(x, 0)))(x)
        return lax.scan(lambda c, row: (c + row.sum(), row), 0.0, y), jnp.sort(w)

    x, w, *_ = operands
    # The function is traced inside patch(), which replaces cumsum and sort.
    assert str(jax.make_jaxpr(jtk.fuse(f))(x, w)) == str(jax.make_jaxpr(jtk.patch(f))(x, w))


# -- Control flow and calls. -----------------------------------------------------------------------


def in_scan(x, w, b):
    return lax.scan(lambda x, _: (layer(x, w, b) @ w.T + x, None), x, None, length=3)[0]


def in_cond(x, w, b):
    return lax.cond(b[0] > 0, layer, lambda x, w, b: jnp.tanh(x @ w), x, w, b)


def in_while(x, w, b):
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1] @ w @ w.T / 99)), (0, x)
    )


def in_jit(x, w, b):
    return jax.jit(lambda x, w: jnp.einsum("ij,jk->ik", x, w))(x, w) + b


def in_checkpoint(x, w, b):
    return jax.checkpoint(layer)(x, w, b)


@jax.custom_vjp
def _with_rule(x, w, b):
    return layer(x, w, b)


_with_rule.defvjp(
    lambda x, w, b: (layer(x, w, b), (x, w, b)), lambda res, g: tuple(3 * r for r in res)
)


def in_custom_vjp(x, w, b):
    return _with_rule(x, w, b)


@jax.custom_jvp
def _with_tangent(x, w, b):
    return layer(x, w, b)


_with_tangent.defjvp(lambda primals, tangents: (_with_tangent(*primals), 3 * layer(*primals)))


def in_custom_jvp(x, w, b):
    return _with_tangent(x, w, b)


BODIES = [in_scan, in_cond, in_while, in_jit, in_checkpoint, in_custom_vjp, in_custom_jvp]


@pytest.mark.parametrize("function", BODIES)
def test_bodies_are_fused(operands, function):
    x, w, b, *_ = operands
    assert_same(jtk.fuse(function)(x, w, b), function(x, w, b), 1e-4)
    assert FUSED in names(jtk.fuse(function), x, w, b)


@pytest.mark.parametrize("function", [in_scan, in_checkpoint, in_custom_vjp, in_custom_jvp])
@pytest.mark.one_in(2)
def test_derivatives_of_fused_bodies(operands, function):
    """Rules of the user's stay what they are."""
    x, w, b, *_ = operands
    tangents = tuple(map(jnp.cos, (x, w, b)))
    if function is not in_custom_vjp:
        found, expected = (jax.jvp(f, (x, w, b), tangents) for f in (jtk.fuse(function), function))
        assert_same(found, expected, 1e-3)
    if function is not in_custom_jvp:
        found, expected = (
            jax.grad(lambda *xs, f=f: f(*xs).sum(), (0, 1, 2))(x, w, b)
            for f in (jtk.fuse(function), function)
        )
        assert_same(found, expected, 1e-3)


# -- Transformations. ------------------------------------------------------------------------------


def network(params, x):
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def pulled_back(params, x, cotangent):
    result, pullback = jax.vjp(network, params, x)
    return result, pullback(cotangent)


@pytest.fixture
def perceptron(rng):
    sizes = (12, 20, 28, 6)
    params = [
        (random(rng, (m, n), np.float32) / 4, random(rng, (n,), np.float32))
        for m, n in itertools.pairwise(sizes)
    ]
    return params, random(rng, (9, sizes[0]), np.float32), random(rng, (9, sizes[-1]), np.float32)


def test_the_gradient_of_a_perceptron_is_its_products(perceptron):
    """Derivatives of activations are in the kernels of the products of their cotangents."""
    assert_same(jtk.fuse(pulled_back)(*perceptron), pulled_back(*perceptron), 1e-4)
    assert_all_fused(pulled_back, *perceptron)
    # Two layers store what their activation is applied to as well.
    assert outputs(pulled_back, *perceptron) == [2, 2, 1, 1, 1]


def test_inside_and_outside_of_derivatives(perceptron):
    params, x, _ = perceptron

    def loss(function, params):
        return (function(params, x) ** 2).sum()

    gradient = jax.grad(functools.partial(loss, network))
    of_fused = jax.grad(functools.partial(loss, jtk.fuse(network)))
    expected = jax.jit(gradient)(params)
    for fused in (of_fused, jtk.fuse(gradient), jtk.fuse(of_fused)):
        assert_same(jax.jit(fused)(params), expected, 1e-3)


def test_custom_derivatives_are_respected():
    """At 0 the derivative of a relu is 0, and that of a maximum is a half."""
    x, w = jnp.zeros((4, 4)), jnp.ones((4, 4))
    fused = jtk.fuse(lambda x: jax.nn.relu(x @ w))
    assert names(fused, x).count(FUSED) == 1
    assert_equal(jax.grad(lambda x: fused(x).sum())(x), jnp.zeros((4, 4)))


def test_symbolic_shapes_are_jaxs():
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 24"), np.float32)
    w, b = (jax.ShapeDtypeStruct(s, np.float32) for s in ((24, 32), (32,)))
    assert FUSED not in names(jtk.fuse(layer), rows, w, b)


def test_arguments_are_those_of_the_function(operands):
    x, w, b, *_ = operands
    traced = []

    @functools.partial(jtk.fuse, static_argnames="activation")
    def f(params, *, activation, scale=2.0):
        traced.append(activation)
        return {"out": getattr(jnp, activation)(params["x"] @ params["w"] + b) * scale}

    for _ in range(2):
        found = f({"x": x, "w": w}, activation="sin")
    assert_same(found, {"out": jnp.sin(x @ w + b) * 2})
    assert traced == ["sin"]


def test_static_arguments_of_a_jit_around_it(operands):
    x, w, *_ = operands

    def f(x, w, mode, flag, times, activation, scale=None):
        assert scale is None
        y = x @ w
        for _ in range(times):
            y = activation(y) if flag and mode == "twice" else y
        return y

    static = ("twice", True, 2, jnp.sin)
    expected = jnp.sin(jnp.sin(x @ w))
    assert_same(jax.jit(jtk.fuse(f), static_argnums=(2, 3, 4, 5))(x, w, *static), expected)
    named = dict(zip(("mode", "flag", "times", "activation"), static, strict=True), scale=None)
    assert_same(jax.jit(jtk.fuse(f), static_argnames=[*named])(x, w, **named), expected)
    compiled = jtk.fuse(f, static_argnums=(2, 3, 4, 5)).lower(x, w, *static).compile()
    assert_same(compiled(x, w), expected)
    assert_same(jtk.fuse(f)(x, w, *static), expected)
    assert jtk.fuse(f).eval_shape(x, w, *static).shape == expected.shape


def test_static_arguments_are_compiled_once(operands):
    x, w, *_ = operands
    traced = []

    def f(x, w, activation, other=None):
        traced.append(activation)
        return activation(x @ w)

    for named in ({"static_argnums": (2,)}, {"static_argnames": ("activation", "other")}):
        traced.clear()
        fused = jtk.fuse(f, **named)
        for _ in range(2):
            assert_same(fused(x, w, jnp.sin), jnp.sin(x @ w))
        assert traced == [jnp.sin]


# -- Methods of models. ----------------------------------------------------------------------------


class Linen(nn.Module):
    def layers(self, x, train):
        hidden = nn.relu(nn.Dense(16)(x))
        self.sow("intermediates", "hidden", hidden)
        hidden = nn.Dropout(0.5, deterministic=not train)(hidden)
        return nn.Dense(4)(nn.BatchNorm(use_running_average=not train)(hidden))

    @nn.compact
    def __call__(self, x, train=True):
        return self.layers(x, train)


class FusedInside(Linen):
    @nn.compact
    @jtk.fuse
    def __call__(self, x, train=True):
        return self.layers(x, train)


class FusedOutside(Linen):
    @jtk.fuse
    @nn.compact
    def __call__(self, x, train=True):
        return self.layers(x, train=train)


@pytest.mark.parametrize("model", [FusedInside(), FusedOutside()])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.one_in(2)
def test_methods_of_linen(operands, model, transform):
    x = operands[0]
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def step(model):
        variables = transform(model.init)(rngs, x)
        train = functools.partial(model.apply, rngs=rngs, mutable=["batch_stats", "intermediates"])
        gradient = jax.grad(lambda v: model.apply(v, x, train=False).sum())
        return variables, transform(train)(variables, x), transform(gradient)(variables)

    found = step(model)
    assert_same(found, step(Linen()))
    applied = functools.partial(model.apply, train=False)
    assert names(applied, found[0], x).count(FUSED) == 2


@pytest.mark.parametrize("model", [FusedInside(), FusedOutside()])
def test_calls_of_linen_outside_of_jit_are_compiled_once(operands, model, caplog):
    x = operands[0]
    variables = model.init(jax.random.key(0), x, train=False)

    def step():
        return jax.value_and_grad(lambda v: model.apply(v, x, train=False).sum())(variables)

    step()
    assert compiled_products(step, caplog) == 0


def test_calls_of_methods_outside_of_jit_are_compiled_once_for_each_constant(operands, caplog):
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @jtk.fuse
        def __call__(self, x, w):
            return jax.nn.relu(x @ w * self.scale)

    x, w, *_ = operands

    def step(scale):
        assert_same(Model(scale)(x, w), jax.nn.relu(x @ w * scale))

    for scale in (2.0, -3.0):
        step(scale)
        assert compiled_products(lambda scale=scale: step(scale), caplog) == 0


def test_setup_of_linen(operands):
    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(4)

        @jtk.fuse
        def __call__(self, x):
            return jnp.tanh(self.dense(x))

    x = operands[0]
    variables = Model().init(jax.random.key(0), x)
    dense = variables["params"]["dense"]
    assert_same(Model().apply(variables, x), jnp.tanh(x @ dense["kernel"] + dense["bias"]))


def test_methods_of_nnx(operands):
    class Model(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(24, 4, rngs=nnx.Rngs(0))

        @jtk.fuse
        def __call__(self, x):
            return nnx.relu(self.dense(x))

    x, model = operands[0], Model()

    def plain(model, x):
        return nnx.relu(model.dense(x))

    for f in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
        assert_same(f(model, x), plain(model, x))
        gradients = (nnx.grad(lambda m, f=f: f(m, x).sum())(model) for f in (f, plain))
        assert_same(*map(jax.tree.leaves, gradients))
    assert jtk.explain(model, x)[0].call.endswith("(accumulator, n)")


def test_methods_of_equinox(operands):
    equinox = pytest.importorskip("equinox")

    class Model(equinox.Module):
        dense: equinox.nn.Linear
        activation: Callable

        @jtk.fuse
        def __call__(self, x):
            return self.activation(jax.vmap(self.dense)(x))

    x = operands[0]
    model = Model(equinox.nn.Linear(24, 4, key=jax.random.key(0)), jax.nn.relu)

    def plain(model, x):
        return jax.nn.relu(jax.vmap(model.dense)(x))

    for f in (lambda m, x: m(x), equinox.filter_jit(lambda m, x: m(x))):
        assert_same(f(model, x), plain(model, x))
        gradients = (equinox.filter_grad(lambda m, f=f: f(m, x).sum())(model) for f in (f, plain))
        assert_same(*map(jax.tree.leaves, gradients))
    assert jtk.explain(model, x)[0].call.endswith("(accumulator, m)")


def test_methods_of_classes(operands):
    x, w, b, *_ = operands

    class Model:
        def __init__(self, w):
            self.w = w

        @jtk.fuse
        def __call__(self, x, scale=2.0):
            return jnp.tanh(x @ self.w + b) * scale

    model = Model(w)
    for weights in (w, w + 1):
        model.w = weights
        expected = jnp.tanh(x @ weights + b) * 3
        for f in (model, jax.jit(lambda x, scale: model(x, scale=scale))):
            assert_same(f(x, scale=3.0), expected)
        gradients = (
            jax.grad(lambda x, f=f: f(x).sum())(x)
            for f in (model, lambda x: jnp.tanh(x @ model.w + b) * 2)
        )
        assert_same(*gradients)
    for f in (model, model.__call__):
        assert len(jtk.explain(f, x)) >= 1


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="fuse takes a function"):
        jtk.fuse(jnp.ones(3))


# -- Results in the memory of operands. ------------------------------------------------------------


def overwritten(function, *args):
    """Pairs of an operand and a result in its memory, of all products with an epilogue."""
    found = equations(jax.make_jaxpr(jtk.fuse(function))(*args).jaxpr)
    return [pair for eqn in found for pair in eqn.params.get("in_place", ())]


@pytest.fixture
def squares(rng):
    return [random(rng, (16, 16), np.float32) / 4 for _ in range(5)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, u, w: jnp.tanh(x @ w) * x,  # an argument
        lambda x, u, w: (u, y := x @ w, jnp.tanh(y) * u),  # returned
        lambda x, u, w: (u.sum(0), y := x @ w, jnp.tanh(y) * u),  # read by no product
        lambda x, u, w: (u @ w, y := x @ w, jnp.tanh(y) * u),  # read by a product beside it
        lambda x, u, w: jnp.tanh(u @ w) * u,  # a factor of the same product
        lambda x, u, w: jnp.tanh(u.T @ w) * u,
        lambda x, u, w: jnp.tanh(x @ w) * u * u.T,  # read in two orders
        lambda x, u, w: jnp.tanh(x @ w) * u.T,
        lambda x, u, w: (jnp.tanh(x @ w) * u).astype(BF16),  # of another type
    ],
)
def test_operands_that_are_not_overwritten(squares, function):
    def with_product(x, w, v):
        return function(x, x @ v, w)

    assert not overwritten(with_product, *squares[:3])
    found, expected = (f(*squares[:3]) for f in (jtk.fuse(with_product), with_product))
    assert_close(found, expected, 0.02)


def test_operands_of_a_call_that_is_differentiated_are_not_overwritten(squares):
    x, gate, up, *_ = squares

    def loss(x):
        return (
            jtk.gated_linear(x, gate, up).sum()
            + jtk.fuse(lambda x: jnp.tanh(x @ gate) * (x @ up))(x).sum()
        )

    forward, backward = (
        [pair for eqn in equations(jax.make_jaxpr(f)(x).jaxpr)
         for pair in eqn.params.get("in_place", ())]
        for f in (loss, jax.grad(loss))
    )  # fmt: skip
    # That of gated_linear is inside its own primitive, which may be one kernel.
    assert forward == [(0, 0)]
    assert not backward


def test_effects_keep_their_order(operands, capsys):
    x, w, b, *_ = operands

    @jtk.fuse
    def f(x, w, b):
        jax.debug.print("first", ordered=True)
        y = jnp.sin(x @ w + b)
        jax.debug.print("second", ordered=True)
        return y

    f(x, w, b).block_until_ready()
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["first", "second"]


# -- Random programs. ------------------------------------------------------------------------------

UNARY = [jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.silu, jax.nn.softplus, lambda x: 0.5 * x - 1,
         lambda x: jnp.where(jnp.isnan(x), 0, x)]  # fmt: skip
BINARY = [jnp.add, jnp.subtract, jnp.maximum, lambda x, y: jnp.tanh(x) * y,
          lambda x, y: jnp.where(x > 0.1234, y, y + x - x)]  # fmt: skip
# Each step applies a function to values that there are already; numbers choose them.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["product", "unary", "unary", "binary", "binary", "sum", "bias", "row"]),
        *(st.integers(0, 2**16) for _ in range(3)),
    ),
    min_size=2,
    max_size=12,
)


def program(steps, kept):
    """A function of a matrix, a vector and a column, all of whose values are of one shape."""

    def function(matrix, vector, column):
        values = [matrix]
        for kind, i, j, k in steps:
            x, y = values[-1 - i % min(3, len(values))], values[j % len(values)]
            if kind == "product":
                values.append(x @ y / 4)
            elif kind == "unary":
                values.append(UNARY[k % len(UNARY)](x))
            elif kind == "binary":
                values.append(BINARY[k % len(BINARY)](x, y))
            elif kind == "sum":
                values.append(x - x.mean(k % 2, keepdims=True))
            elif kind == "bias":
                values.append(x + vector)
            else:
                values.append(x * column)
        return [values[-1], *(values[i % len(values)] for i in kept)]

    return function


@given(STEPS, st.lists(st.integers(0, 2**16), max_size=3), st.integers(0, 2**32 - 1))
def test_random_programs(steps, kept, seed):
    rng = np.random.default_rng(seed)
    args = [random(rng, shape, np.float32) / 2 for shape in ((6, 6), (6,), (6, 1))]
    function = program(steps, kept)
    found, expected = jtk.fuse(function)(*args), jax.jit(function)(*args)
    for x, y in zip(found, expected, strict=True):
        # A function may jump where its argument is rounded differently.
        scale = 1 + float(jnp.abs(y).max())
        assert np.isclose(x, y, rtol=1e-3, atol=1e-4 * scale).mean() > 0.9
    before, after = (names(f, *args) for f in (function, jtk.fuse(function)))
    assert sum(map(after.count, PRODUCTS)) == before.count("dot_general")
    assert after.count("tanh") <= before.count("tanh")


def test_functions_around_a_fused_one_are_not_taken_for_it():
    """``functools.wraps`` copies no method ``trace``, by which JAX would trace the gradient."""
    x, w = jnp.ones((4, 8)), jnp.ones((8, 3))
    gradient = jax.grad(jax.checkpoint(jtk.fuse(lambda w: jnp.tanh(x @ w).sum())))
    assert jax.make_jaxpr(gradient)(w).out_avals[0].shape == w.shape

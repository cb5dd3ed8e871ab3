"""``patch``: what it takes over, for whom and for how long, in every transformation of JAX's.

Products stand for all of it where it holds.
"""

import functools
import sys
import threading

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P
from jaxprs import equations, traced
from numerics import assert_close, on_gpu, random

import jax_tilekern as jtk
from jax_tilekern.interop import compat
from jax_tilekern.ops.segments import jax_scatters

pytestmark = pytest.mark.usefixtures("highest_precision")

f32 = np.float32
four_devices = pytest.mark.skipif(len(jax.devices()) < 4, reason="takes four devices")


# A function of JAX's, and the operands that it takes.
PRODUCTS = {
    "matmul": (jnp.matmul, ((4, 5), (5, 3))),
    "matmul, batched": (jnp.matmul, ((2, 1, 4, 5), (3, 5, 3))),
    "operator": (lambda x, y: x @ y, ((4, 5), (5, 3))),
    "dot": (jnp.dot, ((4, 5), (2, 5, 3))),
    "vdot": (jnp.vdot, ((4, 5), (4, 5))),
    "tensordot": (jnp.tensordot, ((3, 4, 5), (4, 5, 2))),
    "inner": (jnp.inner, ((4, 5), (3, 5))),
    "vecdot": (jnp.vecdot, ((4, 5), (4, 5))),
    "outer by einsum": (functools.partial(jnp.einsum, "i,j->ij"), ((4,), (5,))),
    "einsum": (functools.partial(jnp.einsum, "bqhd,bkhd->bhqk"), ((2, 4, 3, 5), (2, 6, 3, 5))),
    "matvec": (jnp.matvec, ((2, 4, 5), (5,))),
    "vecmat": (jnp.vecmat, ((5,), (2, 5, 4))),
    "multi_dot": (lambda *xs: jnp.linalg.multi_dot(xs), ((4, 5), (5, 6), (6, 2))),
    "lax.dot": (lax.dot, ((4, 5), (5, 3))),
    "lax.batch_matmul": (lax.batch_matmul, ((2, 4, 5), (2, 5, 3))),
    "lax.dot_general": (
        functools.partial(lax.dot_general, dimension_numbers=(((1,), (2,)), ((0,), (1,)))),
        ((2, 5, 4), (3, 2, 5)),
    ),
    "lax.ragged_dot": (
        lambda x, w: lax.ragged_dot(x, w, jnp.array([3, 0, 4])),
        ((8, 5), (3, 5, 2)),
    ),
    "lax.ragged_dot_general": (
        lambda x, y: lax.ragged_dot_general(
            x,
            y,
            jnp.array([3, 0, 4]),
            lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []),
        ),
        ((7, 5), (7, 2)),
    ),
}


def product(x):
    return x @ x


X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 6)), f32)


@pytest.mark.parametrize(("function", "shapes"), PRODUCTS.values(), ids=PRODUCTS)
def test_every_product_is_ours_inside_and_jaxs_outside(rng, x64, function, shapes):
    args = [random(rng, shape, np.float64) for shape in shapes]
    ours, jaxs = traced(function, *args)
    assert ours == 0
    assert jaxs > 0
    with jtk.patch():
        assert traced(function, *args) == (jaxs, 0)
        found = function(*args)
        types = jax.eval_shape(function, *args)
    assert traced(function, *args) == (0, jaxs)
    expected = function(*args)
    # Both sum at most 20 products of numbers of about 1 in float64.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    assert jax.typeof(found) == jax.typeof(expected)
    assert types == jax.eval_shape(function, *args)


def test_arrays_of_numpy_have_the_types_that_jax_gives_them():
    """Without ``jax_enable_x64``, NumPy's 64-bit arrays are arrays of 32 bits."""
    rng = np.random.default_rng(0)
    product = functools.partial(lax.dot_general, dimension_numbers=(((2,), (1,)), ((0,), (0,))))
    x, y, of_batch = (rng.normal(size=s) for s in ((3, 4, 5), (3, 5, 6), (3, 4, 5, 10)))
    mapped = jax.vmap(product, in_axes=(3, None))
    expected = product(x, y).dtype, mapped(of_batch, y)
    with jtk.patch():
        dtype, found = product(x, y).dtype, mapped(of_batch, y)
    assert dtype == expected[0]
    assert found.dtype == expected[1].dtype
    assert_close(found, expected[1], 1e-6)


@pytest.mark.parametrize("weak", [(True, True), (True, False), (False, True)])
def test_weak_types_are_kept(weak):
    operands = [1.5 if is_weak else jnp.asarray(2, jnp.bfloat16) for is_weak in weak]
    for function in (jnp.dot, functools.partial(jnp.einsum, ",->")):
        expected = function(*operands)
        with jtk.patch():
            found = function(*operands)
        assert jax.typeof(found) == jax.typeof(expected)
        assert found == expected


def test_errors_are_jaxs():
    def error(function, *args):
        with pytest.raises((TypeError, ValueError)) as raised:
            function(*args)
        return type(raised.value), str(raised.value)

    numbers = (((0,), (0,)), ((), ()))
    for function, *args in (
        (jnp.matmul, jnp.ones((2, 3)), jnp.ones((2, 3))),
        (jnp.einsum, "ij,jk", jnp.ones((2, 3)), jnp.ones((4, 3))),
        (lax.dot_general, jnp.ones((2, 3)), jnp.ones((4, 3)), numbers),
        (lax.dot_general, jnp.ones(()), jnp.ones((4, 3)), numbers),
        (lax.ragged_dot, jnp.ones((2, 3)), jnp.ones((1, 4, 3)), jnp.array([2])),
    ):
        expected = error(function, *args)
        with jtk.patch():
            assert error(function, *args) == expected


# Updates of rows, and the largest elements.


def ours_in(function, *args):
    """The library's primitives in a function's jaxpr."""
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    return [name for name in names if name.startswith("tilekern_")]


def whole_table(rng, *shape, dtype=f32):
    return jnp.asarray(rng.integers(-2, 3, shape)).astype(dtype)


IDS = np.array([[3, -1, 0, 9], [3, 3, -9, 1]])


def at(name, **kwargs):
    return lambda x, u: getattr(x.at[IDS.ravel()], name)(u, **kwargs)


# Functions of a table of 5 rows and of 8 updates.
UPDATES = {
    "segment_sum": lambda x, u: jax.ops.segment_sum(u, IDS.ravel(), 5),
    "segment_sum, sorted": lambda x, u: jax.ops.segment_sum(
        u, np.sort(IDS.ravel()), 5, indices_are_sorted=True
    ),
    "segment_max, clip": lambda x, u: jax.ops.segment_max(u, IDS.ravel(), 5, mode="clip"),
    "segment_min": lambda x, u: jax.ops.segment_min(u, IDS.ravel(), 5),
    "segment_prod": lambda x, u: jax.ops.segment_prod(u, IDS.ravel(), 5),
    "add": at("add"),
    "add, clip": at("add", mode="clip"),
    "multiply": at("multiply"),
    "max": at("max", mode="drop"),
    "min": at("min"),
    "add of a number": lambda x, u: x.at[IDS.ravel()].add(2),
    "add at a matrix of indices": lambda x, u: x.at[IDS].add(u.reshape(2, 4, *u.shape[1:])),
    "add to columns": lambda x, u: x.T.at[:, IDS.ravel()].add(u.T),
    "vmap": lambda x, u: jax.vmap(lambda x, i, u: x.at[i].add(u), (None, 0, 0))(
        x, IDS, u.reshape(2, 4, *u.shape[1:])
    ),
    "vmap of columns": lambda x, u: jax.vmap(lambda u: x[:, 0].at[IDS.ravel()].max(u), 1, 1)(u),
}


@pytest.mark.parametrize("dtype", [f32, jnp.bfloat16, np.int8, np.uint16])
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.one_in(12)
def test_updates_of_rows(rng, monkeypatch, name, dtype):
    """Operands are small integers, so that every sum is exact."""
    function = UPDATES[name]
    args = whole_table(rng, 5, 3, dtype=dtype), whole_table(rng, 8, 3, dtype=dtype)
    expected = function(*args)
    with jtk.patch():
        assert ours_in(function, *args) == ["tilekern_scatter_rows"]
        found = [function(*args)]
        # Where a GPU would take kernels.
        monkeypatch.setattr(jax_scatters, "_bind", jax_scatters.by_segments)
        found.append(jax.jit(lambda *args: function(*args))(*args))
    assert ours_in(function, *args) == []
    for each in found:
        assert jax.typeof(each) == jax.typeof(expected)
        np.testing.assert_array_equal(each.astype(f32), expected.astype(f32))


def test_the_sum_of_updates_and_the_table_is_rounded_once(monkeypatch):
    monkeypatch.setattr(jax_scatters, "_bind", jax_scatters.by_segments)
    x, u = jnp.full((1, 1), -1000, jnp.bfloat16), jnp.asarray([[1000], [3.3]], jnp.bfloat16)
    with jtk.patch():
        assert x.at[np.zeros(2, int)].add(u) == u[1:]


def test_derivatives_of_updates(rng):
    """JAX's own, also of equal extrema, by this library's updates of rows."""
    x, u, c = whole_table(rng, 5, 3), whole_table(rng, 8, 3), random(rng, (5, 3), f32)
    for name, count in (("add", 1), ("max", 4), ("multiply", 2)):
        update = at(name)

        def loss(x, u, update=update):
            return jnp.sum(update(x, u) ** 2 * c)

        gradient = jax.grad(loss, 0 if name == "multiply" else (0, 1))
        expected = gradient(x, u)
        with jtk.patch():
            assert ours_in(gradient, x, u).count("tilekern_scatter_rows") == count
            jax.tree.map(assert_close, jax.jit(gradient)(x, u), expected)


def test_gradients_of_rows(rng):
    x, ids = random(rng, (6, 3), f32), np.array([2, 2, -1])
    for rows in (lambda x: x[ids], lambda x: jnp.take(x, ids, 0, mode="clip")):

        def loss(x, rows=rows):
            return jnp.sum(rows(x) ** 3)

        expected = jax.grad(loss)(x)
        with jtk.patch():
            assert ours_in(jax.grad(loss), x) == ["tilekern_scatter_rows"]
            assert_close(jax.grad(loss)(x), expected)


def test_other_updates_stay_jaxs():
    x, ids = jnp.ones((4, 4)), np.array([1, 2])
    with jtk.patch():
        for function in (
            lambda x: x.at[ids].set(1),
            lambda x: x.at[ids].add(1, unique_indices=True),
            lambda x: x.at[ids, ids].add(1),
            lambda x: x.at[ids, 1:3].add(1),
            lambda x: x.at[1:3].add(1),
            lambda x: x.at[1].add(1),
            lambda x: (x > 0).at[ids].max(True),
            lambda x: (x * 1j).at[ids].add(1),
            lambda x: lax.top_k(x, 2, axis=0),
        ):
            assert ours_in(function, x) == []


def test_top_k(rng):
    x = whole_table(rng, 4, 9)

    def loss(x):
        return jnp.sum(lax.top_k(x, 3)[0] ** 2)

    def calls():
        largest = functools.partial(lax.top_k, k=3)
        return largest(x), jax.jit(largest)(x), jax.grad(loss)(x), jax.vmap(largest)(x)

    expected = calls()
    with jtk.patch():
        assert ours_in(lambda x: lax.top_k(x, 3), x) == ["tilekern_top_k"]
        found = calls()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# Functions of a table of whole numbers that select by order and scan, and what they are.
SORTS = "tilekern_sort_operands"
SELECTED = {
    "sort": (lambda x: jnp.sort(x, 0, descending=True), SORTS),
    "argsort": (lambda x: jnp.argsort(x), SORTS),
    "lexsort": (lambda x: jnp.lexsort((x, -x)), SORTS),
    "lax.sort": (lambda x: lax.sort((x, -x, x * x), 0, num_keys=2), SORTS),
    "unique": (lambda x: jnp.unique(x, size=3), SORTS),
    "median": (lambda x: jnp.median(x, -1), "tilekern_order_statistics"),
    "quantile": (lambda x: jnp.quantile(x, jnp.array([0, 0.5]), 0), "tilekern_order_statistics"),
    "percentile": (
        lambda x: jnp.percentile(x, 50, keepdims=True, method="lower"),
        "tilekern_order_statistics",
    ),
    "searchsorted": (lambda x: jnp.searchsorted(x[0], x, side="right"), "tilekern_searchsorted"),
    "digitize": (lambda x: jnp.digitize(x, jnp.array([-1, 1.0])), "tilekern_searchsorted"),
    "jnp.cumsum": (lambda x: jnp.cumsum(x, 0), "tilekern_cumulative"),
    "lax.cumsum": (lambda x: lax.cumsum(x, 0, reverse=True), "tilekern_cumulative"),
}
# The same where there is a GPU.
SELECTED_ON_GPUS = {
    "jnp.cumprod": (lambda x: jnp.cumprod(x, 0), "tilekern_cumulative"),
    **{
        name: (lambda x, name=name: getattr(lax, name)(x, 0), "tilekern_cumulative")
        for name in ("cummax", "cummin", "cumlogsumexp")
    },
    "approx_max_k": (lambda x: lax.approx_max_k(x, 3), "tilekern_top_k"),
    "approx_min_k": (lambda x: lax.approx_min_k(x, 3, 0), "tilekern_top_k"),
}


@pytest.mark.parametrize("name", [*SELECTED, *SELECTED_ON_GPUS])
def test_selection_and_scans(rng, name):
    function, primitive = (SELECTED | SELECTED_ON_GPUS)[name]
    x = whole_table(rng, 4, 9)

    def calls():
        mapped = jax.vmap(function, 1)(x[:, None])
        return function(x), jax.jit(lambda x: function(x))(x), mapped

    expected = calls()
    with jtk.patch():
        assert (primitive in ours_in(function, x)) == (name in SELECTED or on_gpu())
        with jtk.gpu_target("sm_90"):
            assert primitive in ours_in(function, x)
            if name.startswith("approx"):
                # Which of equal elements is found is not defined.
                x, expected = x.at[:].set(rng.permutation(36).reshape(4, 9)), None
            found = calls()
    assert primitive not in ours_in(function, x)
    jax.tree.map(same_array, found, expected or calls())


def same_array(found, expected):
    assert jax.typeof(found) == jax.typeof(expected)
    # Whole numbers are exact, but for logarithms.
    slack = 1e-6 if jnp.issubdtype(found.dtype, jnp.floating) else 0
    np.testing.assert_allclose(found, expected, rtol=slack, atol=slack)


def test_other_selections_stay_jaxs():
    x = jnp.ones((4, 4))
    with jtk.patch(), jtk.gpu_target("sm_90"):
        for function in (
            lambda x: jnp.searchsorted(x[0], x, method="sort").astype(np.int8),
            lambda x: lax.cumsum(x.astype(jnp.bfloat16)),
            lambda x: lax.cumlogsumexp(x.astype(jnp.float16)),
            lambda x: lax.approx_max_k(x, 2, aggregate_to_topk=False),
        ):
            assert not {*ours_in(function, x)} - {SORTS}
        assert ours_in(lambda x: jnp.nanmedian(x, 0), x) == [SORTS]


@pytest.mark.parametrize(
    "call", [lambda x: lax.top_k(x, 1), lax.cumsum, lax.cummax, lambda x: lax.sort(x)]
)
def test_lists_are_refused_as_by_jax(call):
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        call([3.0, 1.0])
    with pytest.raises(type(theirs.value)), jtk.patch():
        call([3.0, 1.0])


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_scans_refuse_booleans_as_jaxs_do(name):
    x = jnp.array([True, False])
    with jtk.patch(), jtk.gpu_target("sm_90"), pytest.raises(TypeError, match="bool"):
        jax.make_jaxpr(getattr(lax, name))(x)


def test_derivatives_of_selections(rng):
    x = jnp.asarray(rng.permutation(36).reshape(4, 9), f32)
    for name in ("lax.sort", "median", "quantile", "jnp.cumsum", "jnp.cumprod", "approx_max_k"):
        function = (SELECTED | SELECTED_ON_GPUS)[name][0]

        def loss(x, function=function):
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(x / 9)))

        expected = jax.grad(loss)(x)
        with jtk.patch(), jtk.gpu_target("sm_90"):
            assert_close(jax.grad(loss)(x), expected)


@pytest.mark.defaults
def test_updates_take_kernels_where_these_are_faster():
    """Not of narrow rows, nor of few of them in a table that may be updated in place."""

    def kernels(function, rows, segments, columns, dtype):
        x, u = (jax.ShapeDtypeStruct((n, columns), dtype) for n in (segments, rows))
        ids = jax.ShapeDtypeStruct((rows,), np.int32)
        with jtk.gpu_target("sm_90"), jtk.patch():
            choices = jtk.explain(function, x, u, ids, platform="cuda")
        return [choice.kernel for choice in choices if choice.kernel]

    def segment_sum(x, u, ids):
        return jax.ops.segment_sum(u, ids, x.shape[0])

    def add(x, u, ids):
        return x.at[ids].add(u)

    for function in (segment_sum, add):
        assert kernels(function, 1 << 20, 1 << 16, 256, f32)
        assert kernels(function, 1 << 20, 1 << 16, 256, jnp.bfloat16)
        assert not kernels(function, 400_000, 50_000, 1, f32)
    assert kernels(segment_sum, 1 << 17, 1 << 17, 256, f32)
    assert not kernels(add, 1 << 17, 1 << 17, 256, f32)


# Where it holds.


def test_in_this_thread_only():
    inside, looked = threading.Event(), threading.Event()
    found = {}

    def other():
        inside.wait(10)
        found["beside"] = traced(product, X)
        with jtk.patch():
            found["patched itself"] = traced(product, X)
        found["after"] = traced(product, X)
        looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with jtk.patch():
        inside.set()
        looked.wait(10)
        assert traced(product, X) == (1, 0)
    thread.join()
    assert found == {"beside": (0, 1), "patched itself": (1, 0), "after": (0, 1)}


def test_our_fallbacks_and_references_reach_xla():
    """int16 has no kernel: XLA's operation is lowered, and not ours once more."""
    z = jnp.ones((4, 4), jnp.int16)
    with jtk.patch():
        for function in (
            product,
            lambda z: jtk.matmul(z, z),
        ):
            choices = jtk.explain(function, z)
            assert choices
            assert all(choice.kernel is None for choice in choices)
            assert "no kernel for int16" in choices[0].reason
        text = jax.jit(product).lower(z).as_text()
        np.testing.assert_array_equal(product(z), 4 * np.ones((4, 4)))
    assert text.count("stablehlo.dot_general") == 1
    # Lowered where there is no planner at all.
    with jtk.patch():
        text = jax.jit(product).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.dot_general") == 1


# Caches.


def test_a_jitted_function_has_a_program_inside_and_another_outside():
    traces = []

    @jax.jit
    def function(x):
        traces.append(None)
        return jnp.matmul(x, x)  # Itself jitted.

    def text():
        return function.lower(X).as_text()

    for _ in range(2):
        function(X)
        assert "jax_tilekern" not in text()
        with jtk.patch():
            function(X)
            assert "jax_tilekern" in text()
    assert len(traces) == 2


BODIES = {
    "scan": lambda body, x: lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0],
    "fori_loop": lambda body, x: lax.fori_loop(0, 3, lambda i, c: body(c), x),
    "while_loop": lambda body, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, body(c[1])), (0, x)
    )[1],
    "cond": lambda body, x: lax.cond(x[0, 0] > 0, body, lambda x: x, x),
    "switch": lambda body, x: lax.switch(1, [lambda x: x, body], x),
    "map": lambda body, x: lax.map(body, x[None])[0],
    "associative_scan": lambda body, x: lax.associative_scan(
        lambda a, b: a @ b, jnp.stack([x, x, x])
    )[2],
    "checkpoint": lambda body, x: jax.checkpoint(body)(x),
    "jit": lambda body, x: jax.jit(body)(x),
    "vmap": lambda body, x: jax.vmap(body)(x[None])[0],
    "linearize": lambda body, x: jax.linearize(body, x)[1](x),
    "custom_jvp": lambda body, x: with_custom_jvp(x),
    "custom_vjp": lambda body, x: with_custom_vjp(x),
    "closed_call": lambda body, x: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(body)(x))(x)[0],
    "shard_map": lambda body, x: jax.shard_map(
        body,
        mesh=jax.make_mesh((1,), ("d",), devices=jax.devices()[:1]),
        in_specs=P(),
        out_specs=P(),
    )(x),
}


@jax.custom_jvp
def with_custom_jvp(x):
    return jnp.sin(x @ x)


@with_custom_jvp.defjvp
def _(primals, tangents):
    ((x,), (t,)) = primals, tangents
    return with_custom_jvp(x), jnp.cos(x @ x) * (x @ t + t @ x)


@jax.custom_vjp
def with_custom_vjp(x):
    return jnp.sin(x @ x)


with_custom_vjp.defvjp(
    lambda x: (with_custom_vjp(x), x),
    lambda x, g: ((g * jnp.cos(x @ x)) @ x.T + x.T @ (g * jnp.cos(x @ x)),),
)


def body(x):
    return jnp.tanh(x @ x)


@pytest.mark.parametrize("name", BODIES)
def test_nothing_leaks_out_of_or_into_a_higher_order_function(name):
    """The very same function objects, traced outside, inside and outside again."""
    function = functools.partial(BODIES[name], body)
    ours, jaxs = traced(function, X)
    assert ours == 0
    assert jaxs >= 1
    expected = function(X)
    with jtk.patch():
        assert traced(function, X) == (jaxs, 0)
        # A handful of products of 6 terms, each of at most about 20, and of their functions.
        np.testing.assert_allclose(function(X), expected, atol=2e-4)
    assert traced(function, X) == (0, jaxs)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.one_in(4)
def test_gradients(name):
    def loss(x):
        return (BODIES[name](body, x) ** 2).sum()

    # A loop whose length is not static has a forward mode alone.
    grad = jax.jacfwd(loss) if name == "while_loop" else jax.grad(loss)
    ours, jaxs = traced(grad, X)
    assert ours == 0
    expected = grad(X)
    with jtk.patch():
        assert traced(grad, X) == (jaxs, 0)
        found = grad(X)
    assert traced(grad, X) == (0, jaxs)
    assert_close(found, expected)


def test_a_pullback_made_outside_and_called_inside():
    _, pullback = jax.vjp(product, X)
    expected = pullback(X)
    with jtk.patch():
        assert traced(pullback, X)[1] == 0
        found = pullback(X)
        _, other = jax.vjp(product, X)
    assert_close(found, expected)
    assert_close(other(X), expected)


# Where JAX's own primitives are the only ones that can be lowered.


def test_a_pallas_kernel_keeps_its_products():
    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...])

    call = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((6, 6), f32), interpret=True)

    def function(x):
        return call(x, x) @ x

    with jtk.patch():
        assert traced(function, X) == (1, 1)
        found = function(X)
    assert_close(found, X @ X @ X)


# What it costs, and what it stands on.


@pytest.fixture
def not_installed(monkeypatch):
    """As in a process that has not called ``patch`` yet."""
    module = sys.modules["jax_tilekern.interop.patch"]
    with jtk.patch():
        pass
    for primitive in module._REPLACEMENTS:
        monkeypatch.delattr(primitive, "bind")
    monkeypatch.setattr(module, "_installed", False)
    return module


@four_devices
def test_the_first_use_may_be_anywhere(not_installed):
    mesh = jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with (
        jax.set_mesh(mesh),
        jax.numpy_dtype_promotion("strict"),
        jax.checking_leaks(),
        jax.disable_jit(),
        jtk.patch(),
    ):
        assert traced(product, X) == (1, 0)


def no_longer_bound(module, monkeypatch):
    monkeypatch.setattr(module.lax, "dot", lambda x, y: x * y)


def parameters_renamed(module, monkeypatch):
    monkeypatch.setitem(
        module._REPLACEMENTS, compat.dot_general_p, lambda lhs, rhs, *, numbers: lhs
    )


@pytest.mark.parametrize("change", [no_longer_bound, parameters_renamed])
def test_a_jax_that_traces_products_otherwise_is_noticed(not_installed, change):
    with pytest.MonkeyPatch.context() as changed:
        change(not_installed, changed)
        with pytest.raises(RuntimeError, match=f"jax {jax.__version__}"), jtk.patch():
            pass
        assert not any("bind" in vars(primitive) for primitive in not_installed._REPLACEMENTS)
    assert traced(product, X) == (0, 1)
    with jtk.patch():
        assert traced(product, X) == (1, 0)

"""Reductions to segments, rows of tables and top_k: values, rules and errors."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from jax.sharding import PartitionSpec as P
from numerics import on_gpu, random, whole
from nvrtc_mark import needs_emulator
from products import H100
from sharded import MESH_TYPES, bytes_sent, check, mesh_of, put

import jax_tilekern as jtk
from jax_tilekern.ops.segments import lowering
from jax_tilekern.ops.segments.few_rows import add_few_rows

of_a_cpu = pytest.mark.skipif(on_gpu(), reason="a CPU's choices and program")
REDUCTIONS = ["sum", "prod", "max", "min"]


def _ids(rng, edges, segments, dtype=np.int32):
    """Ids with some out of bounds, and a segment that has a third of the edges."""
    low = -2 if np.issubdtype(dtype, np.signedinteger) else 0
    ids = rng.integers(low, segments + 3, edges)
    return np.where(rng.random(edges) < 0.3, segments // 2, ids).astype(dtype)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex64, np.complex128])
def test_wide_types(rng, dtype):
    ids = _ids(rng, 900, 60)
    x = random(rng, (900, 5), dtype)
    found = jtk.segment_sum(x, ids, 60)
    wanted = jax.ops.segment_sum(x, ids, 60)
    tolerance = 1e-4 if dtype == np.complex64 else 1e-12
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    assert found.dtype == wanted.dtype


@pytest.mark.usefixtures("x64")
def test_ids_of_64_bits(rng):
    x = whole(rng, 8)
    ids = np.array([2**40, -(2**40), 1, 0, 2, 2**32 + 1, 2**63 - 1, 1], np.int64)
    # JAX takes 2**32 + 1 for 1.
    np.testing.assert_array_equal(jtk.segment_sum(x, ids, 3), [x[3], x[2] + x[7], x[4]])
    ids = np.array([2**63, 2**64 - 1, 1, 0, 2, 2**32 + 1, 2**40, 1], np.uint64)
    np.testing.assert_array_equal(jtk.segment_sum(x, ids, 3), [x[3], x[2] + x[7], x[4]])


@pytest.mark.parametrize("segments", [1, 2, 254, 255, 511, 512, 70000, 300000])
@pytest.mark.parametrize("edges", [1, 2047, 5000])
@pytest.mark.one_in(3)
def test_plans_are_stable_sorts(rng, segments, edges):
    ids = rng.integers(-1, segments + 1, edges).astype(np.int32)
    plan = jtk.segment_plan(ids, segments)
    keys = np.clip(ids, -1, segments) + 1
    np.testing.assert_array_equal(plan.order, np.argsort(keys, stable=True))
    bounds = np.searchsorted(np.sort(keys), np.arange(segments + 3))
    np.testing.assert_array_equal(plan.bounds, bounds)
    in_order = jtk.segment_plan(np.sort(ids), segments, indices_are_sorted=True)
    np.testing.assert_array_equal(in_order.bounds, bounds)


def test_a_false_claim_that_ids_ascend(rng):
    """Values may be wrong, and memory is not."""
    ids = np.arange(8000)[::-1].astype(np.int32)
    found = jtk.segment_sum(whole(rng, 8000, 20), ids, 900, indices_are_sorted=True)
    assert found.shape == (900, 20)


def test_empty(rng):
    x = whole(rng, 5, 3)
    ids = np.zeros(5, np.int32)
    assert jtk.segment_sum(x[:0], ids[:0], 4).tolist() == np.zeros((4, 3)).tolist()
    assert jtk.segment_max(x[:0], ids[:0], 2).tolist() == np.full((2, 3), -np.inf).tolist()
    assert jtk.segment_sum(x, ids, 0).shape == (0, 3)
    assert jtk.segment_sum(x[:, :0], ids, 4).shape == (4, 0)
    assert jtk.segment_sum(x, ids).shape == (1, 3)
    assert jtk.take(x, ids[:0], axis=0).shape == (0, 3)


def test_same_bits_in_repeated_runs(rng):
    ids = _ids(rng, 20000, 700)
    x = random(rng, (20000, 9), np.float32)
    run = jax.jit(lambda x, ids: jtk.segment_sum(x, ids, 700))
    first = np.asarray(run(x, ids))
    for _ in range(3):
        np.testing.assert_array_equal(run(x, ids).view(np.int32), first.view(np.int32))


# Functions of edges.


def _graph(rng, nodes=30, edges=200):
    src, dst = (jnp.asarray(rng.integers(0, nodes, edges).astype(np.int32)) for _ in range(2))
    h = random(rng, (nodes, 5), np.float32)
    return h, random(rng, (edges,), np.float32), src, dst


def test_nothing_of_edges_times_features_is_stored(rng):
    """The sparse matrix times a dense one, and its gradient."""
    h, w, src, dst = _graph(rng, nodes=30, edges=200)

    def product(h, w):
        return jtk.segment_reduce(
            lambda a, b: a * b, h, w, segment_ids=dst, num_segments=30, gather=(src, None)
        )

    jaxpr = str(jax.make_jaxpr(jax.grad(lambda h: product(h, w).sum()))(h))
    assert "200,5" not in jaxpr


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_derivatives_of_extrema(rng, reduction):
    """Equal extrema share the derivative, as in JAX."""
    ids = _ids(rng, 60, 9)
    x = whole(rng, 60, 3, largest=2)
    ours, theirs = (getattr(module, f"segment_{reduction}") for module in (jtk, jax.ops))
    weights = random(rng, (9, 3), np.float32)

    def loss(f):
        return lambda x: jnp.sum(jnp.where(jnp.isfinite(y := f(x, ids, 9)), y, 0) ** 2 * weights)

    np.testing.assert_allclose(jax.grad(loss(ours))(x), jax.grad(loss(theirs))(x), rtol=1e-5)
    tangent = random(rng, (60, 3), np.float32)
    for found, wanted in zip(
        *(jax.jvp(loss(f), (x,), (tangent,)) for f in (ours, theirs)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_a_plan_is_an_argument_of_jit_and_is_mapped(rng):
    ids, x = _ids(rng, 100, 20), whole(rng, 3, 100, 4)
    plan = jtk.segment_plan(ids, 20)
    f = jax.jit(lambda x, plan: jtk.segment_sum(x, plan, mode="drop"))
    np.testing.assert_array_equal(f(x[0], plan), jax.ops.segment_sum(x[0], ids, 20))
    found = jax.vmap(f, (0, None))(x, plan)
    np.testing.assert_array_equal(found[2], jax.ops.segment_sum(x[2], ids, 20))
    plans = jax.vmap(lambda ids: jtk.segment_plan(ids, 20))(np.stack([ids, ids, ids]))
    np.testing.assert_array_equal(jax.vmap(jtk.segment_sum)(x, plans)[2], found[2])
    assert repr(plan) == "SegmentPlan(100 edges, 20 segments)"
    assert repr(plans) == "SegmentPlan(3 x 100 edges, 20 segments)"
    for call in (
        lambda: jtk.segment_sum(x, plans),
        lambda: jtk.take(x[0, :20], plans),
        lambda: jtk.scatter_add(x[0, :20], plans, x),
        lambda: jtk.segment_reduce(jnp.sin, x[0], segment_ids=plans),
        lambda: jtk.segment_reduce(jnp.sin, x[0, :20], segment_ids=plan, gather=(plans,)),
    ):
        with pytest.raises(ValueError, match=r"\(3 x 100 edges, 20 segments\) is a batch of plans"):
            call()


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_a_function_with_a_custom_vjp_keeps_its_derivative(rng, reduction):
    @jax.custom_vjp
    def message(x, w):
        return jnp.sin(x) * w

    message.defvjp(
        lambda x, w: (message(x, w), (x, w)),
        # The derivative by x is not that of the sine, so that this rule is seen.
        lambda saved, change: (2 * saved[1] * change, jnp.sin(saved[0]) * change),
    )
    h, w, src, dst = _graph(rng, nodes=20, edges=90)

    def ours(h, w):
        edges = {"segment_ids": dst, "num_segments": 20, "gather": (src, None)}
        return jtk.segment_reduce(message, h, w, reduction=reduction, **edges)

    def by_jax(h, w):
        weights = jnp.broadcast_to(w[:, None], (90, 5))
        return getattr(jax.ops, f"segment_{reduction}")(message(h[src], weights), dst, 20)

    def loss(f, h, w):
        return jnp.sum(jnp.where(jnp.isfinite(y := f(h, w)), y, 0) ** 2)

    def norm_of_gradient(f, h, w):
        return jnp.sum(jax.grad(loss, 1)(f, h, w) ** 2)

    for function in (loss, norm_of_gradient):
        gradient = jax.jit(jax.grad(function, (1, 2)), static_argnums=0)
        pairs = zip(gradient(ours, h, w), gradient(by_jax, h, w), strict=True)
        for found, wanted in pairs:
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda h: ours(h, w), (h,), (h,))


def test_segment_prod_has_no_derivative(rng):
    with pytest.raises(NotImplementedError, match="segment_prod"):
        jax.grad(lambda x: jtk.segment_prod(x, np.zeros(3, int), 1)[0])(jnp.ones(3))


# Tables.


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_nothing(axes):
    shapes = (0, 6, 4), (0, 6)
    x, ids = (jnp.zeros(s[a is None :], t) for s, a, t in zip(shapes, axes, "fi", strict=True))

    def gradient(x, ids):
        return jax.grad(lambda x: jtk.segment_sum(jtk.take(x, ids, axis=0), ids, 3).sum())(x)

    for f, shape in ((lambda x, ids: jtk.segment_sum(x, ids, 3), (3, 4)), (gradient, (6, 4))):
        assert jax.vmap(f, axes)(x, ids).shape == (0, *shape)


def test_take_elsewhere(rng):
    """Another axis, a flattened array, integers and a fill value are JAX's."""
    table = whole(rng, 9, 4, dtype=np.int32)
    ids = np.array([0, -1, 20])
    for kwargs in ({"axis": 1}, {}, {"axis": 0}, {"axis": -2}, {"axis": 0, "fill_value": 7}):
        np.testing.assert_array_equal(
            jtk.take(table, ids, mode="fill", **kwargs),
            jnp.take(table, ids, mode="fill", **kwargs),
            strict=True,
        )


def test_the_forward_pass_sorts_nothing(rng):
    table, ids = whole(rng, 9, 4), rng.integers(0, 9, 30)
    text = jax.jit(lambda t, i: jtk.take(t, i, axis=0)).lower(table, ids).compile().as_text()
    assert " sort" not in text
    assert "custom-call" not in text


# Small integers.


def test_sort_by_key(rng):
    keys = rng.integers(0, 40, 3000).astype(np.int16)
    values = whole(rng, 3000, 3)
    found = jtk.sort_by_key(keys, values, np.arange(3000), num_keys=40)
    order = np.argsort(keys, stable=True)
    for array, wanted in zip(found, (keys[order], values[order], order), strict=True):
        np.testing.assert_array_equal(array, wanted)
    with pytest.raises(ValueError, match="for 3000 keys"):
        jtk.sort_by_key(keys, values[:5], num_keys=40)


def test_bincount(rng):
    x = rng.integers(-3, 30, 500)
    weights = whole(rng, 500)
    for kwargs in ({}, {"length": 10}, {"minlength": 50}, {"weights": weights, "length": 25}):
        found, wanted = (f(x, **kwargs) for f in (jtk.bincount, jnp.bincount))
        np.testing.assert_array_equal(found, wanted, strict=True)


# Several devices.


def _named(module, name):
    """A function of this package or of ``jax.ops``."""
    return getattr(jax.ops if module is jnp else module, f"segment_{name}")


@pytest.mark.parametrize(
    "specs",
    [
        (P("d"), P("d")),
        (P(("d", "m")), P(("d", "m"))),
        (P("d", None, "m"), P("d")),
        (P(None, None, "d"), P(("m", "d"))),
    ],
)
@pytest.mark.parametrize("name", ["sum", "take", "gradient of sum"])
@pytest.mark.parametrize("axis_name", [None, "d"])
@pytest.mark.one_in(4)
def test_devices_share_batches(rng, specs, name, axis_name):
    mesh = mesh_of(MESH_TYPES["auto"])
    x, ids = whole(rng, 8, 32, 8), rng.integers(0, 32, (8, 32)).astype(np.int32)

    def program(module):
        if name == "take":
            function = functools.partial(module.take, axis=0)
        else:
            function = functools.partial(_named(module, "sum"), num_segments=64)
        mapped = jax.vmap(function, spmd_axis_name=axis_name)
        if name == "gradient of sum":
            return jax.grad(lambda x, ids: jnp.sum(mapped(x, ids) ** 2))
        return mapped

    if axis_name in jax.tree.leaves(tuple(specs[0])[1:]):
        pytest.skip("the axis is that of the batches")
    args = [put(mesh, a, spec) for a, spec in zip((x, ids), specs, strict=True)]
    out = specs[0] if name == "gradient of sum" else None
    check(mesh, program, args, out, kernels=False)


SORTS = {
    "segment_mean": lambda x, ids: jtk.segment_mean(x, ids, 32),
    "sorted segment_mean": lambda x, ids: jtk.segment_mean(x, jnp.sort(ids), 32, True),
    "bincount": lambda _, ids: jtk.bincount(ids, length=32),
    "sort_by_key": lambda x, ids: jtk.sort_by_key(ids, x, num_keys=32),
}


@pytest.mark.parametrize("types", ["auto", "explicit"])
@pytest.mark.parametrize("name", SORTS)
def test_devices_sort_their_own_batches(rng, name, types):
    x, ids = whole(rng, 4, 2, 48, 8), rng.integers(0, 32, (4, 2, 48)).astype(np.int32)
    function, mesh = SORTS[name], mesh_of(MESH_TYPES[types])
    batches = zip(x.reshape(8, 48, 8), ids.reshape(8, 48), strict=True)
    each = [function(*batch) for batch in batches]
    wanted = jax.tree.map(lambda *y: np.reshape(y, (4, 2, *y[0].shape)), *each)
    with jax.set_mesh(mesh):
        args = [put(mesh, a, P("d")) for a in (x, ids)]
        compiled = jax.jit(jax.vmap(jax.vmap(function))).lower(*args).compile()
        found = compiled(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), found, wanted)
    assert bytes_sent(compiled) == 0


def test_rows_and_sorts_on_explicit_meshes(rng):
    table, rows, ids = whole(rng, 16, 8), whole(rng, 32, 8), rng.integers(0, 16, 32)

    def functions(table, rows, ids):
        return (
            jtk.take(table, ids, axis=0),
            jtk.scatter_add(table, ids, rows),
            *jtk.sort_by_key(ids, rows, num_keys=16),
            jtk.segment_sum(rows, jtk.segment_plan(ids, 16)),
        )

    def loss(*args):
        return sum(jnp.sum(x * x) for x in functions(*args)[:2])

    expected = functions(table, rows, ids), jax.grad(loss, (0, 1))(table, rows, ids)
    mesh = mesh_of(MESH_TYPES["explicit"])
    with jax.set_mesh(mesh):
        # The table and the indices are split along one axis, which JAX's gather does not take.
        args = [put(mesh, x, s) for x, s in ((table, P("d")), (rows, P("d", "m")), (ids, P("d")))]
        found = jax.jit(functions)(*args), jax.jit(jax.grad(loss, (0, 1)))(*args)
        specs = [x.sharding.spec for x in found[0]]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert specs[:2] == [P("d", None), P("d", None)]


def test_plans_are_arguments_of_sharded_programs(rng):
    mesh = mesh_of(MESH_TYPES["auto"])
    x, ids = whole(rng, 64, 8), _ids(rng, 64, 10)
    plan = jax.tree.map(lambda a: put(mesh, a, P()), jtk.segment_plan(ids, 10))
    found = jax.jit(jtk.segment_sum)(put(mesh, x, P("d", "m")), plan)
    np.testing.assert_array_equal(found, jax.ops.segment_sum(x, ids, 10))


# Errors.


def test_errors(rng):
    x, ids = jnp.ones((5, 2)), np.zeros(5, np.int32)
    with pytest.raises(TypeError, match="integers, not float32"):
        jtk.segment_sum(x, np.zeros(5, np.float32), 3)
    with pytest.raises(ValueError, match=r"\(5, 2\) for segment ids of shape \(4,\)"):
        jtk.segment_sum(x, ids[:4], 3)
    with pytest.raises(ValueError, match="non-negative, not -1"):
        jtk.segment_sum(x, ids, -1)
    plan = jtk.segment_plan(ids, 3)
    with pytest.raises(ValueError, match=r"\(4, 2\) for segment ids of shape \(5,\)"):
        jtk.segment_sum(x[:4], plan)
    with pytest.raises(ValueError, match="num_segments is 4, and the plan has 3"):
        jtk.segment_sum(x, plan, 4)
    with pytest.raises(ValueError, match="a plan of 3 rows"):
        jtk.take(x, plan)
    with pytest.raises(ValueError, match=r"\(5, 2\) for segment ids of shape \(5, 2\)"):
        jtk.segment_sum(x, np.zeros((5, 2), np.int32), 3)
    with pytest.raises(ValueError, match="a vector"):
        jtk.segment_plan(np.zeros((5, 2), np.int32), 3)
    with pytest.raises(ValueError, match="array 0 has shape"):
        jtk.segment_reduce(lambda x: x, x[:3], segment_ids=ids, num_segments=2)
    with pytest.raises(ValueError, match=r"array 0 has shape \(\)"):
        jtk.segment_reduce(lambda x: x, 1.0, segment_ids=ids, num_segments=2, gather=(ids,))
    with pytest.raises(ValueError, match="reduction is 'mean'; it is 'sum', 'prod'"):
        jtk.segment_reduce(lambda x: x, x, segment_ids=ids, num_segments=2, reduction="mean")
    with pytest.raises(TypeError, match="elementwise"):
        jtk.segment_reduce(jnp.sum, x, segment_ids=ids, num_segments=2)
    with pytest.raises(ValueError, match="top_k"):
        jtk.top_k(x, 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (2.0, np.array([0, 2, 0])),
        (np.arange(3.0), np.array([[0, 2, 0], [1, 1, 0]])),
        (np.ones((1, 2)), np.array([0, 2, 0], np.int8)),
        (np.ones((3, 2), ml_dtypes.int4), np.array([0, 2, 0])),
        (np.arange(4).reshape(2, 2) * 1j, np.array([1, 1])),
        (np.ones((0, 2)), np.zeros(0, int)),
        (np.ones((3, 0)), np.array([0, 2, 0])),
    ],
)
@pytest.mark.one_in(2)
def test_what_jax_broadcasts_and_types_without_kernels(reduction, data, ids):
    ours, theirs = (
        getattr(module, f"segment_{reduction}")(data, ids, 3) for module in (jtk, jax.ops)
    )
    np.testing.assert_array_equal(ours, theirs, strict=True)


def test_products_of_unique_indices_have_jax_s_derivative(rng):
    x, ids = random(rng, (3, 2), np.float32), np.array([2, 0, 1])
    ours, theirs = (
        jax.grad(lambda x, m=m: m.segment_prod(x, ids, 3, unique_indices=True).sum())(x)
        for m in (jtk, jax.ops)
    )
    np.testing.assert_array_equal(ours, theirs)


# JAX itself asks for int64 where an array is this large.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_sizes_beyond_int32():
    def shape(function, *shapes):
        operands = [jax.ShapeDtypeStruct(s, t) for s, t in shapes]
        return jax.eval_shape(function, *operands).shape

    many, few = (2**31,), (5,)
    total = functools.partial(jtk.segment_sum, num_segments=7)
    assert shape(total, (many, np.float32), (many, np.int32)) == (7,)
    total = functools.partial(jtk.segment_sum, num_segments=2**31)
    assert shape(total, (few, np.float32), (few, np.int32)) == many
    assert shape(jtk.take, (few, np.float32), (many, np.int32)) == many
    with pytest.raises(ValueError, match="2147483648 segment_ids and num_segments=7 are at most"):
        shape(lambda ids: jtk.segment_plan(ids, 7).keys, (many, np.int32))


@pytest.mark.parametrize("mode", [None, "wrap", "clip", "fill"])
@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.complex64, ml_dtypes.int4])
@pytest.mark.one_in(3)
def test_take_of_any_type(mode, dtype):
    table = np.array([[1, 0], [0, 1], [1, 1]]).astype(dtype)
    booleans = [] if mode == "clip" else [np.array([True, False])]
    for indices in (np.array([4, -1, -5], np.int8), np.uint8(1), *booleans):
        found, wanted = (m.take(table, indices, axis=0, mode=mode) for m in (jtk, jnp))
        np.testing.assert_array_equal(found, wanted, strict=True)


def test_take_of_keys():
    keys, indices = jax.random.split(jax.random.key(0), 3), np.array([2, 0])
    found, wanted = (jax.random.key_data(m.take(keys, indices, axis=0)) for m in (jtk, jnp))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("call", [
    lambda x, ids: jtk.take(x, ids, axis=0),
    lambda x, ids: jtk.scatter_add(x, ids, x[:3]),
    lambda x, ids: jtk.segment_sum(x[:3], ids, 4),
    lambda x, ids: jtk.segment_mean(x[:3], ids, 4),
    lambda x, ids: jtk.bincount(ids, length=4),
    lambda x, ids: jtk.sort_by_key(ids, x[:3], num_keys=4),
])  # fmt: skip
def test_eager_calls_are_one_program(call, caplog):
    # No other test has this shape.
    x, ids = np.ones((5, 17), np.float32), np.array([0, 1, -1])
    with jax.log_compiles():
        call(x, ids)
    assert sum("Finished XLA compilation" in x for x in caplog.messages) == 1


def test_scatter_add_of_other_shapes_and_types():
    table = np.arange(8).reshape(4, 2)
    for indices, updates in (
        (np.array([[0, 1], [1, -1]], np.int16), np.arange(8.0).reshape(2, 2, 2) / 4),
        (np.int8(-1), 1.5),
        (np.array([0, 0]), 1.5),
    ):
        with pytest.warns(FutureWarning, match="incompatible types"):
            wanted = jnp.asarray(table).at[indices].add(updates)
        found = jtk.scatter_add(table, indices, updates)
        np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64", "uint64", "bool"])
def test_scatter_add_of_no_rows_is_the_table(x64, dtype):
    rng = np.random.default_rng(0)
    table = np.frombuffer(rng.bytes(96), np.uint8).view(dtype if dtype != "bool" else np.uint8)
    table = (table % 2 == 0) if dtype == "bool" else table
    table = table.reshape(-1, 4)
    for updates in (np.zeros((0, 4), dtype), np.zeros((0, 4), np.float32), np.float16(1)):
        for indices in (np.zeros(0, int), jtk.segment_plan(np.zeros(0, int), len(table))):
            found = jtk.scatter_add(table, indices, updates)
            np.testing.assert_array_equal(found, table, strict=True)
    with pytest.raises(ValueError, match="broadcast"):
        jtk.scatter_add(table, np.zeros(0, int), np.ones((0, 3)))


FEW = [("float16", 5), ("bfloat16", 40), ("float32", 300), ("int32", 300), ("complex64", 200)]


@pytest.mark.parametrize(("dtype", "columns"), FEW)
def test_few_rows_are_updated_one_by_one(rng, dtype, columns):
    table, rows = (np.asarray(whole(rng, n, columns).astype(dtype)) for n in (900, 70))
    # Row 5 has a third of the updates. Negative numbers count from the last row.
    ids = np.where(rng.random(70) < 0.3, 5, rng.integers(-950, 950, 70))
    inside = (ids >= -900) & (ids < 900)
    wanted, zeros = table.astype(np.complex128), np.zeros((900, columns), np.complex128)
    np.add.at(wanted, ids[inside], rows[inside])
    np.add.at(zeros, np.where(ids < 0, ids + 900, ids)[inside], rows[inside])
    found = jtk.scatter_add(table, ids, rows)
    summed = jtk.segment_sum(rows, np.where(ids < 0, ids + 900, ids), 900)
    for result, exact in ((found, wanted), (summed, zeros)):
        np.testing.assert_array_equal(np.asarray(result).astype(np.complex128), exact)
        assert result.dtype == dtype


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_few_rows_are_reduced_one_by_one(rng, reduction, dtype):
    rows = np.asarray(whole(rng, 60, 130, largest=2).astype(dtype))
    ids = np.where(rng.random(60) < 0.1, 7, rng.integers(-3, 2000, 60))
    found = getattr(jtk, f"segment_{reduction}")(rows, ids, 1990)
    wanted = getattr(jax.ops, f"segment_{reduction}")(rows, ids, 1990)
    np.testing.assert_array_equal(found, wanted, strict=True)


@of_a_cpu
@pytest.mark.defaults
def test_updates_of_a_cpu_are_what_is_faster():
    def kernels(function, *args):
        return [choice.kernel for choice in jtk.explain(function, *args) if choice.kernel]

    def added(dtype, rows, columns, edges):
        shapes = (rows, columns), (edges, columns)
        table, updates = (jax.ShapeDtypeStruct(x, dtype) for x in shapes)
        ids = jax.ShapeDtypeStruct((edges,), np.int32)
        summed = functools.partial(jtk.segment_sum, num_segments=rows)
        return [
            [x.split()[0] for x in kernels(*call) if "order" not in x]
            for call in ((jtk.scatter_add, table, ids, updates), (summed, updates, ids))
        ]

    for dtype in ("float16", "bfloat16", "float32"):
        assert added(dtype, 50000, 512, 100) == [["cpu_update_rows"]] * 2
        assert ["cpu_update_rows"] not in added(dtype, 100, 16, 5000)
    # XLA adds narrow rows in place; it would round each update of 16-bit floats.
    assert added("float32", 50000, 16, 100)[0] == []
    assert added("float16", 50000, 16, 100)[0] == ["cpu_update_rows"]
    with jtk.policy("kernels"):
        assert added("float32", 50000, 16, 100)[0] == ["cpu_update_rows"]
    ids, rows = jax.ShapeDtypeStruct((128,), np.int32), jax.ShapeDtypeStruct((128, 768), np.float16)
    product = functools.partial(jtk.segment_prod, num_segments=990)
    assert "cpu_update_rows float16" in kernels(product, rows, ids)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_xla_adds_few_rows(rng, dtype):
    table, updates = (whole(rng, n, 24).astype(dtype) for n in (500, 40))
    rows = np.where(rng.random(40) < 0.3, 499, rng.integers(0, 520, 40)).astype(np.int32)
    wanted = np.array(table, np.float64)
    np.add.at(wanted, rows[rows < 500], np.asarray(updates, np.float64)[rows < 500])
    found = jax.jit(add_few_rows)(table, updates, rows)
    np.testing.assert_array_equal(np.asarray(found, np.float64), wanted)
    assert found.dtype == dtype


@pytest.mark.defaults
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpus_gather_few_rows_of_large_tables(dtype):
    def reasons(rows, edges):
        table, updates = (jax.ShapeDtypeStruct((n, 64), dtype) for n in (rows, edges))
        ids = jax.ShapeDtypeStruct((edges,), np.int32)
        calls = (
            lambda: jtk.explain(jtk.scatter_add, table, ids, updates, platform="cuda"),
            lambda: jtk.explain(
                jax.vmap(jtk.scatter_add, (0, None, None)),
                jax.ShapeDtypeStruct((3, rows, 64), dtype),
                ids,
                updates,
                platform="cuda",
            ),
            lambda: jtk.explain(
                functools.partial(jtk.segment_sum, num_segments=rows),
                updates,
                ids,
                platform="cuda",
            ),
        )
        return [any("few rows" in x.reason for x in call()) for call in calls]

    with jtk.gpu_target("sm_90"):
        assert reasons(200000, 1000) == [dtype != "float32"] * 3
        assert reasons(500, 1000) == [False] * 3
        with jtk.policy("kernels"):
            assert reasons(200000, 1000) == [False] * 3


@needs_emulator
@pytest.mark.defaults
@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 20000), ("float32", 300)])
@pytest.mark.parametrize("is_wide", [False, True])
def test_emulated_kernels_fill_what_xla_scatters_to(monkeypatch, rng, dtype, rows, is_wide):
    if is_wide:
        monkeypatch.setattr(lowering, "scatter_type", lambda r, _: r.value)
    monkeypatch.setattr(lowering, "is_filled_by_kernel", lambda *_: True)
    updates = whole(rng, 2, 40, 8).astype(dtype)
    ids = rng.integers(0, rows, (2, 40)).astype(np.int32)
    ids[:, :9], ids[:, 9] = 7, rows
    for reduction in ("segment_sum", "segment_max"):
        expected = jax.vmap(functools.partial(getattr(jax.ops, reduction), num_segments=rows))(
            updates.astype(np.float32), ids
        ).astype(dtype)
        function = functools.partial(getattr(jtk, reduction), num_segments=rows)
        with emulated_gpu(H100, policy="auto") as ran:
            batches = jax.jit(jax.vmap(function))(updates, ids)
            one = jax.jit(function)(updates[1], ids[1])
        assert [plan.name for plan in ran] == ["fill"] * 2
        np.testing.assert_array_equal(batches, expected)
        np.testing.assert_array_equal(one, expected[1])


@needs_emulator
def test_emulated_means_count_edges_between_bounds(monkeypatch, rng):
    monkeypatch.setattr(lowering, "sorts", lambda *_: True)
    data, ids = whole(rng, 2, 900, 3).astype(np.float32), _ids(rng, 1800, 60).reshape(2, 900)
    inside = (ids >= 0) & (ids < 60)
    expected = np.zeros((2, 60, 3))
    for out, x, own, kept in zip(expected, data, ids, inside, strict=True):
        np.add.at(out, own[kept], x[kept])
        out /= np.maximum(np.bincount(own[kept], minlength=60), 1)[:, None]
    mean = functools.partial(jtk.segment_mean, num_segments=60)
    with emulated_gpu(H100) as ran:
        found = jax.jit(jax.vmap(mean))(data, ids)
        one = jax.jit(mean)(data[1], ids[1])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)
    np.testing.assert_allclose(one, expected[1], rtol=1e-6, atol=0)
    # No kernel counts edges.
    assert sum(plan.name.startswith("segment_sum") for plan in ran) == 2


@pytest.mark.defaults
def test_gpus_count_edges_as_their_sums_read_them():
    def reasons(edges):
        data, ids = (jax.ShapeDtypeStruct((edges, *x), np.float32) for x in ((3584,), ()))
        mean = functools.partial(jtk.segment_mean, num_segments=512)
        return [x.reason for x in jtk.explain(mean, data, ids.update(dtype="i4"), platform="cuda")]

    with jtk.gpu_target("NVIDIA H200"):
        assert "edges are counted between bounds" in reasons(30_000)
        assert "XLA's scatter is predicted to be faster" in reasons(1)


@needs_emulator
@pytest.mark.defaults
def test_emulated_sums_of_functions_update_few_rows(rng):
    data, weights = whole(rng, 50, 8).astype("float16"), whole(rng, 40, 1).astype("float16")
    ids, rows = (rng.integers(0, n, 40).astype(np.int32) for n in (200_000, 50))
    ids[:9] = 7
    expected = np.zeros((200_000, 8), np.float32)
    np.add.at(expected, ids, np.asarray(data, np.float32)[rows] * np.asarray(weights, np.float32))

    def function(data, weights):
        return jtk.segment_reduce(
            lambda x, w: x * w, data, weights, segment_ids=ids, num_segments=200_000,
            gather=(rows, None),
        )  # fmt: skip

    with emulated_gpu(H100, policy="auto"):
        found = jax.jit(function)(data, weights)
    with jtk.gpu_target("H100"):
        choices = jtk.explain(function, data, weights, platform="cuda")
    assert any("few rows" in x.reason for x in choices)
    np.testing.assert_array_equal(found, expected.astype("float16"))


@pytest.mark.defaults
def test_gpus_fill_large_tables_by_a_kernel():
    def reasons(dtype, rows):
        updates = jax.ShapeDtypeStruct((40, 64), dtype)
        ids = jax.ShapeDtypeStruct((40,), np.int32)
        summed = functools.partial(jtk.segment_sum, num_segments=rows)
        return [str(x.kernel) for x in jtk.explain(summed, updates, ids, platform="cuda")]

    with jtk.gpu_target("NVIDIA H200"):
        for dtype in ("bfloat16", "float32"):
            assert "fill" in reasons(dtype, 1_000_000)
            assert "fill" not in reasons(dtype, 1000)


@pytest.mark.defaults
def test_gpus_add_in_place_unless_rows_are_unaligned():
    def choices(columns):
        table, updates = (jax.ShapeDtypeStruct((n, columns), np.float32) for n in (40000, 9000))
        ids = jax.ShapeDtypeStruct((9000,), np.int32)
        summed = functools.partial(jtk.segment_sum, num_segments=40000)
        return [
            jtk.explain(*call, platform="cuda")[-1].kernel
            for call in ((jtk.scatter_add, table, ids, updates), (summed, updates, ids))
        ]

    with jtk.gpu_target("sm_90"):
        assert choices(64) == [None, None]
        # XLA adds numbers of unaligned rows one by one.
        assert choices(1605) == ["segment_sum float32"] * 2
        with jtk.policy("kernels"):
            assert choices(64) == ["segment_sum float32"] * 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_updates_are_rounded_once(dtype):
    limit = 2 / float(jnp.finfo(dtype).eps)
    for rows in (4, 3000):
        table = jnp.full((rows, 3), limit, dtype)
        found = jtk.scatter_add(table, np.full(64, 2), jnp.ones((64, 3), dtype))
        np.testing.assert_array_equal(found[2], np.full(3, limit + 64).astype(dtype))
        assert float(jnp.abs(found - table).sum()) == 3 * 64


def test_updates_of_few_rows_have_derivatives(rng):
    table, rows, ids = whole(rng, 400, 8), whole(rng, 6, 8), np.array([3, 3, -1, 399, 500, 0])

    def by_jax(table, rows, ids):
        return table.at[ids].add(rows)

    def results(function, table, rows, ids):
        def energy(*args):
            return (function(*args, ids) ** 3).sum()

        args, moved = (table, rows), (table / 2, rows / 4)
        return (
            jax.jvp(lambda *x: function(*x, ids), args, moved),
            jax.grad(energy, (0, 1))(*args),
            jax.jvp(jax.grad(energy, (0, 1)), args, moved),
        )

    def ours(table, rows, ids):
        return jtk.scatter_add(table, ids, rows)

    expected, found = (results(f, table, rows, ids) for f in (by_jax, ours))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    tables, many = whole(rng, 5, 400, 8), rng.integers(-410, 410, (5, 6))
    for axes, args in (
        ((0, None, 0), (tables, rows, many)),
        ((None, 0, None), (table, whole(rng, 5, 6, 8), ids)),
    ):
        wanted, result = (
            jax.vmap(lambda *x, f=f: results(f, *x), axes)(*args) for f in (by_jax, ours)
        )
        jax.tree.map(np.testing.assert_array_equal, result, wanted)


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_devices_update_few_rows(rng, types):
    table, rows, ids = whole(rng, 400, 8), whole(rng, 8, 8), rng.integers(0, 400, 8)
    wanted = jtk.scatter_add(table, ids, rows)
    mesh = mesh_of(MESH_TYPES[types])
    with jax.set_mesh(mesh):
        args = [put(mesh, x, s) for x, s in ((table, P("d")), (ids, P("d")), (rows, P("d", "m")))]
        np.testing.assert_array_equal(jax.jit(jtk.scatter_add)(*args), wanted)


def test_functions_of_edges_of_nothing(rng):
    x, ids = random(rng, (4, 3), np.float32), np.array([0, 2, 1, 0])

    def total(table, x, count):
        return jtk.segment_reduce(
            lambda a, b: a * b, table, x, segment_ids=ids, num_segments=count, gather=(ids, None)
        ).sum()

    for table, count in ((x[:0], 3), (x, 0)):
        of_table, of_x = jax.grad(total, (0, 1))(table, x, count)
        np.testing.assert_array_equal(of_table, np.zeros_like(table))
        np.testing.assert_array_equal(of_x, np.zeros_like(x))
    empty = jtk.segment_plan(ids, 0)
    assert np.isnan(jtk.take(x[:0], empty)).all()


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int32, np.bool_, ml_dtypes.int4, ml_dtypes.float8_e5m2]
)
def test_types_of_means(dtype):
    x = np.ones((4, 3), dtype)
    mean = jtk.segment_mean(x, np.array([0, 1, 1, 0]), 2)
    assert mean.dtype == jnp.mean(x, 0).dtype
    np.testing.assert_array_equal(mean.astype(np.float32), np.ones((2, 3)))


def test_plans_are_pickled_and_compared_by_identity():
    plan = jtk.segment_plan(np.array([2, 0, 2]), 3)
    again = pickle.loads(pickle.dumps(plan))
    assert len({plan, again, plan}) == 2
    np.testing.assert_array_equal(jtk.segment_sum(jnp.ones(3), again), [1, 0, 2])


def test_operands_that_are_no_arrays():
    x, ids = jnp.ones((3, 2)), np.array([0, 1, 1])
    for call in (
        lambda: jtk.segment_sum([1.0, 2.0, 3.0], ids, 3),
        lambda: jtk.segment_max(x, [0, 1, 1], 3),
        lambda: jtk.segment_mean(x, None, 3),
        lambda: jtk.segment_plan([0, 1], 2),
        lambda: jtk.segment_reduce(lambda a: a, [1.0], segment_ids=ids, num_segments=2),
        lambda: jtk.segment_reduce(
            lambda a: a, x, segment_ids=ids, num_segments=2, gather=([0, 1, 1],)
        ),
        lambda: jtk.take(x, [0, 1], axis=0),
        lambda: jtk.scatter_add(x, [0, 1], x[:2]),
        lambda: jtk.top_k([1.0, 2.0], 1),
        lambda: jtk.sort_by_key(ids, [1, 2, 3], num_keys=2),
        lambda: jtk.bincount([0, 1]),
    ):
        with pytest.raises(TypeError, match=r"requires ndarray or scalar|are an array of integers"):
            call()


def test_the_number_of_segments_is_static():
    with pytest.raises((TypeError, jax.errors.JAXTypeError)):
        jax.jit(lambda x, ids: jtk.segment_sum(x, ids))(jnp.ones(3), np.zeros(3, int))


@pytest.mark.parametrize("columns", [0, 3])
def test_batches_of_rows_of_any_length(columns):
    """Under ``vmap`` with and without a kernel, where one operand is mapped, or both."""
    table, weights = np.ones((7, columns), np.float32), np.ones((2, 5, 1), np.float32)
    ids = np.array([0, 1, 1, 2, 9], np.int32)

    def reduce(x, w):
        return jtk.segment_reduce(
            lambda x, w: x * w, x, w, segment_ids=ids, num_segments=3, gather=(ids, None)
        )

    expected = np.broadcast_to(np.array([[1], [2], [1]]), (3, columns))
    mapped = jax.vmap(reduce, (None, 0))
    for x in (mapped(table, weights), jax.vmap(reduce)(np.stack([table] * 2), weights)):
        np.testing.assert_array_equal(x, np.stack([expected] * 2))
    gradient = jax.grad(lambda *xs: mapped(*xs).sum(), (0, 1))(table, weights)
    assert [x.shape for x in gradient] == [table.shape, weights.shape]


def test_out_sharding(rng):
    x, ids = random(rng, (16, 8), np.float32), np.arange(16) % 8
    if "out_sharding" not in inspect.signature(jax.ops.segment_sum).parameters:
        pytest.skip("this JAX has none")
    mesh = mesh_of(MESH_TYPES["explicit"])
    with jax.set_mesh(mesh):
        rows = put(mesh, x, P("d"))
        for name in ("segment_sum", "segment_max", "segment_min", "segment_prod"):
            found, wanted = (
                jax.jit(functools.partial(getattr(m, name), num_segments=8, out_sharding=P("m")))(
                    rows, ids
                )
                for m in (jtk, jax.ops)
            )
            assert jax.typeof(found) == jax.typeof(wanted)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        counts = jtk.bincount(ids, length=8, out_sharding=P())
        assert jax.typeof(counts) == jax.typeof(jnp.bincount(ids, length=8, out_sharding=P()))


@pytest.mark.defaults
@pytest.mark.parametrize(
    ("shape", "segments", "dtype", "is_kernel"),
    [
        ((50_000,), 10_000, "float32", False),
        ((2_000_000, 3), 300_000, "float32", False),
        ((1_000_000,), 100_000, "int32", False),
        ((1_000_000,), 123, "float32", True),
        ((2**20, 256), 65_536, "float32", True),
        ((60_000, 128), 11, "bfloat16", True),
    ],
)
def test_sums_are_computed_by_what_is_predicted_to_be_faster(shape, segments, dtype, is_kernel):
    structs = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:1], "int32")

    def total(x, ids):
        return jtk.segment_sum(x, ids, segments)

    with jtk.gpu_target("H200"):
        by_default = jtk.explain(total, *structs)[-1]
        with jtk.policy("kernels"):
            asked = jtk.explain(total, *structs)[-1]
    assert bool(by_default.kernel) == is_kernel
    assert asked.kernel
    if not is_kernel:
        fixed = "; its order of additions is not fixed" if dtype == "float32" else ""
        assert by_default.reason == f"XLA's scatter is predicted to be faster{fixed}"


@of_a_cpu
@pytest.mark.parametrize(
    ("shape", "segments", "dtype", "is_sorted", "reason"),
    [
        ((100,), 10, "float32", False, "XLA's scatter of 100 numbers takes no longer than a call"),
        ((2000, 3), 50, "int32", False, None),
        ((40_000,), 500, "float32", False, "40000 rows of 4 bytes as they lie is faster"),
        ((40_000,), 500, "bfloat16", False, None),
        ((40_000, 3), 500, "int32", True, None),
        ((40_000, 256), 500, "float32", True, "40000 rows of 1024 bytes as they lie is faster"),
        ((4000, 1024), 3000, "float32", False, "4000 rows of 4096 bytes is faster than a sort"),
    ],
)
def test_cpus_sum_by_what_is_faster(shape, segments, dtype, is_sorted, reason):
    structs = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:1], "int32")

    def total(x, ids):
        return jtk.segment_sum(x, ids, segments, is_sorted)

    with jtk.policy("auto"):
        found = jtk.explain(total, *structs)[-1]
    assert bool(found.kernel) == (reason is None)
    assert reason is None or reason in found.reason
    with jtk.policy("kernels"):
        assert jtk.explain(total, *structs)[-1].kernel


@of_a_cpu
def test_means_on_cpus_sort_nothing(rng):
    x, ids = whole(rng, 20_000), rng.integers(-1, 61, 20_000).astype(np.int32)
    mean = jax.jit(lambda x, ids: jtk.segment_mean(x, ids, 60)).lower(x, ids).compile()
    assert "order_by_key" not in mean.as_text()
    by_plan = jax.jit(lambda x, ids: jtk.segment_mean(x, jtk.segment_plan(ids, 60), 60))
    np.testing.assert_allclose(mean(x, ids), by_plan(x, ids), rtol=1e-6)

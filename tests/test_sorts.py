"""Sorts and what selects by order: values, derivatives, types and errors, on any backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P
from sharded import MESH_TYPES, bytes_sent, mesh_of, put

import jax_tilekern as jtk
from jax_tilekern.ops.selection.sort_operands import _by_argsorts

TIES = np.array([[0.0, -0.0, np.nan, 1.0, -np.nan, 0.0], [2.0, 2.0, -np.inf, 1.0, np.nan, 2.0]])


def same(found, expected):
    assert found.dtype == expected.dtype
    # NumPy compares NaN of its own types alone.
    found, expected = (
        x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in (found, expected)
    )
    np.testing.assert_array_equal(found, expected)
    if found.dtype == np.float32:
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("name", ["sort", "argsort"])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("axis", [-1, 0, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_values(name, descending, axis, dtype):
    x = jnp.asarray(TIES).astype(dtype)
    ours, theirs = (getattr(module, name) for module in (jtk, jnp))
    same(ours(x, axis, descending=descending), theirs(x, axis, descending=descending))
    mapped = [jax.vmap(f, 1)(x[None]) for f in (ours, theirs)]
    same(*mapped)


@pytest.mark.parametrize("method", ["linear", "lower", "higher", "midpoint", "nearest"])
@pytest.mark.parametrize("axis", [None, -1, (2, 0)])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.one_in(4)
def test_quantiles(rng, method, axis, keepdims, dtype):
    x = jnp.asarray(100 * rng.standard_normal((3, 4, 5))).astype(dtype)
    other = -x if dtype == "int32" else x.at[1, 2, 3].set(jnp.nan)
    options = {"method": method, "keepdims": keepdims}
    for each in (x, other):
        for q in (0.3, np.array([0.0, 0.25, 0.77, 1.0], np.float32)):
            found, wanted = (m.quantile(each, q, axis, **options) for m in (jtk, jnp))
            if method != "linear":
                same(found, wanted)
                continue
            # A compiler may contract the interpolation to a fused multiply-add.
            assert found.dtype == wanted.dtype
            slack = 2 * float(jnp.finfo(found.dtype).eps) * np.nanmax(np.abs(np.float64(each)))
            found, wanted = (np.asarray(z, np.float64) for z in (found, wanted))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=slack)
        same(jtk.median(each, axis, keepdims=keepdims), jnp.median(each, axis, keepdims=keepdims))


def test_quantiles_by_jax(rng):
    x, weights = rng.standard_normal((2, 3, 8)).astype(np.float32)
    options = {"method": "inverted_cdf", "weights": np.abs(weights)}
    same(jtk.quantile(x, 0.3, 1, **options), jnp.quantile(x, 0.3, 1, **options))
    same(jtk.percentile(x, 30, 1, method="inverted_cdf"),
         jnp.percentile(x, 30, 1, method="inverted_cdf"))  # fmt: skip


def test_quantiles_of_a_batch(rng):
    x = jnp.asarray(rng.standard_normal((4, 9)), jnp.float32)
    q = jnp.linspace(0.1, 0.9, 4)
    for dims in ((0, None), (None, 0), (0, 0)):
        ours, theirs = (
            jax.vmap(lambda x, q, m=m: m.quantile(x, q, -1), dims)(x, q if dims[1] == 0 else 0.3)
            for m in (jtk, jnp)
        )
        # Places below 9 are rounded, and so is what lies between two elements.
        slack = 16 * np.finfo(np.float32).eps * np.abs(x).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=slack)


def test_derivatives_of_quantiles(rng):
    x = jnp.asarray(rng.standard_normal((4, 9)), jnp.float32).at[1, 2].set(jnp.nan)
    q = jnp.array([0.2, 0.55])

    def of(module):
        def loss(x, q):
            return jnp.nansum(jnp.sin(module.quantile(x, q, 1)))

        gradients = jax.grad(loss, (0, 1))(x, q)
        return *gradients, jax.jvp(jax.grad(loss), (x, q), (x * 0 + 1, q))[1]

    # A quantile's error of 16 units, times its derivative by q, at most 8 places of a gap.
    slack = 256 * np.finfo(np.float32).eps * np.nanmax(np.abs(x)) ** 2
    for ours, theirs in zip(of(jtk), of(jnp), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=slack)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (1,)])
def test_empty_and_single(shape):
    x = jnp.ones(shape)
    same(jtk.sort(x), jnp.sort(x))
    same(jtk.argsort(x), jnp.argsort(x))


def test_derivatives(rng):
    x = jnp.asarray(rng.permutation(24).reshape(4, 6), jnp.float32)
    tangent = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    for axis in (0, 1, None):
        for descending in (False, True):

            def of(f, axis=axis, descending=descending):
                def cube(x):
                    return jnp.sum(f(x, axis, descending=descending).ravel() ** 3 * jnp.arange(24))

                return jax.jvp(jax.grad(cube), (x,), (tangent,))

            for ours, theirs in zip(of(jtk.sort), of(jnp.sort), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_indices_have_jaxs_types(rng):
    x = rng.standard_normal(9).astype(np.float32)
    same(jtk.argsort(x, dtype=np.uint8), jnp.argsort(x, dtype=np.uint8))
    with jax.enable_x64(True):
        same(jtk.argsort(x), jnp.argsort(x))


@pytest.mark.parametrize("axis", [-1, 0])
def test_largest_elements_are_in_jaxs_container(axis):
    """That is a list or a tuple, by the version of JAX."""
    x = jnp.asarray(TIES, np.float32)
    found, expected = jtk.top_k(x, 2, axis=axis), lax.top_k(jnp.moveaxis(x, axis, -1), 2)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, jnp.moveaxis(theirs, -1, axis))


def test_rows_are_sorted_where_they_are(rng):
    mesh = mesh_of(MESH_TYPES["auto"])
    x = put(mesh, rng.standard_normal((4, 6)).astype(np.float32), P("d", None))
    functions = (
        jtk.sort, jtk.argsort, lambda x: jtk.top_k(x, 2)[0], lambda x: jtk.lexsort((x, x)),
        lambda x: jtk.sort_operands((x, -x), num_keys=2)[1],
    )  # fmt: skip
    for function in functions:
        compiled = jax.jit(function).lower(x).compile()
        assert bytes_sent(compiled) == 0
        assert compiled(x).sharding.is_equivalent_to(x.sharding, 2)


# Keys of any type with ties, NaN and zeros of both signs, and what moves with them.
TABLES = [
    jnp.asarray(np.roll(np.tile(TIES, (3, 4)), i, 1)).astype(dtype)
    for i, dtype in enumerate(("bool", "float32", "bfloat16", "complex64"))
]
POSITIONS = jnp.arange(TABLES[0].size).reshape(TABLES[0].shape)


@pytest.mark.parametrize("dimension", [-1, 0])
@pytest.mark.parametrize("num_keys", [1, 2, 4])
def test_sorts_of_several_operands(dimension, num_keys):
    operands = [*TABLES, POSITIONS]
    options = {"dimension": dimension, "num_keys": num_keys}
    expected = lax.sort(operands, **options)
    assert isinstance(expected, tuple)
    found = [jtk.sort_operands(operands, **options), jax.jit(
        lambda *xs: jtk.sort_operands(xs, **options))(*operands)]  # fmt: skip
    found.append(_by_argsorts(
        *operands, dimension=dimension % 2, num_keys=num_keys, counts=[False] * (5 - num_keys)
    ))  # fmt: skip
    for each in found:
        jax.tree.map(same, tuple(each), expected)
    (alone,) = _by_argsorts(TABLES[1], dimension=dimension % 2, num_keys=1, counts=[])
    same(alone, lax.sort(TABLES[1], dimension))
    np.testing.assert_array_equal(jtk.sort_operands(TABLES[1], dimension, False), alone)


@pytest.mark.parametrize("axis", [-1, 0])
def test_lexsort(axis):
    for keys in (TABLES, TABLES[1:2], jnp.stack(TABLES[1:3]), (1.0, 2)):
        place = axis if np.ndim(keys[0]) else -1
        for enabled in (False, True):
            with jax.enable_x64(enabled):
                same(jtk.lexsort(keys, place), jnp.lexsort(keys, place))


@pytest.mark.parametrize("options", [
    {}, {"axis": 0}, {"equal_nan": False}, {"size": 3}, {"size": 9, "fill_value": 7, "axis": 1},
])  # fmt: skip
def test_unique(options):
    for x in (TABLES[1], TABLES[3], POSITIONS % 5, POSITIONS[:0]):
        if "size" in options and not len(x):
            continue
        for returned in ((), ("index", "counts"), ("inverse",)):
            asked = dict.fromkeys((f"return_{name}" for name in returned), True)
            ours, theirs = (m.unique(x, **asked, **options) for m in (jtk, jnp))
            jax.tree.map(same, ours, theirs)
    with pytest.raises(jax.errors.ConcretizationTypeError, match="unique"):
        jax.jit(jtk.unique)(POSITIONS)


@pytest.mark.parametrize("edges", [[1, 3, 3, 9], [9, 3, 3, 1], [5], [], [1, np.nan], [np.nan, 1]])
@pytest.mark.parametrize("right", [False, True])
def test_digitize(edges, right):
    edges = np.array(edges, np.float32)
    x = jnp.asarray([*edges, 0, 4, np.nan, -np.inf, np.inf], np.float32)
    for method in (None, "sort"):
        ours, theirs = (m.digitize(x, edges, right, method=method) for m in (jtk, jnp))
        same(ours, theirs)


def test_programs_of_any_size():
    (n,) = export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((3, n), np.float32)
    values = TABLES[1][:3]
    for function in (
        lambda x: jtk.sort_operands((x, -x), num_keys=2),
        lambda x: jtk.lexsort((x, -x), 0),
        lambda x: jtk.unique(x, size=4),
        lambda x: jtk.digitize(x, np.array([1.0, 2.0])),
    ):
        exported = export.export(jax.jit(function), disabled_checks=jtk.export_checks())(x)
        jax.tree.map(same, exported.call(values), function(values))


def test_errors_of_sorts_of_several_operands():
    x = jnp.ones((3, 4))
    for ours, theirs, *arguments in (
        (jtk.sort_operands, lax.sort, (x, x[0])),
        (jtk.sort_operands, lax.sort, (x, x), 2),
        (jtk.sort_operands, lax.sort, x, -1, True, 2),
        (jtk.lexsort, jnp.lexsort, (x, x[0])),
        (jtk.lexsort, jnp.lexsort, ()),
        (jtk.digitize, jnp.digitize, x, x),
        (jtk.digitize, jnp.digitize, x, x[0], False, "guess"),
        (jtk.unique, jnp.unique, "text"),
    ):
        with pytest.raises((TypeError, ValueError)) as expected:
            theirs(*arguments)
        with pytest.raises(type(expected.value)):
            ours(*arguments)


def test_errors_of_quantiles():
    x = jnp.ones((3, 4))
    for call in (
        lambda m: m.quantile(x, 0.5, 2),
        lambda m: m.quantile(x, 0.5, method="mean"),
        lambda m: m.quantile(x, jnp.ones((1, 1)) / 2),
        lambda m: m.quantile(x, 0.5, overwrite_input=True),
        lambda m: m.quantile(x * 1j, 0.5),
        lambda m: m.median(x[:0]),
        lambda m: m.median("text"),
        lambda m: m.percentile(x, 50, (0, 0)),
    ):
        with pytest.raises((TypeError, ValueError)) as expected:
            call(jnp)
        with pytest.raises(type(expected.value)):
            call(jtk)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_searches(rng, side, dtype):
    a, v = (jnp.asarray(rng.integers(0, 30, shape)).astype(dtype) for shape in (41, (3, 70)))
    order = jnp.argsort(a)
    same(jtk.searchsorted(a[order], v, side), jnp.searchsorted(a[order], v, side))
    same(jtk.searchsorted(a, v, side, order), jnp.searchsorted(a, v, side, order))
    same(jtk.searchsorted(a, v, side, method="sort"), jnp.searchsorted(a, v, side, method="sort"))
    same(jtk.searchsorted(a[:0], v, side), jnp.searchsorted(a[:0], v, side))
    both = jnp.sort(a.reshape(1, -1), 1), v[:1]
    for dims in ((0, 0), (0, None), (None, 1)):
        operands = [x if d is not None else x[0] for x, d in zip(both, dims, strict=True)]
        ours, theirs = (
            jax.vmap(lambda a, v, m=m: m.searchsorted(a, v, side), dims)(*operands)
            for m in (jtk, jnp)
        )
        same(ours, theirs)


def test_errors_of_searches():
    a = jnp.arange(4.0)
    for call in (
        lambda m: m.searchsorted(a[None], a),
        lambda m: m.searchsorted(a, a, "middle"),
        lambda m: m.searchsorted(a, a, method="guess"),
        lambda m: m.searchsorted(a, "text"),
    ):
        with pytest.raises((TypeError, ValueError)) as expected:
            call(jnp)
        with pytest.raises(type(expected.value)):
            call(jtk)


@pytest.mark.parametrize("name", ["sort", "argsort"])
def test_errors(name):
    ours, theirs = (getattr(module, name) for module in (jtk, jnp))
    for arguments, options in (
        ((1.0,), {}), ((TIES, 2), {}), ((TIES,), {"kind": "stable"}), ((TIES,), {"order": "x"}),
        (("text",), {}),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as expected:
            theirs(*arguments, **options)
        with pytest.raises(type(expected.value)):
            ours(*arguments, **options)

"""``sum`` has the semantics of ``jnp.sum``, float64's values, and all of JAX's transformations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import (
    BF16,
    F8E4,
    UNIT_ROUNDOFF,
    accumulator,
    assert_close,
    assert_equal,
    exact,
    on_gpu,
    random,
    rounding,
    whole,
)

import jax_tilekern as jtk

FLOATS = [np.float32, BF16, np.float16, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
# Sums over rows, over columns, over both, and of what lies between.
CASES = [
    ((1,), None),
    ((1000,), None),
    ((70001,), 0),
    ((37, 129), 1),
    ((37, 129), 0),
    ((64, 48), 0),
    ((3, 64, 48), 1),
    ((7, 1000), 1),
    ((9, 5003), 1),
    ((2000, 3), 0),
    ((2000, 3), 1),
    ((4, 1, 9, 16), (0, 3)),
    ((4, 7, 9, 16), (1, -1)),
    ((4, 7, 9, 16), (0, 2)),
    ((3, 4, 2, 5, 3, 4), (0, 2, 4)),
    ((3, 4, 2, 5, 3, 4), (1, 3, 5)),
    ((5, 300, 3), 1),
    ((2, 6, 34, 200), (1, 3)),
    ((2, 6, 3, 300), (1, 3)),
    ((2, 9001), 0),
    ((3, 7, 130), 1),
]


def float_bound(x, axis, out_dtype):
    """By how much each sum may err: see ``numerics.error_bound``, here for every sum alone."""
    wide = np.abs(exact(x))
    count = wide.size // max(1, wide.sum(axis).size)
    u = UNIT_ROUNDOFF[accumulator(out_dtype)]
    # Random errors add up to the root of the sum of squares; the bound is a dozen deviations.
    spread = np.sqrt((wide**2).sum(axis))
    return 12 * np.sqrt(count) * u * spread + rounding(exact(x).sum(axis), out_dtype)


def assert_sum(out, x, axis):
    reference = exact(x).sum(axis)
    assert out.shape == reference.shape
    if np.dtype(out.dtype).kind in "iu":
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(out, reference.astype(out.dtype))
        return
    dtype = {"complex64": np.float32, "complex128": np.float64}.get(str(out.dtype), out.dtype)
    error = np.abs(exact(out) - reference)
    np.testing.assert_array_less(error, float_bound(x, axis, dtype) * (1 + 1e-9) + 1e-300)


@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("dtype", [*FLOATS, np.int8, np.int32, np.complex64])
@pytest.mark.one_in(6)
def test_values(rng, x64, shape, axis, dtype):
    x = random(rng, shape, dtype)
    out = jax.jit(functools.partial(jtk.sum, axis=axis))(x)
    assert_sum(out, x, axis)


@pytest.mark.parametrize("dtype", [*INTEGERS, np.bool_, np.complex128])
@pytest.mark.one_in(2)
def test_other_types(rng, x64, dtype):
    bits = random(rng, (33, 70), np.int8)
    x = bits > 0 if dtype == np.bool_ else random(rng, (33, 70), dtype)
    for axis in (None, 0, 1):
        out = jtk.sum(x, axis)
        assert out.dtype == jnp.sum(x, axis).dtype
        assert_sum(out, x, axis)


_XLAS_INT2 = pytest.mark.xfail(on_gpu(), reason="XLA reads 2-bit integers wrongly on GPUs")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(jnp.int2, marks=_XLAS_INT2),
        pytest.param(jnp.uint2, marks=_XLAS_INT2),
        jnp.int4,
        jnp.uint4,
    ],
)
def test_integers_of_fewer_than_8_bits(rng, dtype):
    x = rng.integers(-8, 8, (33, 70)).astype(dtype)
    wanted = x.astype(np.int32).sum(0)
    for kwargs in ({"dtype": dtype}, {"dtype": np.int32}, {"promote_integers": False}):
        ours, theirs = (f.sum(jnp.asarray(x), 0, **kwargs) for f in (jtk, jnp))
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, wanted.astype(ours.dtype), str(kwargs))


@pytest.mark.parametrize("x64_enabled", [False, True])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), ()])
@pytest.mark.one_in(5)
def test_types_and_shapes_are_jaxs(axis, keepdims, x64_enabled):
    with jax.enable_x64(x64_enabled):
        types = (np.float32, BF16, np.int8, np.uint16, np.int32, np.bool_, np.complex64)
        types += (np.float64, np.int64) if x64_enabled else ()
        arrays = [jnp.zeros((2, 3, 4), t) for t in types]
        results = (None, np.float32, np.int8, jnp.bfloat16, np.complex64, np.bool_)
        cases = [(x, dtype) for x in arrays for dtype in results]
        for x, dtype in cases:
            if x.dtype.kind == "c" and dtype not in (None, np.complex64):
                continue
            sums = [
                jax.eval_shape(functools.partial(f, axis=axis, dtype=dtype, keepdims=keepdims), x)
                for f in (jtk.sum, jnp.sum)
            ]
            assert sums[0] == sums[1]
            assert sums[0].weak_type == sums[1].weak_type


@pytest.mark.parametrize("dtype", [*FLOATS, np.int8, np.complex64, np.bool_])
@pytest.mark.parametrize(("shape", "axis"), [((37, 129), 1), ((7, 5, 3), (0, 2)), ((0, 3), 0)])
@pytest.mark.one_in(6)
def test_where_initial_and_promotion(rng, x64, shape, axis, dtype):
    x = jnp.asarray(rng.random(shape) < 0.5) if dtype == np.bool_ else random(rng, shape, dtype)
    where = jnp.asarray(rng.random(shape[1:]) < 0.5)
    masked = np.where(where, x, np.zeros((), dtype))
    for keywords in (
        {"where": where},
        {"initial": 3},
        {"where": where, "initial": jnp.asarray(2), "keepdims": True},
        {"promote_integers": False},
        {"promote_integers": False, "initial": True, "where": False},
        {"dtype": np.result_type(dtype, np.float32), "initial": 1.5, "where": where},
    ):
        found = jax.jit(functools.partial(jtk.sum, axis=axis, **keywords))(x)
        theirs = jnp.sum(x, axis, **keywords)
        assert jax.typeof(found) == jax.typeof(theirs)
        mask = keywords.get("where", True)
        used = x if mask is True else x * 0 if mask is False else jnp.asarray(masked)
        expected = exact(used).sum(axis, keepdims=keywords.get("keepdims", False))
        expected = expected + exact(np.asarray(keywords.get("initial", 0), theirs.dtype))
        if found.dtype.kind in "iub":
            np.testing.assert_array_equal(found, expected.astype(found.dtype))
            continue
        kind = {"complex64": np.float32}.get(str(found.dtype), found.dtype)
        # The sum, the addition of a number up to 3, and the rounding of both.
        bound = float_bound(used, axis, kind).reshape(expected.shape) + rounding(expected, kind)
        error = np.abs(exact(found) - expected)
        assert (error <= bound + 4 * UNIT_ROUNDOFF[accumulator(kind)]).all()


def test_what_is_left_out_may_be_anything(rng):
    x = jnp.asarray([[1.0, np.nan, 2.0], [np.inf, 3.0, 4.0]])
    where = jnp.isfinite(x)
    np.testing.assert_array_equal(jtk.sum(x, 1, where=where), [3, 7])
    gradient = jax.grad(lambda x: jtk.sum(x, where=where, initial=5.0))(x)
    np.testing.assert_array_equal(gradient, where.astype(np.float32))
    np.testing.assert_array_equal(jax.grad(lambda i: jtk.sum(x, initial=i, where=where))(2.0), 1)
    each = jax.vmap(lambda x, where: jtk.sum(x, where=where))(x, where)
    np.testing.assert_array_equal(each, [3, 7])


def test_initial_is_added_before_rounding():
    """256 + 1 is no bfloat16, and the sum of 256 and 1.5 rounds to 258 only if not to 256 first."""
    x = jnp.asarray([256, 1], BF16)
    assert jtk.sum(x, initial=0.5) == jnp.sum(x, initial=0.5) == 258


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_empty(shape):
    for axis in (None, 0, -1):
        np.testing.assert_array_equal(jtk.sum(jnp.zeros(shape), axis), np.zeros(shape).sum(axis))


def test_nan_and_infinities(rng):
    x = rng.standard_normal((6, 5000)).astype(np.float32)
    x[0, 4321], x[1, 7], x[2, 4999], x[3, 0] = np.nan, np.inf, -np.inf, np.inf
    x[3, 2500] = -np.inf
    for axis, y in ((1, x), (0, np.ascontiguousarray(x.T))):
        with np.errstate(invalid="ignore"):
            expected = y.astype(np.float64).sum(axis)
        np.testing.assert_array_equal(jtk.sum(y, axis)[:4], expected[:4].astype(np.float32))


def test_many_elements_err_no_more_than_jaxs(rng):
    """A plain loop would have an error of about a thousand roundings; blocks have a few."""
    x = jnp.asarray(rng.random(30_000_001, np.float32))
    reference = np.asarray(x).astype(np.float64).sum()
    ours, theirs = (abs(float(f(x)) - reference) / reference for f in (jtk.sum, jnp.sum))
    assert ours <= max(theirs, 8 * UNIT_ROUNDOFF[np.dtype(np.float32)])


# Transformations, of small integers and polynomials, which are exact.


AXES = [None, 0, 1, 2, (0, 2), (1, 2), ()]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("mapped", [0, 1, 2, 3, -1])
@pytest.mark.one_in(5)
def test_vmap(rng, axis, mapped):
    x = whole(rng, 3, 4, 5, 6)

    def value_and_gradient(f, x):
        return f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x)

    ours, theirs = (
        jax.jit(
            jax.vmap(
                functools.partial(value_and_gradient, functools.partial(f, axis=axis)), mapped, -1
            )
        )
        for f in (jtk.sum, jnp.sum)
    )
    assert_equal(ours(x), theirs(x))


def test_gradients_have_the_operands_type(rng):
    x = random(rng, (4, 300), BF16)
    got = jax.grad(lambda x: jtk.sum(x, 1, np.float32).sum())(x)
    assert got.dtype == BF16
    np.testing.assert_array_equal(exact(got), np.ones((4, 300)))
    assert jax.grad(jtk.sum)(random(rng, (3,), np.complex64).real).dtype == np.float32


@pytest.mark.parametrize("mapped", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.one_in(2)
def test_vmap_moves_nothing(mapped, axis):
    x = jax.ShapeDtypeStruct((20, 30, 80), np.float32)
    # Where the mapped axis is by itself: elsewhere the result would be transposed.
    out_axis = mapped - (axis < mapped)
    function = jax.vmap(functools.partial(jtk.sum, axis=axis), mapped, out_axis)
    (choice,) = jtk.explain(function, x)
    if choice.kernel is None:
        pytest.skip(f"XLA computes it: {choice.reason}")
    text = jax.jit(function).lower(x).compile().as_text()
    names = re.findall(r"= \S+ ([a-z-]+)\(", text)
    assert names.count("custom-call") == 1
    assert not {"transpose", "copy", "reduce", "broadcast"} & set(names)


# Which kernel.


def explained(function, *args, platform="cuda"):
    with jtk.gpu_target("sm_90a"):
        (choice,) = jtk.explain(function, *args, platform=platform)[-1:]
    return choice


@pytest.mark.parametrize("kind", [jnp.bfloat16, np.float16])
def test_narrow_floats_are_summed_to_float32_where_they_lie(rng, kind):
    x = jnp.asarray(rng.standard_normal((5, 33, 3, 7)), kind)
    for axes in ((0, 1, 2, 3), (0, 2), (1, 3), (3,), (0,)):
        total = jtk.sum(x, axes, dtype=jnp.float32)
        assert_close(total, np.sum(np.asarray(x, np.float64), axes))
    if not on_gpu():
        wide = functools.partial(jtk.sum, dtype=jnp.float32)
        assert explained(wide, x, platform="cpu").kernel == f"cpu_sum {jnp.dtype(kind)}"


def test_export_round_trip(rng):
    x = whole(rng, 30, 40)
    exported = jax.export.export(
        jax.jit(lambda x: jtk.sum(x, 1)), disabled_checks=jtk.export_checks()
    )(x)
    loaded = jax.export.deserialize(exported.serialize())
    assert_equal(loaded.call(x), jnp.sum(x, 1))
    (rows,) = jax.export.symbolic_shape("rows")
    symbolic = jax.export.export(jax.jit(lambda x: jtk.sum(x, 1)))(
        jax.ShapeDtypeStruct((rows, 40), np.float32)
    )
    assert_equal(symbolic.call(x), jnp.sum(x, 1))


@pytest.mark.parametrize("initial", [0, 2])
def test_sums_are_rounded_once(rng, initial):
    """JAX casts the elements to a narrow type, and adds up floats of 8 bits in it."""
    x = jnp.concatenate([jnp.full(500, 1 + 2.0**-12), jnp.full(500, -1.0)])
    assert exact(jtk.sum(x, dtype=np.float16, initial=initial)) == np.float16(
        500 * 2.0**-12 + initial
    )
    x = random(rng, (8, 1000), F8E4)
    error = np.abs(exact(jtk.sum(x, 1, initial=initial)) - exact(x).sum(1) - initial)
    assert (error <= 1.01 * rounding(exact(x).sum(1) + initial, F8E4) + 2.0**-10).all()

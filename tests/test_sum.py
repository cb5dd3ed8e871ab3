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
    assert_close,
    exact,
    on_gpu,
    random,
    rounding,
)

import jax_tilekern as jtk

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


def test_many_elements_err_no_more_than_jaxs(rng):
    """A plain loop would have an error of about a thousand roundings; blocks have a few."""
    x = jnp.asarray(rng.random(30_000_001, np.float32))
    reference = np.asarray(x).astype(np.float64).sum()
    ours, theirs = (abs(float(f(x)) - reference) / reference for f in (jtk.sum, jnp.sum))
    assert ours <= max(theirs, 8 * UNIT_ROUNDOFF[np.dtype(np.float32)])


# Transformations, of small integers and polynomials, which are exact.


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

"""``transpose`` has the semantics of ``jnp.transpose``, bit for bit, and all transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tilekern as jtk


def assert_same_bits(out, expected):
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert np.asarray(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2, jnp.float4_e2m1fn])
def test_types_of_less_than_a_byte_are_left_to_xla(dtype):
    x = jax.ShapeDtypeStruct((67, 130), dtype)
    (choice,) = jtk.explain(jtk.transpose, x)
    assert choice.kernel is None
    assert str(np.dtype(dtype)) in choice.reason
    if dtype == jnp.int4:
        values = np.arange(12).reshape(3, 4) % 8
        out = jtk.transpose(jnp.asarray(values, dtype))
        np.testing.assert_array_equal(out.astype(jnp.int8), values.T)


def test_random_keys():
    keys = jax.random.split(jax.random.key(3), 6).reshape(2, 3)
    out = jtk.transpose(keys)
    assert out.shape == (3, 2)
    np.testing.assert_array_equal(
        jax.random.key_data(out), jax.random.key_data(keys).transpose(1, 0, 2)
    )


@pytest.mark.parametrize(
    ("shape", "axes", "words"),
    [
        ((3, 0, 4), (2, 0, 1), "empty"),
        ((1, 5, 1, 7), (0, 1, 3, 2), "change of shape"),
        ((1, 5, 1, 7), (1, 0, 3, 2), "change of shape"),
        ((5, 7), (0, 1), "change of shape"),
        ((), (), "change of shape"),
    ],
)
def test_what_moves_nothing_is_left_to_xla(rng, shape, axes, words):
    x = rng.standard_normal(shape).astype(np.float32)
    (choice,) = jtk.explain(functools.partial(jtk.transpose, axes=axes), x)
    assert choice.kernel is None
    assert words in choice.reason
    assert_same_bits(jtk.transpose(jnp.asarray(x), axes), x.transpose(axes))


def test_jvp_and_vjp_are_transposes_themselves(rng):
    x, t = rng.standard_normal((2, 66, 40, 3)).astype(np.float32)
    axes = (2, 0, 1)
    out, tangent = jax.jvp(lambda x: jtk.transpose(x, axes), (x,), (t,))
    assert_same_bits(out, x.transpose(axes))
    assert_same_bits(tangent, t.transpose(axes))
    pullback = jax.jit(lambda x, c: jax.vjp(lambda x: jtk.transpose(x, axes), x)[1](c))
    (cotangent,) = pullback(x, t.transpose(axes))
    assert_same_bits(cotangent, t)
    text = str(jax.make_jaxpr(pullback)(x, t.transpose(axes)))
    assert "axes=(1, 2, 0)" in text
    assert "tilekern_transpose" in text

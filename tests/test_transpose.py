"""``transpose`` has the semantics of ``jnp.transpose``, bit for bit, and all transformations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numerics import poison

import jax_tilekern as jtk

DTYPES = [
    *(np.bool_, np.int8, np.uint8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *(np.int16, np.float16, ml_dtypes.bfloat16),
    *(np.int32, np.float32),
    *(np.int64, np.float64, np.complex64),
    np.complex128,
]
# One for each item size.
SIZES = [np.uint8, np.uint16, np.float32, np.float64, np.complex128]
# Whole and broken tiles, rows that start anywhere, records, rows that stay, several dimensions.
CASES = [
    ((256, 272), (1, 0)),
    ((129, 65), (1, 0)),
    ((131, 200), (1, 0)),
    ((77, 1003), (1, 0)),
    ((3, 4112), (1, 0)),
    ((4128, 3), (1, 0)),
    ((2048, 16), (1, 0)),
    ((5, 4099), (1, 0)),
    ((3, 70, 50), (0, 2, 1)),
    ((3, 72, 64), (2, 0, 1)),
    ((3, 264, 528), (0, 2, 1)),
    ((70, 6, 50), (2, 1, 0)),
    ((5, 7, 103), (1, 0, 2)),
    ((2, 5, 6, 64), (2, 0, 1, 3)),
    ((40, 6, 4), (1, 0, 2)),
    ((5, 4, 30, 2, 40), (4, 1, 0, 3, 2)),
    ((3, 1, 4, 2, 33, 40), (2, 5, 0, 3, 1, 4)),
    # Fewer rows or columns than a tile has, in matrices that are apart or side by side.
    ((13, 37), (1, 0)),
    ((203, 11), (1, 0)),
    ((9, 6, 7, 16), (3, 2, 1, 0)),
    ((13, 70, 3, 16), (3, 2, 1, 0)),
    # Three or four rows whose columns become contiguous.
    ((3, 1001), (1, 0)),
    ((2, 4, 77), (0, 2, 1)),
    ((3, 4), (1, 0)),
    # Runs that are copied: adjacent ones of less than two words, and long ones.
    ((2, 9, 7, 3), (0, 2, 1, 3)),
    ((3, 20, 8, 64), (0, 2, 1, 3)),
    ((3, 20, 14, 72), (0, 2, 1, 3)),
]


def random_bits(rng, shape, dtype):
    """Items of any bits: NaN with payloads, infinities, subnormal numbers."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


def assert_same_bits(out, expected):
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert np.asarray(out).tobytes() == expected.tobytes()


def kernel_of(x, axes):
    # On a GPU so small an array is XLA's.
    (choice,) = jtk.explain(functools.partial(jtk.transpose, axes=axes), x, platform="cpu")
    return choice.kernel


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("shape", "axes"), CASES)
def test_values(rng, x64, shape, axes, dtype):
    x = random_bits(rng, shape, dtype)
    given = jnp.asarray(x)
    poison(shape, np.int8)
    assert_same_bits(jax.jit(functools.partial(jtk.transpose, axes=axes))(given), x.transpose(axes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(rng, x64, dtype):
    x = random_bits(rng, (67, 130), dtype)
    assert_same_bits(jtk.transpose(jnp.asarray(x)), x.T)
    assert kernel_of(jnp.asarray(x), None) is not None


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


@pytest.mark.parametrize("rank", range(7))
def test_every_rank(rng, rank):
    shape = rng.permutation([2, 3, 4, 5, 6, 7])[:rank]
    x = rng.standard_normal(shape).astype(np.float32)
    orders = list(itertools.permutations(range(rank)))
    for axes in [None, *(orders[i] for i in rng.integers(len(orders), size=4))]:
        assert_same_bits(jtk.transpose(jnp.asarray(x), axes), x.transpose(axes))


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

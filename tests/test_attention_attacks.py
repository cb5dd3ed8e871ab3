"""``attention`` of inputs at the limits of what its parameters allow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numerics import assert_close
from sharded import AUTO, devices, mesh_of

import jax_tilekern as jtk

pytestmark = pytest.mark.usefixtures("highest_precision")

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_windows_beyond_int32_hide_nothing(window):
    x = draw(1, 5, 2, 4)
    expected = jtk.attention(x, x, x)
    assert_close(jtk.attention(x, x, x, local_window_size=window), expected, 1e-6)
    causal = jtk.attention(x, x, x, local_window_size=(window, 0))
    assert_close(causal, jtk.attention(x, x, x, is_causal=True), 1e-6)


def test_lengths_beyond_int32_hide_nothing():
    x = draw(1, 5, 2, 4)
    found = jtk.attention(x, x, x, key_value_seq_lengths=np.array([2**32 - 1], np.uint32))
    assert_close(found, jtk.attention(x, x, x), 1e-6)


def test_no_features():
    x, value = draw(1, 5, 2, 0), draw(1, 5, 2, 3)
    expected = jnp.broadcast_to(value.mean(1, keepdims=True), value.shape)
    assert_close(jtk.attention(x, x, value), expected, 1e-6)


class Factor:
    """A score function that reads an attribute."""

    value = 1.0

    def __call__(self, score, *_):
        return score * self.value


@pytest.mark.parametrize("kind", ["object", "method"])
def test_functions_read_attributes_anew(kind):
    x = draw(1, 5, 2, 4)
    factor = Factor()
    score_mod = factor if kind == "object" else factor.__call__

    def with_factor(y):
        factor.value = y
        return jtk.attention(x, x, x, score_mod=score_mod)

    assert_close(with_factor(1.0), jtk.attention(x, x, x), 1e-6)
    expected = jtk.attention(x, x, x, scale=1.0)
    assert_close(with_factor(2.0), expected, 1e-6)
    for _ in range(2):
        assert_close(jax.jit(with_factor)(2.0), expected, 1e-6)
        assert_close(with_factor(2.0), expected, 1e-6)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_functions_read_arrays_that_vary_over_devices(check_vma):
    mesh = mesh_of((AUTO, AUTO))
    heads = P(None, None, "d")

    def f(query, key, value, slopes):
        return jtk.attention(
            query, key, value,
            score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k),
            mask_mod=lambda b, h, q, k: (k <= q) | (slopes[h] > 0),
        )  # fmt: skip

    specs = heads, heads, heads, P("d")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=check_vma)

    def both(f):
        loss = lambda *xs: jnp.sum(jnp.sin(f(*xs)))  # noqa: E731
        return jax.jit(lambda *xs: (f(*xs), jax.grad(loss, (0, 1, 2, 3))(*xs)))

    xs = draw(2, 5, 8, 4), draw(2, 6, 8, 4), draw(2, 6, 8, 4), draw(8)
    found, expected = both(mapped)(*xs), both(f)(*xs)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected), 1e-4)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_a_function_serves_meshes_of_several_sizes():
    x = jnp.ones((2, 6, 2, 4))

    def attend(x):
        return jtk.attention(x, x, x, mask_mod=lambda b, h, q, k: q - 1 <= k)

    for size in (1, 2, 3):
        mesh = jax.make_mesh((size,), ("s",), axis_types=(AUTO,), devices=devices()[:size])
        rows = P(None, "s")
        assert jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)(x).shape == x.shape

"""Maps of tiles: what they call empty or whole is so, and they find what they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tilekern.interop import compat
from jax_tilekern.ops.attention.index_functions import traced
from jax_tilekern.ops.attention.scores import Scores, visible_jaxpr
from jax_tilekern.ops.attention.tile_map import ALL, NONE, SOME, tile_kinds, tile_lists

B, N, T, S = 2, 3, 70, 90
TILE_Q, TILE_K = 16, 8
RNG = np.random.default_rng(0)
DOCUMENTS = jnp.asarray(np.sort(RNG.integers(0, 5, (B, S)), -1), np.int32)
LENGTHS = jnp.array([40, 0], np.int32)
PREFIX = jnp.array([11, 33], np.int32)
POSITIONS = jnp.asarray(np.cumsum(RNG.random(S)), np.float32)


def described(options, arrays):
    """A description and its operands from the arguments of a call."""
    mask_mod = options.get("mask_mod")
    function, read = (None, []) if mask_mod is None else traced(mask_mod, "mask_mod", None)
    scores = Scores(
        1.0,
        tuple((name, None) for name in arrays),
        mask_mod=function,
        is_causal=options.get("is_causal", False),
        window=options.get("window"),
    )
    return scores, scores.in_order(arrays, [], read)


def every_element(visible, arrays, sizes):
    function = lambda *indices: compat.jaxpr_as_fun(visible)(*indices, *arrays)[0]  # noqa: E731
    for axis in reversed(range(4)):
        function = jax.vmap(function, [0 if i == axis else None for i in range(4)])
    return np.asarray(jax.jit(function)(*(np.arange(n, dtype=np.int32) for n in sizes)))


def exact_kinds(elements):
    """The kinds of tiles of a mask, from all of its elements."""
    b, n, t, s = elements.shape
    padding = [(0, 0), (0, 0), (0, -t % TILE_Q), (0, -s % TILE_K)]

    def tiles(padded_with):
        # Queries beyond the last one do not count.
        rows = np.pad(elements, [*padding[:2], padding[2], (0, 0)], mode="edge")
        x = np.pad(rows, [(0, 0)] * 3 + padding[3:], constant_values=padded_with)
        return x.reshape(b, n, -1, TILE_Q, x.shape[3] // TILE_K, TILE_K)

    some, every = tiles(False).any((3, 5)), tiles(False).all((3, 5))
    return np.where(every, ALL, np.where(some, SOME, NONE))


def is_sound(kinds, exact):
    kinds = np.broadcast_to(kinds, exact.shape)
    return (exact[kinds == NONE] == NONE).all() and (exact[kinds == ALL] == ALL).all()


# Arguments, arrays, and whether the map finds every empty and every whole tile.
MASKS = {
    "causal": ({"is_causal": True}, {}, True),
    "window": ({"window": (20, 5)}, {}, True),
    "causal window": ({"is_causal": True, "window": (20, 5)}, {}, True),
    "prefix": ({"mask_mod": lambda b, h, q, k: (k <= q) | (k < PREFIX[b])}, {}, False),
    "lengths": ({"is_causal": True}, {"query_lengths": LENGTHS, "key_lengths": LENGTHS + 5}, False),
    "documents": ({"mask_mod": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k]}, {}, True),
    "causal documents": (
        {"is_causal": True, "mask_mod": lambda b, h, q, k: DOCUMENTS[b][q] == DOCUMENTS[b][k]},
        {},
        True,
    ),
    "dilated": ({"mask_mod": lambda b, h, q, k: (q - k) % (h + 1) == 0}, {}, False),
    "blocks": ({"mask_mod": lambda b, h, q, k: (q // 32) == (k // 32)}, {}, False),
    "of heads": (
        {"mask_mod": lambda b, h, q, k: k < (1 << h) * 20 + jnp.abs(h - 1)},
        {"key_lengths": LENGTHS + 5},
        True,
    ),
    "mask": ({}, {"mask": jnp.asarray(RNG.random((B, N, T, S)) < 0.01)}, True),
    "mask of keys": ({}, {"mask": jnp.asarray(RNG.random((1, 1, 1, S)) < 0.7)}, True),
    "positions": (
        {"mask_mod": lambda b, h, q, k: jnp.abs(POSITIONS[q] - POSITIONS[k]) < 4.0},
        {},
        False,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_maps_of_masks(name):
    options, arrays, is_exact = MASKS[name]
    scores, operands = described(options, arrays)
    visible = visible_jaxpr(scores, operands)
    kinds = tile_kinds(visible, operands, (B, N, T, S), TILE_Q, TILE_K)
    assert kinds.dtype == np.int8
    exact = exact_kinds(every_element(visible, operands, (B, N, T, S)))
    assert is_sound(kinds, exact)
    found, possible = ((np.broadcast_to(x, exact.shape) == NONE).sum() for x in (kinds, exact))
    assert found == possible if is_exact else found >= possible / 2
    if is_exact:
        np.testing.assert_array_equal(np.broadcast_to(kinds, exact.shape), exact)
    # The map does not depend on what is known when it is traced.
    traced_kinds = jax.jit(lambda *xs: tile_kinds(visible, xs, (B, N, T, S), TILE_Q, TILE_K))(
        *operands
    )
    np.testing.assert_array_equal(kinds, traced_kinds)
    assert isinstance(kinds, np.ndarray) == (not operands)


def test_a_part_of_a_call():
    """Where devices share a call, the part's first indices are known when it runs."""
    scores, operands = described(*MASKS["causal documents"][:2])
    operands = [*operands, jnp.array([1, 0, 32], np.int32)]
    visible = visible_jaxpr(scores, operands)
    sizes = (1, N, 32, S)
    exact = exact_kinds(every_element(visible, operands, sizes))
    kinds = jax.jit(lambda *xs: tile_kinds(visible, xs, sizes, TILE_Q, TILE_K))(*operands)
    np.testing.assert_array_equal(np.broadcast_to(kinds, exact.shape), exact)


def random_mask(rng):
    """A mask function of a few random operations."""
    array = jnp.asarray(rng.integers(-5, S, (B, S)).astype(np.int32))
    floats = jnp.asarray(rng.standard_normal(S).astype(np.float32))
    numbers = [int(x) for x in rng.integers(1, 50, 8)]
    steps = [int(x) for x in rng.integers(0, 16, 6)]

    def number(b, h, q, k, step, c):
        return [
            lambda: q, lambda: k, lambda: q - k, lambda: q + h * c, lambda: k // c,
            lambda: (k - c) % c, lambda: array[b, q], lambda: array[b, k + c],
            lambda: jnp.abs(q - k), lambda: jnp.minimum(q, c) * k, lambda: array[b][array[b, k]],
            lambda: jnp.sign(q - c) * k, lambda: jnp.where(q > c, k, -q), lambda: (q * q) // c,
            lambda: q >> 2, lambda: jnp.floor(floats[k] * 10 + q).astype(np.int32),
        ][step]()  # fmt: skip

    def mask(b, h, q, k):
        x, y, z, w = (number(b, h, q, k, steps[i], numbers[i]) for i in range(4))
        first = [x < y, x == y, x >= y + numbers[4], x != y][numbers[5] % 4]
        second = [z <= w, z > w - numbers[6], ~(z == w), z + w > 40][numbers[7] % 4]
        return [first & second, first | second, first ^ second][numbers[0] % 3]

    return mask


@pytest.mark.parametrize("seed", range(20))
def test_random_masks(seed):
    scores, operands = described({"mask_mod": random_mask(np.random.default_rng(seed))}, {})
    visible = visible_jaxpr(scores, operands)
    exact = exact_kinds(every_element(visible, operands, (B, N, T, S)))
    for trace in (lambda f: f, jax.jit):
        kinds = trace(lambda *xs: tile_kinds(visible, xs, (B, N, T, S), TILE_Q, TILE_K))(*operands)
        assert is_sound(kinds, exact)


def test_lists():
    kinds = np.array([[[[0, 1, 2], [2, 2, 2], [0, 0, 0]]]], np.int8)
    for x in (kinds, jnp.asarray(kinds)):
        counts, lists = tile_lists(x)
        np.testing.assert_array_equal(counts, [[[2, 3, 0]]])
        np.testing.assert_array_equal(lists[0, 0, 0, :2], [2, 5])
        np.testing.assert_array_equal(lists[0, 0, 1], [1, 3, 5])
    counts, lists = tile_lists(np.swapaxes(kinds, 2, 3))
    np.testing.assert_array_equal(counts, [[[1, 2, 2]]])
    np.testing.assert_array_equal(lists[0, 0, 2, :2], [1, 3])

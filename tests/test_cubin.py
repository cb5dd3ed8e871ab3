"""Cubins packed by Python's zlib and base64, and unpacked by the launch handler's own code."""

import zlib
from base64 import b85encode

import numpy as np
import pytest

from jax_tilekern import _core
from jax_tilekern.compilation.cubin import packed


def sparse(rng, size):
    """Bytes that repeat and are mostly zeros, as a cubin's."""
    words = rng.integers(0, 256, (16, 8), np.uint8)
    words[: rng.integers(12)] = 0
    return words[rng.integers(0, 16, size // 8 + 1)].tobytes()[:size]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 31, 258, 259, 4097, 70_000])
def test_what_is_packed_is_unpacked(rng, size):
    for cubin in (rng.bytes(size), sparse(rng, size), bytes(size)):
        assert _core.unpack_cubin(packed(cubin), size) == cubin


@pytest.mark.parametrize("level", [0, 1, 6, 9])
@pytest.mark.parametrize(
    "strategy", [zlib.Z_DEFAULT_STRATEGY, zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE]
)
def test_every_kind_of_block_is_unpacked(rng, level, strategy):
    cubin = sparse(rng, 50_000) + rng.bytes(70_000)
    deflate = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
    deflated = deflate.compress(cubin[:60_000]) + deflate.flush(zlib.Z_FULL_FLUSH)
    deflated += deflate.compress(cubin[60_000:]) + deflate.flush()
    assert _core.unpack_cubin(b85encode(deflated).decode(), len(cubin)) == cubin


def test_a_damaged_cubin_is_refused(rng):
    cubin = sparse(rng, 5000)
    text = packed(cubin)
    for damaged, size in (
        (text, len(cubin) - 1),
        (text, len(cubin) + 1),
        (text[:-6], len(cubin)),
        ("~" * 5 + text[5:], len(cubin)),  # more than 32 bits
        ('"' + text[1:], len(cubin)),
        ("", 0),
    ):
        with pytest.raises(ValueError, match="damaged"):
            _core.unpack_cubin(damaged, size)

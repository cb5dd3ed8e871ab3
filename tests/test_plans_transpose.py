"""Plans for transposes: what a permutation is reduced to, and what is launched for it."""

import itertools
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.transpose.permutation import Permutation
from jax_tilekern.plans.transpose.select import plan_transpose, transpose_candidate

H100 = known_gpu("sm_90")


shapes = st.lists(st.sampled_from([1, 1, 2, 3, 4, 5]), max_size=6)
permutations = shapes.flatmap(
    lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
)


def found(shape, axes, itemsize):
    return transpose_candidate(Permutation.reduced(shape, axes, itemsize))


@given(permutations)
def test_reduction_moves_memory_alike(case):
    shape, axes = case
    x = np.arange(math.prod(shape))
    reduced = Permutation.reduced(shape, axes, 4)
    moved = x.reshape(reduced.sizes).transpose(reduced.order).ravel()
    np.testing.assert_array_equal(moved, x.reshape(shape).transpose(axes).ravel())


@pytest.mark.parametrize(
    ("shape", "axes", "words"),
    [
        ((100, 100, 3), (1, 0, 2), "rows of 12 bytes stay whole"),
        ((1000, 8, 8), (0, 2, 1), "matrices of 8x8 items"),
        ((5, 2**20 + 1), (1, 0), "matrices of 5x"),
        ((2**24, 3), (1, 0), "x3 items fill 5%"),
        (tuple(range(40, 50)), tuple(reversed(range(10))), "10 dimensions"),
        ((2**31, 64, 64), (0, 2, 1), "more blocks"),
    ],
)
def test_reasons(shape, axes, words):
    assert words in found(shape, axes, 4).reason


@pytest.mark.defaults
def test_whole_sectors_are_xlas_by_default():
    permutation = Permutation.reduced((8191, 4096), (1, 0), 4)
    aligned = Permutation.reduced((8192, 4095), (1, 0), 4)
    assert "start at sectors" in plan_transpose(aligned, H100).reason
    with jtk.policy("kernels"):
        assert plan_transpose(aligned, H100).name == "transpose"
    assert "predicted" in plan_transpose(permutation, H100).reason


def numbers(launch):
    return struct.unpack_from("17q10I", launch.parameters[-1].data)


@given(st.integers(48, 2000), st.integers(128, 5000))
def test_bands_have_every_tile_once(rows, columns):
    """As the kernel walks down them."""
    candidate = found((rows, columns), (1, 0), 4)
    row_tiles, column_tiles = candidate.tiles
    band = candidate.band
    positions = set()
    for tile in range(row_tiles * column_tiles):
        first = tile // (row_tiles * band) * band
        width = min(band, column_tiles - first)
        in_band = tile - first * row_tiles
        positions.add((in_band // width, first + in_band % width))
    assert positions == set(itertools.product(range(row_tiles), range(column_tiles)))
    assert len(positions) == candidate.ctas


@needs_nvrtc
def test_arrays_of_more_than_32_bits_of_items():
    """Strides and sizes are 64-bit numbers; only blocks and what is in a tile are not."""
    tiles = found((50001, 90001), (1, 0), 1)
    launch = tiles.plan(H100).launches[0]
    assert numbers(launch)[12:17] == (50001, 90001, 90001, 50001, 50001 * 90001)
    assert launch.grid[0] == tiles.ctas < 2**31

    # Matrices whose places are swapped as well.
    matrix = 50001 * 10001
    batched = found((3, 9, 50001, 10001), (1, 0, 3, 2), 1).plan(H100).launches[0]
    strides = numbers(batched)
    assert strides[4:6] == (matrix, 9 * matrix)
    assert strides[10:12] == (3 * matrix, matrix)
    assert 9 * matrix > 2**32


LAUNCHED = [
    ((512, 512), (1, 0)),
    ((511, 513), (1, 0)),
]


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "itemsize"),
    [*(("sm_90a", size) for size in (1, 2, 4, 8, 16)), ("sm_80", 1), ("sm_80", 4), ("sm_120", 2)],
)
@pytest.mark.one_in(6)
def test_compiles_without_spills(arch, itemsize):
    gpu = known_gpu(arch)
    for case in LAUNCHED:
        candidate = found(*case, itemsize)
        plan = candidate.plan(gpu)
        assert compile_kernels(candidate.kernel, arch=arch).log == ""
        (launch,) = plan.launches
        assert launch.entry.spill_bytes == 0
        assert launch.entry.shared_memory_bytes == 0
        # An SM holds at least two CTAs.
        assert -(-launch.entry.registers // 8) * 8 * math.prod(launch.block) * 2 <= 65536

"""Plans for transposes: what a permutation is reduced to, and what is launched for it."""

import itertools
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvrtc_mark import needs_nvrtc

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.transpose.permutation import Permutation
from jax_tilekern.plans.transpose.select import transpose_candidate
from jax_tilekern.plans.transpose.shape import TileGrid, divisor

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
        ((100, 100, 3), (1, 0, 2), "rows of 12 bytes"),
        ((1000, 8, 8), (0, 2, 1), "matrices of 256 bytes"),
        ((3, 1000, 9), (2, 1, 0), "matrices of 108 bytes"),
        ((5, 2**20 + 1), (1, 0), "rows of 20 bytes"),
        ((2**24, 3), (1, 0), "rows of 12 bytes"),
        (tuple(range(40, 50)), tuple(reversed(range(10))), "10 dimensions"),
        ((2**31, 64, 64), (0, 2, 1), "more blocks"),
        ((2**31, 2, 64), (1, 0, 2), "more blocks"),
    ],
)
def test_reasons(shape, axes, words):
    assert words in found(shape, axes, 4).reason


@given(st.integers(1, 2**31), st.integers(0, 2**31 - 1))
def test_division_by_a_divisor_is_exact(value, number):
    fields = divisor(value)
    assert fields[0] == value
    assert max(fields) < 2**32
    assert number * fields[1] >> fields[2] == number // value


@given(st.integers(1, 2000), st.integers(1, 40))
def test_grouped_rasterization_has_every_tile_once(rows, columns):
    """As ``tile_position`` of ``transpose/shape.cuh`` walks them."""
    values = TileGrid(rows, columns).values
    count, band, width, last_width = values[1::3]
    assert (values[0], count) == (columns, rows * columns)
    positions = set()
    for tile in range(count):
        first = tile // band * width
        row, column = divmod(tile % band, last_width if first + width > columns else width)
        positions.add((row, first + column))
    assert positions == set(itertools.product(range(rows), range(columns)))


def numbers(launch, layout):
    return struct.unpack_from(layout, launch.parameters[-1].data)


@needs_nvrtc
def test_arrays_of_more_than_32_bits_of_items():
    """Strides and sizes are 64-bit numbers; only blocks and what is in a tile are not."""
    tiles = found((50001, 90001), (1, 0), 1)
    launch = tiles.plan(H100).launches[0]
    assert numbers(launch, "14I5q")[14:] == (50001, 90001, 90001, 50001, 50001 * 90001)
    assert launch.grid[0] == tiles.count < 2**31

    # Matrices whose places are swapped as well.
    matrix = 50001 * 10001
    batched = found((3, 9, 50001, 10001), (1, 0, 3, 2), 1).plan(H100).launches[0]
    strides = numbers(batched, "14I17q")[19:]
    assert strides[4:6] == (matrix, 9 * matrix)
    assert strides[10:12] == (3 * matrix, matrix)
    assert 9 * matrix > 2**32

    rows = found((5, 2**26, 3), (1, 0, 2), 16).plan(H100).launches[0]
    assert numbers(rows, "4Iq12q")[10] == 3 * 2**26 * 16


LAUNCHED = [
    ((512, 512), (1, 0)),
    ((511, 513), (1, 0)),
    ((4096, 40), (1, 0)),
    ((7, 9, 103), (1, 0, 2)),
    ((7, 9, 96), (1, 0, 2)),
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

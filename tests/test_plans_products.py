"""Plans of products on mma.sync and plain arithmetic, of groups too, and their choice."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from products import (
    BF16,
    E4M3,
    E5M2,
    F32,
    F64,
    H100,
    INT8,
    MODERN,
    geometries,
    product_of,
    products,
    ragged_product_of,
    row_major,
)

from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates, plan_matmul
from jax_tilekern.plans.gemm.sm80.candidates import MmaCandidate, mma_candidates
from jax_tilekern.plans.gemm.sm80.config import MMA_ARITHMETICS, pack_shape
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.grouped_gemm.sm80.candidates import grouped_mma_candidates
from jax_tilekern.plans.launch import NoKernel


def best(product, gpu=H100):
    """The family's best candidate by the cost model, or why there is none."""
    found = mma_candidates(product, gpu)
    return found if isinstance(found, NoKernel) else min(found, key=lambda choice: choice.cycles)


def bf16(geometry):
    return Product(geometry, BF16, BF16, BF16, "bf16")


sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**20), st.sampled_from([64, 128, 4096]))


@st.composite
def cases(draw):
    """A product, and a GPU that has its arithmetic."""
    wanted = draw(products(MMA_ARITHMETICS, geometries(sizes, most_batch_dims=4)))
    least = MMA_ARITHMETICS[wanted.arithmetic].min_capability
    return wanted, draw(st.sampled_from([g for g in MODERN if g.compute_capability >= least]))


@given(cases())
def test_every_product_has_kernels_that_fit(case):
    product, gpu = case
    geometry = product.geometry
    found = mma_candidates(product, gpu)
    assert found
    assert len({choice.key for choice in found}) == len(found)
    for choice in found:
        instance, tile = choice.instance, choice.instance.tile
        assert choice.product == product
        assert tile in MMA_ARITHMETICS[product.arithmetic].tiles
        assert instance.shared_memory_bytes <= gpu.shared_memory_bytes
        assert instance.block_k * product.lhs_dtype.itemsize == 128
        assert instance.stages >= 2
        assert tile.threads <= 1024
        assert instance.promote == (product.arithmetic == "fp8" and not instance.widen)
        tiles_m, tiles_n, batch = choice.grid
        assert (tiles_m - 1) * tile.block_m < geometry.m <= tiles_m * tile.block_m
        assert (tiles_n - 1) * tile.block_n < geometry.n <= tiles_n * tile.block_n
        assert batch == math.prod(geometry.batch)
        assert math.prod(choice.grid) < 2**31
        assert 1 <= choice.raster_height <= tiles_m
        assert choice.cycles > 0


@given(cases())
def test_copies_are_aligned_and_whole(case):
    product, gpu = case
    geometry = product.geometry
    m, n, k = geometry.m, geometry.n, geometry.k
    for choice in mma_candidates(product, gpu):
        lhs, rhs = choice.instance.lhs, choice.instance.rhs
        for operand, dtype, strides, shape, unit in (
            (lhs, product.lhs_dtype, geometry.lhs_strides, (m, k), 1 if lhs.k_major else 0),
            (rhs, product.rhs_dtype, geometry.rhs_strides, (k, n), 0 if rhs.k_major else 1),
        ):
            assert strides[-2:][unit] == 1 or shape[unit] == 1
            assert operand.load_bytes in (1, 4, 8, 16)
            if operand.load_bytes == 1:
                assert dtype.itemsize < 4
                continue
            assert operand.load_bytes >= dtype.itemsize
            steps = [shape[unit]]
            steps += [strides[-2:][1 - unit]] * (shape[1 - unit] > 1)
            steps += [s for size, s in zip(geometry.batch, strides, strict=False) if size > 1]
            assert all(step * dtype.itemsize % operand.load_bytes == 0 for step in steps)
        if choice.out_vectors:
            outer = zip((*geometry.batch, m), geometry.out_strides, strict=False)
            steps = [n, *(stride for size, stride in outer if size > 1)]
            assert all(step * product.out_dtype.itemsize % 16 == 0 for step in steps)


def unpack(scalars):
    """The fields of ``MatmulShape`` in gemm/sm80/config.cuh."""
    assert len(scalars.data) == 168
    values = struct.unpack("@15q11i0q", scalars.data)
    return {
        "lhs_batch_strides": values[0:4],
        "rhs_batch_strides": values[4:8],
        "out_batch_strides": values[8:12],
        "lhs_stride": values[12],
        "rhs_stride": values[13],
        "out_stride": values[14],
        "batch": values[15:19],
        "sizes": values[19:22],
        "tiles": values[22:24],
        "raster_height": values[24],
        "out_vectors": values[25],
    }


def test_strides_beyond_32_bits_are_packed_whole():
    geometry = MatmulGeometry(
        batch=(3, 2),
        m=300,
        n=200,
        k=100,
        lhs_strides=(0, 2**40, 1, 2**33),
        rhs_strides=(2**41, 0, 2**34, 1),
        out_strides=(2**43, 2**42, 2**35, 1),
    )
    choice = best(bf16(geometry))
    shape = pack_shape(
        geometry, choice.instance, choice.grid[:2], choice.raster_height, choice.out_vectors
    )
    fields = unpack(shape)
    assert fields["lhs_batch_strides"] == (0, 0, 0, 2**40)
    assert fields["rhs_batch_strides"] == (0, 0, 2**41, 0)
    assert fields["out_batch_strides"] == (0, 0, 2**43, 2**42)
    assert (fields["lhs_stride"], fields["rhs_stride"]) == (2**33, 2**34)
    assert fields["out_stride"] == 2**35
    assert fields["batch"] == (1, 1, 3, 2)
    assert fields["sizes"] == (300, 200, 100)
    assert fields["tiles"] == choice.grid[:2]
    assert fields["raster_height"] == choice.raster_height
    assert fields["out_vectors"] == 1


def test_grids_and_dimensions_have_limits():
    crowd = product_of("bf16", 1 << 20, 1 << 20, 8, (1 << 12,))
    assert "more tiles than a grid has CTAs" in mma_candidates(crowd, H100).reason
    long = product_of("bf16", 2**31, 8, 8)
    reason = "a dimension has more than 2**31 - 1024 elements"
    assert mma_candidates(long, H100) == NoKernel(reason)
    # More than 65535 products are one launch.
    assert isinstance(best(product_of("bf16", 16, 16, 16, (1 << 20,))), MmaCandidate)


A100 = known_gpu("sm_80")


sizes_of_groups = st.one_of(st.integers(1, 300), st.integers(1, 2**16), st.sampled_from([64, 4096]))


@st.composite
def grouped_cases(draw):
    """A ragged product, and a GPU that has its arithmetic."""
    arithmetic = draw(st.sampled_from(sorted(MMA_ARITHMETICS)))
    product = ragged_product_of(
        arithmetic,
        draw(st.sampled_from("mk")),
        draw(st.integers(1, 300)),
        *(draw(sizes_of_groups) for _ in "mnk"),
        batch=draw(st.lists(st.integers(1, 3), max_size=3)),
        lhs_k_major=draw(st.booleans()),
        rhs_k_major=draw(st.booleans()),
    )
    least = MMA_ARITHMETICS[arithmetic].min_capability
    return product, draw(st.sampled_from([g for g in MODERN if g.compute_capability >= least]))


@given(grouped_cases())
def test_every_grouped_product_has_kernels_that_fit(case):
    product, gpu = case
    geometry = product.geometry
    found = grouped_mma_candidates(product, gpu)
    assert len({choice.key for choice in found}) == len(found) > 0
    for choice in found:
        tile, (tiles_m, tiles_n, outer) = choice.instance.tile, choice.grid
        assert choice.instance.shared_memory_bytes <= gpu.shared_memory_bytes
        assert (tiles_n - 1) * tile.block_n < geometry.n <= tiles_n * tile.block_n
        if geometry.ragged == "k":
            assert tiles_m == math.ceil(geometry.m / tile.block_m)
            assert outer == math.prod(geometry.batch)
        else:
            assert outer == math.prod(geometry.outer_batch)
        assert choice.raster_height >= 1
        assert 0 < choice.cycles < math.inf


@given(grouped_cases())
def test_copies_divide_the_distance_of_any_row_that_a_group_starts_at(case):
    product, gpu = case
    geometry, ragged = product.groups, product.groups.ragged
    for choice in grouped_mma_candidates(product, gpu):
        for operand, dtype, strides, along_rows in (
            (choice.instance.lhs, product.lhs_dtype, geometry.lhs_strides, "mk".index(ragged)),
            (choice.instance.rhs, product.rhs_dtype, geometry.rhs_strides, "kn".find(ragged)),
        ):
            assert operand.load_bytes >= dtype.itemsize or operand.load_bytes == 1
            if along_rows >= 0 and operand.load_bytes > 1 and geometry.rows > 1:
                step = strides[-2:][along_rows]
                assert step * dtype.itemsize % operand.load_bytes == 0


def first_tile_row(begin, index, block_rows):
    return begin // block_rows + index


@given(st.data(), st.integers(1, 40), st.integers(1, 400), st.sampled_from([32, 64, 128, 256]))
def test_tile_rows_of_the_grid_cover_every_row_once(data, groups, rows, block_rows):
    # ragged_rows_tile() of grouped_gemm/sm80/matmul_block.cuh.
    bounds = sorted(data.draw(st.lists(st.integers(0, rows), min_size=groups + 1,
                                       max_size=groups + 1)))  # fmt: skip
    begins, ends = [0, *bounds], [*bounds, rows]
    product = ragged_product_of("bf16", "m", groups, rows, 64, 64)
    (choice,) = (
        c for c in grouped_mma_candidates(product, H100) if c.instance.tile.block_m == block_rows
    )
    covered = np.zeros(rows, int)
    for tile_row in range(choice.grid[0]):
        low, high = 0, groups + 2
        while high - low > 1:
            middle = (low + high) // 2
            if first_tile_row(begins[middle], middle, block_rows) <= tile_row:
                low = middle
            else:
                high = middle
        tile = tile_row - first_tile_row(begins[low], low, block_rows)
        assert tile >= 0
        if tile < math.ceil((ends[low] - begins[low]) / block_rows):
            first = begins[low] + tile * block_rows
            covered[first : min(first + block_rows, ends[low])] += 1
    np.testing.assert_array_equal(covered, 1)


def test_what_has_no_grouped_kernel_says_why():
    wrong = ragged_product_of("int8", "m", 8, 64, 64, 64, types=(INT8, INT8, F32))
    assert grouped_mma_candidates(wrong, H100) == NoKernel(
        "no int8 kernel for int8 x int8 -> float32"
    )
    assert grouped_mma_candidates(ragged_product_of("fp8", "m", 8, 64, 64, 64), A100) == NoKernel(
        "fp8 takes sm_89 or later, and this is sm_80"
    )
    unknown = ragged_product_of("f32_emulated", "m", 8, 64, 64, 64, types=(F32, F32, F32))
    assert plan_matmul(unknown, H100) == NoKernel("no kernel computes in f32_emulated")
    long = ragged_product_of("bf16", "m", 8, 2**31, 8, 8)
    assert plan_matmul(long, H100) == NoKernel("a dimension has more than 2**31 - 1024 elements")
    crowd = ragged_product_of("bf16", "m", 2**24, 2**24, 2**16, 8)
    assert "has more tiles than a grid has CTAs" in plan_matmul(crowd, H100).reason


@pytest.mark.parametrize(
    ("types", "arithmetic", "gpu", "reason"),
    [
        ((BF16, BF16, BF16), "bf16", "sm_75", "bf16 takes sm_80 or later, and this is sm_75"),
        ((E4M3, E5M2, F32), "fp8", "sm_80", "fp8 takes sm_89 or later, and this is sm_80"),
        ((BF16, F32, F32), "bf16", "sm_90", "no bf16 kernel for bfloat16 x float32 -> float32"),
        ((BF16, BF16, F64), "bf16", "sm_90", "no bf16 kernel for bfloat16 x bfloat16 -> float64"),
        ((F32, F32, F32), "bf16_x9", "sm_90", "no kernel computes in bf16_x9"),
        ((F32,) * 3, "f32_emulated", "sm_80", "f32_emulated takes sm_90a, and this is sm_80"),
    ],
)
def test_says_why_there_is_no_kernel(types, arithmetic, gpu, reason):
    product = Product(row_major(64, 64, 64), *types, arithmetic)
    assert candidates(product, known_gpu(gpu)) == NoKernel(reason)
    assert plan_matmul(product, known_gpu(gpu)) == NoKernel(reason)


@pytest.mark.parametrize("side", ["m", "n", "k"])
def test_dimensions_have_limits(side):
    sizes = {"m": 8, "n": 8, "k": 8, side: 2**31}
    product = Product(row_major(**sizes), BF16, BF16, BF16, "bf16")
    assert candidates(product, H100) == NoKernel("a dimension has more than 2**31 - 1024 elements")

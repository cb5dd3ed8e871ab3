"""Plans for ragged products on mma.sync and plain arithmetic; no GPU needed."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from products import F32, H100, INT8, MODERN, ragged_product_of

from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.plans.gemm.sm80.config import MMA_ARITHMETICS
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.grouped_gemm.sm80.candidates import grouped_mma_candidates
from jax_tilekern.plans.launch import NoKernel

A100, RTX_5090 = known_gpu("sm_80"), known_gpu("sm_120")


sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**16), st.sampled_from([64, 4096]))


@st.composite
def cases(draw):
    """A ragged product, and a GPU that has its arithmetic."""
    arithmetic = draw(st.sampled_from(sorted(MMA_ARITHMETICS)))
    product = ragged_product_of(
        arithmetic,
        draw(st.sampled_from("mk")),
        draw(st.integers(1, 300)),
        *(draw(sizes) for _ in "mnk"),
        batch=draw(st.lists(st.integers(1, 3), max_size=3)),
        lhs_k_major=draw(st.booleans()),
        rhs_k_major=draw(st.booleans()),
    )
    least = MMA_ARITHMETICS[arithmetic].min_capability
    return product, draw(st.sampled_from([g for g in MODERN if g.compute_capability >= least]))


@given(cases())
def test_every_product_has_kernels_that_fit(case):
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


@given(cases())
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


def test_what_has_no_kernel_says_why():
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

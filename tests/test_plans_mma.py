"""Plans on mma.sync and plain arithmetic: properties over random geometries; no GPU needed."""

import math
import struct

from hypothesis import given
from hypothesis import strategies as st
from products import (
    BF16,
    H100,
    MODERN,
    geometries,
    product_of,
    products,
)

from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.candidates import MmaCandidate, mma_candidates
from jax_tilekern.plans.gemm.sm80.config import MMA_ARITHMETICS, pack_shape
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

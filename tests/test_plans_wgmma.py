"""Plans on Hopper's tensor cores: properties over random geometries; no GPU needed.

What the kernel does with the numbers that it gets is modelled here: which item is which tile of
which output (``gemm/sm90/tile_scheduler.cuh``), and what boxes of the tensor maps it copies.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from nvrtc_mark import needs_nvrtc
from products import (
    H100,
    geometries,
    product_of,
    products,
    row_major,
    taken,
)
from wgmma_launches import (
    batch_positions,
    buffers_bytes,
    offset_bytes,
    plan_of,
    rasterized_tile,
    unpack_shape,
)

from jax_tilekern.plans.gemm.sm90.candidates import WGMMA
from jax_tilekern.plans.gemm.sm90.config import WGMMA_ARITHMETICS
from jax_tilekern.plans.launch import TensorMap

# Sizes are 1 in most dimensions, or odd, or span several tiles; k may be split.
small_sizes = st.one_of(st.just(1), st.integers(1, 40), st.integers(1, 90).map(lambda n: 8 * n))
small = geometries(small_sizes, most_batch_dims=3)
deep = st.builds(
    row_major,
    m=small_sizes,
    n=small_sizes,
    k=st.integers(500, 20000),
    batch=st.lists(st.integers(1, 3), max_size=3),
    lhs_k_major=st.booleans(),
    rhs_k_major=st.booleans(),
    padding=st.sampled_from([0, 0, 8]),
    broadcast=st.sets(st.integers(0, 2)),
)
large = geometries(st.one_of(st.integers(1, 2**16), st.sampled_from([4096, 8192])), 3)
any_geometry = st.one_of(small, deep, large)


def candidates(product, gpu):
    return taken(WGMMA, product, gpu)


def main_launch(plan):
    (launch,) = (one for one in plan.launches if "wgmma_matmul" in one.entry.name)
    return launch


def shape_of(plan):
    return unpack_shape(main_launch(plan).parameters[-1])


def buffer_bytes(product, plan):
    """What each buffer of the plan has at least."""
    return buffers_bytes(product, product.geometry) + plan.workspace_bytes


def work_items(shape, config):
    """``DenseTiles`` of gemm/sm90/tile_scheduler.cuh: all items."""
    item = np.arange(shape["work_tiles"])
    tiles = shape["tiles_m"] * shape["tiles_n"]
    stacked, index = item // tiles, item % tiles
    m, n = rasterized_tile(index, shape["tiles_m"], shape["tiles_n"], shape["raster_height"])
    split, batch = stacked // shape["batches"], stacked % shape["batches"]
    positions = batch_positions(shape, batch)
    if shape["split_k_tiles"] < shape["k_tiles"]:
        positions["out_batch"] = [0 * stacked, 0 * stacked, stacked]
    steps = shape["split_k_tiles"]
    return {
        "m": m * config.block_m,
        "n": n * config.block_n,
        "split": split,
        "batch": batch,
        **positions,
        "k": split * steps * config.block_k,
        "k_tiles": np.minimum(steps, shape["k_tiles"] - split * steps),
    }


def sides(candidate):
    """The product's m and n as the kernel has them."""
    g = candidate.product.geometry
    return (g.n, g.m) if candidate.swapped else (g.m, g.n)


@st.composite
def cases(draw, geometries):
    """A product and one of its candidates."""
    product = draw(products(WGMMA_ARITHMETICS, geometries))
    found = list(candidates(product, H100))
    assume(found)
    return product, draw(st.sampled_from(found))


# -- Candidates. -----------------------------------------------------------------------------------


# -- Work. -----------------------------------------------------------------------------------------


@given(cases(st.one_of(small, deep)), st.data())
def test_items_cover_every_output_and_all_of_k_once(case, data):
    product, choice = case
    g, instance = product.geometry, choice.instance
    plan = plan_of(choice)
    launch, shape = main_launch(plan), shape_of(plan)
    m, n = sides(choice)
    work = work_items(shape, instance)

    assert launch.grid[1:] == (1, 1)
    assert 1 <= launch.grid[0] <= H100.sm_count
    assert launch.cluster == (1, 1, 1)
    assert launch.grid[0] <= shape["work_tiles"]
    assert launch.block == (instance.threads, 1, 1)
    assert launch.shared_memory_bytes == instance.shared_memory_bytes

    assert (shape["m"], shape["n"]) == (m, n)
    assert shape["batches"] == math.prod(g.batch) == math.prod(shape["batch"])
    tiles_m = -(-m // instance.block_m)
    tiles_n = -(-n // instance.block_n)
    done = set(
        zip(
            *(work[name].tolist() for name in ("split", "batch")),
            (work["m"] // instance.block_m).tolist(),
            (work["n"] // instance.block_n).tolist(),
            strict=True,
        )
    )
    ranges = [range(size) for size in (choice.splits, shape["batches"], tiles_m, tiles_n)]
    assert len(work["m"]) == math.prod(map(len, ranges))
    assert done == set(itertools.product(*ranges))

    firsts_of_k = [
        first + k_tile * instance.block_k
        for first, count in dict.fromkeys(
            zip(work["k"].tolist(), work["k_tiles"].tolist(), strict=True)
        )
        for k_tile in range(count)
    ]
    assert firsts_of_k == list(range(0, g.k, instance.block_k))
    assert min(work["k_tiles"]) >= 1


# -- Memory. ---------------------------------------------------------------------------------------


@given(cases(any_geometry))
def test_tensor_maps_stay_inside_their_buffers(case):
    product, choice = case
    instance = choice.instance
    plan = plan_of(choice)  # in which TensorMap checks the driver's rules
    sizes = buffer_bytes(product, plan)
    lhs, rhs, out, pointer, _ = main_launch(plan).parameters
    for tensor_map in (lhs, rhs, out):
        assert isinstance(tensor_map, TensorMap)
        assert len(tensor_map.sizes) == 5
        assert tensor_map.swizzle == 128
        assert tensor_map.box[0] * tensor_map.element_bytes == 128
        assert tensor_map.extent_bytes <= sizes[tensor_map.buffer]
    assert lhs.box_bytes == (instance.block_m if instance.lhs_k_major else instance.block_k) * 128
    assert rhs.box_bytes == (instance.block_n if instance.rhs_k_major else instance.block_k) * 128
    if instance.tma_store:
        assert out.buffer == pointer.index
        assert out.box_bytes <= 8192
    else:
        assert out == lhs


@given(cases(st.one_of(small, deep)), st.data())
def test_maps_lead_to_the_elements_of_the_operands(case, data):
    """What the kernel reads and writes at random positions is what the geometry says."""
    product, choice = case
    g, instance = product.geometry, choice.instance
    plan = plan_of(choice)
    shape = shape_of(plan)
    lhs_map, rhs_map, out_map, pointer, _ = main_launch(plan).parameters
    m, n = sides(choice)
    row, column, k = (data.draw(st.integers(0, size - 1)) for size in (m, n, g.k))
    i, j = (column, row) if choice.swapped else (row, column)
    work = work_items(shape, instance)
    item = data.draw(st.integers(0, len(work["m"]) - 1))
    batch = np.unravel_index(work["batch"][item], g.batch) if g.batch else ()

    def position(name):
        return [int(x[item]) for x in work[name]]

    operands = [(lhs_map, instance.lhs_k_major, row, m), (rhs_map, instance.rhs_k_major, column, n)]
    if choice.swapped:
        operands.reverse()
    names = ("rhs_batch", "lhs_batch") if choice.swapped else ("lhs_batch", "rhs_batch")
    sources = (
        (g.lhs_strides, (i, k), product.lhs_dtype.itemsize),
        (g.rhs_strides, (k, j), product.rhs_dtype.itemsize),
    )
    for buffer in (0, 1):
        tensor_map, k_major, line, lines = operands[buffer]
        strides, matrix, itemsize = sources[buffer]
        assert tensor_map.sizes[:2] == ((g.k, lines) if k_major else (lines, g.k))
        inner = (k, line) if k_major else (line, k)
        got = offset_bytes(tensor_map, inner, position(names[buffer]))
        if tensor_map.buffer == buffer:
            wanted = np.dot((*batch, *matrix), strides) * itemsize
        else:
            # Rows of k, of whole 128 bytes, of all matrices that are not the same by broadcasting.
            own = [d for d, size in enumerate(g.batch) if size > 1 and strides[d] != 0]
            index = 0
            for d in own:
                index = index * g.batch[d] + batch[d]
            row_bytes = -(-g.k * itemsize // 128) * 128
            wanted = (index * lines + line) * row_bytes + k * itemsize
        assert got == wanted

    # The output, or the partial sums of a split.
    wanted, itemsize = np.dot((*batch, i, j), g.out_strides), product.out_dtype.itemsize
    if choice.splits > 1:
        stacked = work["split"][item] * shape["batches"] + work["batch"][item]
        wanted, itemsize = (stacked * g.m + i) * g.n + j, 4
    inner = (row, column) if instance.out_m_major else (column, row)
    if instance.tma_store:
        assert out_map.sizes[:2] == ((m, n) if instance.out_m_major else (n, m))
        assert out_map.element_bytes == itemsize
        assert offset_bytes(out_map, inner, position("out_batch")) == wanted * itemsize
    else:
        batch_offset = np.dot(position("out_batch"), shape["out_batch_strides"])
        assert inner[0] + inner[1] * shape["out_stride"] + batch_offset == wanted
    assert pointer.index == (2 if choice.splits == 1 else 2 + len(plan.workspace_bytes))


# -- Passes. ---------------------------------------------------------------------------------------


# -- What the C++ has. -----------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        (product_of("bf16", 2048, 2048, 2048), 1),
        (product_of("bf16", 2047, 2049, 2045), 3),
        (product_of("int8", 128, 256, 65536, lhs_k_major=False), 3),
        (product_of("tf32", 512, 512, 8192, (3, 1), broadcast=(0,)), 1),
        (product_of("fp8", 96, 80, 64, rhs_k_major=True), 1),
    ],
    ids=["plain", "packed", "split", "batch", "fp8"],
)
def test_parameters_are_those_of_the_compiled_kernels(wanted, kernels):
    found = [c for c in candidates(wanted, H100) if len(plan_of(c).launches) == kernels]
    choice = min(found, key=lambda choice: choice.cycles)
    # Launch compares them.
    plan = choice.plan(H100)
    assert len(plan.launches) == kernels
    assert [one.entry.parameter_bytes for one in plan.launches] == [
        one.entry.parameter_bytes for one in plan_of(choice).launches
    ]
    assert plan.name == f"wgmma_matmul {wanted.arithmetic}"
    assert all(one.entry.spill_bytes == 0 for one in plan.launches)

"""Plans on Hopper's tensor cores: properties over random geometries; no GPU needed.

What the kernel does with the numbers that it gets is modelled here: which item is which tile of
which output (``gemm/sm90/tile_scheduler.cuh``), and what boxes of the tensor maps it copies.
"""

import dataclasses
import itertools
import math
import re
import struct

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from nvrtc_mark import needs_nvrtc
from products import (
    H100,
    MODERN,
    geometries,
    product_of,
    products,
    row_major,
    taken,
)
from wgmma_launches import (
    SHAPE_LAYOUT,
    batch_positions,
    buffers_bytes,
    kernel_of,
    layout_of,
    offset_bytes,
    plan_of,
    rasterized_tile,
    struct_fields,
    unpack_shape,
)

from jax_tilekern.plans.gemm import select as matmul
from jax_tilekern.plans.gemm.sm80.candidates import MmaCandidate
from jax_tilekern.plans.gemm.sm90.candidates import WGMMA
from jax_tilekern.plans.gemm.sm90.config import WGMMA_ARITHMETICS, WgmmaInstance
from jax_tilekern.plans.launch import Buffer, TensorMap

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
    """``DenseTiles`` of gemm/sm90/tile_scheduler.cuh: all items, of each of a cluster's blocks."""
    item = np.repeat(np.arange(shape["work_tiles"]), config.cluster)
    block = np.tile(np.arange(config.cluster), shape["work_tiles"])
    tiles = shape["tiles_m"] * shape["tiles_n"]
    stacked, index = item // tiles, item % tiles
    m, n = rasterized_tile(index, shape["tiles_m"], shape["tiles_n"], shape["raster_height"])
    split, batch = stacked // shape["batches"], stacked % shape["batches"]
    positions = batch_positions(shape, batch)
    if shape["split_k_tiles"] < shape["k_tiles"]:
        positions["out_batch"] = [0 * stacked, 0 * stacked, stacked]
    steps = shape["split_k_tiles"]
    return {
        "m": (m * config.cluster + block) * config.block_m,
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


def is_dot(product):
    """Whether neither operand is k-major even when packed, and left to other kernels."""
    g = product.geometry
    return product.lhs_dtype.itemsize != 2 and g.k == 1 and 1 in (g.m, g.n)


@st.composite
def cases(draw, geometries):
    """A product and one of its candidates."""
    product = draw(products(WGMMA_ARITHMETICS, geometries))
    found = list(candidates(product, H100))
    assume(found)
    return product, draw(st.sampled_from(found))


# -- Candidates. -----------------------------------------------------------------------------------


@given(products(WGMMA_ARITHMETICS, any_geometry))
def test_candidates_fit_and_are_told_apart(product):
    found = list(candidates(product, H100))
    assert found or is_dot(product)
    assert len({choice.key for choice in found}) == len(found)
    assert list(candidates(product, H100)) == found
    for choice in found:
        instance = choice.instance
        assert choice.product == product
        assert choice.cycles > 0
        assert instance.shared_memory_bytes <= H100.shared_memory_bytes
        assert instance.stages >= 2
        assert instance.threads <= 512
        assert instance.block_k * product.lhs_dtype.itemsize == 128
        assert instance.block_m == choice.tile.block_m
        assert instance.block_n == choice.tile.block_n
        # Rows that a consumer has are whole instructions of 64.
        assert instance.block_m % (64 * (instance.consumers if instance.cooperative else 1)) == 0
        assert instance.promote == (product.arithmetic == "fp8")


@pytest.mark.parametrize("gpu", MODERN, ids=lambda gpu: gpu.arch)
def test_only_hopper_has_candidates(gpu):
    found = list(candidates(product_of("bf16", 4096, 4096, 4096), gpu))
    assert bool(found) == (gpu.compute_capability == (9, 0))


def test_more_batch_dimensions_than_a_box_has_are_left_to_other_kernels():
    three = product_of("bf16", 64, 64, 64, (2, 3, 4))
    four = product_of("bf16", 64, 64, 64, (2, 3, 4, 5))
    assert list(candidates(three, H100))
    assert not list(candidates(four, H100))


def test_operands_that_no_launch_can_pack_are_left_to_other_kernels():
    fits = product_of("int8", 2**29, 8, 3, (3,))
    too_many_rows = product_of("int8", 2**29, 8, 3, (4,))
    assert list(candidates(fits, H100))
    assert not list(candidates(too_many_rows, H100))
    found = matmul.candidates(too_many_rows, H100)
    assert found
    assert all(isinstance(choice, MmaCandidate) for choice in found)


@pytest.mark.parametrize("sm_count", [1, 2, 7, 132])
@pytest.mark.parametrize("size", [64, 4096])
def test_plans_for_any_number_of_sms(sm_count, size):
    gpu = dataclasses.replace(H100, sm_count=sm_count)
    for choice in candidates(product_of("bf16", size, size, size), gpu):
        launch = main_launch(plan_of(choice, gpu))
        assert 1 <= launch.grid[0] <= sm_count
        assert choice.splits <= max(sm_count, 12)


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
    assert launch.cluster == (instance.cluster, 1, 1)
    assert launch.grid[0] // instance.cluster <= shape["work_tiles"]
    assert launch.block == (instance.threads, 1, 1)
    assert launch.shared_memory_bytes == instance.shared_memory_bytes

    assert (shape["m"], shape["n"]) == (m, n)
    assert shape["batches"] == math.prod(g.batch) == math.prod(shape["batch"])
    tiles_m = -(-m // (instance.block_m * instance.cluster)) * instance.cluster
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


@given(cases(large))
def test_large_products_have_as_many_work_tiles_as_they_need(case):
    _, choice = case
    plan = plan_of(choice)
    shape, instance = shape_of(plan), choice.instance
    m, n = sides(choice)
    height = instance.block_m * instance.cluster
    assert (shape["tiles_m"] - 1) * height < m <= shape["tiles_m"] * height
    assert (shape["tiles_n"] - 1) * instance.block_n < n <= shape["tiles_n"] * instance.block_n
    tiles = shape["tiles_m"] * shape["tiles_n"]
    assert shape["work_tiles"] == choice.splits * shape["batches"] * tiles
    assert shape["work_tiles"] < 2**31
    assert 1 <= shape["raster_height"] <= shape["tiles_m"]
    assert (choice.splits - 1) * shape["split_k_tiles"] < shape["k_tiles"]
    assert shape["k_tiles"] <= choice.splits * shape["split_k_tiles"]


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
    lines = instance.block_n // instance.cluster
    assert lhs.box_bytes == (instance.block_m if instance.lhs_k_major else instance.block_k) * 128
    assert rhs.box_bytes == (lines if instance.rhs_k_major else instance.block_k) * 128
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


@given(cases(any_geometry))
def test_launches_are_packs_then_the_kernel_then_the_sum(case):
    product, choice = case
    plan = plan_of(choice)
    names = [kernel_of(one.entry.name) for one in plan.launches]
    packs = names.count("pack_operand")
    assert names == [
        *["pack_operand"] * packs,
        "wgmma_matmul",
        *["sum_splits"] * (choice.splits > 1),
    ]
    assert len(plan.workspace_bytes) == packs + (choice.splits > 1)

    # Each workspace is written by one launch and read by a later one.
    lhs, rhs, _, out, _ = main_launch(plan).parameters
    read = {lhs.buffer, rhs.buffer}
    for index, pack in enumerate(plan.launches[:packs]):
        source, target, _ = pack.parameters
        assert source.index in (0, 1)
        assert target == Buffer(3 + index)
        read = {source.index if buffer == target.index else buffer for buffer in read}
    assert read == {0, 1}
    if choice.splits > 1:
        partials, target, _ = plan.launches[-1].parameters
        assert partials == out == Buffer(3 + packs)
        assert target == Buffer(2)
        outputs = math.prod(product.geometry.batch) * product.geometry.m * product.geometry.n
        assert plan.workspace_bytes[-1] == 4 * outputs * choice.splits
    else:
        assert out == Buffer(2)

    dtypes = (product.lhs_dtype, product.rhs_dtype)
    for buffer, dtype in enumerate(dtypes):
        is_packed = buffer not in (lhs.buffer, rhs.buffer)
        assert plan.alignments[buffer] == (dtype.itemsize if is_packed else 16)
    if choice.splits == 1:
        boxes = choice.instance.tma_store
        assert plan.alignments[2] == (16 if boxes else product.out_dtype.itemsize)
    assert f"{choice.instance.stages} stages" in plan.reason
    assert ("packed first" in plan.reason) == bool(packs)


# -- What the C++ has. -----------------------------------------------------------------------------


def test_every_field_of_the_config_is_given():
    fields = [name for _, name, _ in struct_fields("gemm/sm90/config.cuh", "WgmmaConfig")]
    of_ragged_products = ["dynamic", "ragged", "column_step", "scheduler_bytes"]
    assert ["types", *fields, *of_ragged_products] == [
        field.name for field in dataclasses.fields(WgmmaInstance)
    ]
    instance = next(iter(candidates(product_of("int8", 64, 64, 64), H100))).instance
    name = instance.kernel.name
    assert name.startswith("tilekern::wgmma_matmul<signed char, signed char, int, tilekern::")
    given = re.findall(r"\.(\w+) = (\d+)", name)
    assert given == [(f, str(int(getattr(instance, f)))) for f in fields]


def test_every_field_of_the_shape_is_packed():
    fields = struct_fields("gemm/sm90/config.cuh", "WgmmaShape")
    assert struct.calcsize(f"{layout_of(fields)}0q") == struct.calcsize(SHAPE_LAYOUT)
    plan = plan_of(candidates(product_of("bf16", 64, 64, 64), H100)[0])
    assert list(shape_of(plan)) == [name for _, name, _ in fields]


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


def test_tiles_are_claimed_at_run_time_beside_collectives():
    product = product_of("bf16", 4096, 4096, 4096)
    beside = dataclasses.replace(H100, beside_collectives=True)
    alone, shared = (
        next(c for c in candidates(product, gpu) if c.key == "wgmma 128x256")
        for gpu in (H100, beside)
    )
    assert len(plan_of(alone, H100).launches) == 1
    plan = plan_of(shared, beside)
    assert plan.launches[0].entry.name == "tilekern::clear_claimed_tiles"
    assert "wgmma_matmul_dynamic" in plan.launches[1].entry.name
    assert plan.workspace_bytes == (4,)
    assert plan.launches[1].shared_memory_bytes <= H100.shared_memory_bytes
    # One round of tiles is scheduled by the hardware.
    small = candidates(product_of("bf16", 1024, 1024, 4096), beside)
    assert not any(c.instance.dynamic for c in small if c.key == "wgmma 128x256")

"""Plans for ragged products on Hopper's tensor cores; no GPU needed.

What the kernel does with the bounds that it finds on the device is modelled here: which item is
which tile of which span of rows (``grouped_gemm/sm90/tile_scheduler.cuh``), and what it copies and
multiplies of it.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvrtc_mark import needs_nvrtc
from products import BF16, F32, H100, ragged_product_of, taken
from wgmma_launches import (
    batch_positions,
    offset_bytes,
    plan_of,
    rasterized_tile,
    unpack_groups,
    unpack_shape,
)

from jax_tilekern.plans.gemm.sm90.config import WGMMA_ARITHMETICS
from jax_tilekern.plans.grouped_gemm.sm90.candidates import GROUPED_WGMMA
from jax_tilekern.plans.launch import Buffer

small_sizes = st.one_of(st.integers(1, 40), st.integers(1, 500))
# Elements that an instruction takes of a 128-byte row of k.
STEP_OF_16_BITS = 16


def candidates(product, gpu):
    return taken(GROUPED_WGMMA, product, gpu)


@st.composite
def products(draw, ragged, sizes=small_sizes):
    """A ragged product that the kernel takes: rows begin at whole 16 bytes."""
    arithmetic = draw(
        st.sampled_from(sorted(WGMMA_ARITHMETICS) if ragged == "m" else ["bf16", "f16"])
    )
    how = WGMMA_ARITHMETICS[arithmetic].types
    operands = st.sampled_from(how.operands)
    types = (draw(operands), draw(operands), draw(st.sampled_from(how.results)))
    padding = draw(st.sampled_from([0, 0, 1, 3]))
    unit = 16 // types[0].itemsize

    def row():
        return unit * -(-(draw(sizes) + padding) // unit) - padding

    if ragged == "m":
        rhs_k_major = draw(st.booleans())
        m, n, k = draw(sizes), draw(sizes) if rhs_k_major else row(), row()
    else:
        rhs_k_major = False
        m, n, k = row(), row(), draw(sizes)
    return ragged_product_of(
        arithmetic,
        ragged,
        draw(st.integers(1, 12)),
        m,
        n,
        k,
        batch=draw(st.lists(st.integers(1, 3), max_size=2)),
        types=types,
        lhs_k_major=ragged == "m",
        rhs_k_major=rhs_k_major,
        padding=padding,
    )


@st.composite
def cases(draw, ragged, sizes=small_sizes):
    """A product and one of its candidates."""
    of_product = products(ragged, sizes).map(lambda product: list(candidates(product, H100)))
    # With rows of a single element the ragged dimension may have the unit stride, so there may be
    # none.
    return draw(st.sampled_from(draw(of_product.filter(bool))))


any_case = st.sampled_from("mk").flatmap(cases)


@st.composite
def bounds_of_batch(draw, groups, rows):
    """Where the groups of a batch begin and end."""
    kind = draw(st.sampled_from(["random", "gaps", "all rows", "empty", "one-hot", "single rows"]))
    row = st.integers(0, rows)
    if kind == "empty":
        return [draw(row)] * (groups + 1)
    if kind == "one-hot":
        group = draw(st.integers(0, groups - 1))
        return [0] * (group + 1) + [rows] * (groups - group)
    if kind == "single rows":
        first = draw(row)
        return [min(first + g, rows) for g in range(groups + 1)]
    low, high = {"all rows": (0, rows), "gaps": sorted((draw(row), draw(row)))}.get(kind, (0, rows))
    inner = st.integers(low, high)
    bounds = sorted(draw(st.lists(inner, min_size=groups + 1, max_size=groups + 1)))
    return [0, *bounds[1:-1], rows] if kind == "all rows" else bounds


def bounds_of(data, geometry):
    """Bounds of all batches, as they lie in memory."""
    batches = math.prod(geometry.outer_batch)
    drawn = [data.draw(bounds_of_batch(geometry.groups, geometry.rows)) for _ in range(batches)]
    return np.ravel(drawn).tolist()


def parameters_of(plan):
    """The kernel's parameters, structs by field."""
    lhs, rhs, out_map, out, rhs_step, bounds, taken, shape, groups = launch_of(plan).parameters
    assert (bounds, out, taken) == (Buffer(2), Buffer(3), Buffer(4))
    return lhs, rhs, rhs_step, out_map, unpack_shape(shape), unpack_groups(groups)


def launch_of(plan):
    """The kernel's launch, after that which clears what it counts in, unless there is one round."""
    *clears, launch = plan.launches
    shape = unpack_shape(launch.parameters[7])
    clusters = launch.grid[0] // launch.cluster[0]
    assert len(clears) == (shape["work_tiles"] > clusters)
    for clear in clears:
        assert (clear.grid, clear.block, clear.parameters) == ((1, 1, 1), (1, 1, 1), (Buffer(4),))
    return launch


# -- What the kernel does. -------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    batch: int
    group: int
    begin: int
    end: int

    @property
    def rows(self):
        return self.end - self.begin


@dataclass(frozen=True)
class Item:
    """A tile of a cluster; ``share`` is its lines, or the first of k that are another's."""

    span: Span
    m: int
    n: int
    k: int
    k_tiles: int
    share: int
    batch: dict[str, list[int]]


def spans_of(groups, bounds):
    """``span_at``: all spans, those of no group too."""
    for batch in range(groups["batches"]):
        at, rest = 0, batch
        dims = zip(groups["batch"], groups["bounds_strides"], strict=True)
        for size, stride in reversed(list(dims)):
            at += rest % size * stride
            rest //= size
        edges = [0, *bounds[at : at + groups["groups"] + 1], groups["rows"]]
        for index, (begin, end) in enumerate(itertools.pairwise(edges)):
            group = index - 1 if 0 < index <= groups["groups"] else -1
            yield Span(batch, group, begin, end)


def span_of_tile(first_tiles, spans, tile):
    low, high = 0, spans
    while high - low > 1:
        middle = (low + high) // 2
        if first_tiles[middle] <= tile:
            low = middle
        else:
            high = middle
    return low


def items_of_rows(shape, groups, bounds, config):
    """``GroupedTiles::find``: rows are columns of tiles."""
    spans = list(spans_of(groups, bounds))
    counts = (-(-span.rows // config.block_n) for span in spans)
    first_tiles = [0, *itertools.accumulate(counts)]
    for item in range(first_tiles[-1] * shape["tiles_m"]):
        index = span_of_tile(first_tiles, len(spans), item // shape["tiles_m"])
        span, first = spans[index], first_tiles[index]
        tiles = first_tiles[index + 1] - first
        tile_m, tile_n = rasterized_tile(
            item - first * shape["tiles_m"], shape["tiles_m"], tiles, shape["raster_height"]
        )
        steps = -(-span.rows // config.column_step)
        before = tile_n * (steps // tiles) + min(tile_n, steps % tiles)
        own = steps // tiles + (tile_n < steps % tiles)
        n = span.begin + before * config.column_step
        positions = batch_positions(shape, span.batch * groups["groups"] + max(span.group, 0))
        positions["out_batch"][-1] = 0
        yield Item(
            span,
            m=tile_m * config.cluster * config.block_m,
            n=n,
            k=0,
            k_tiles=shape["k_tiles"] if span.group >= 0 else 0,
            share=min(own * config.column_step, span.end - n),
            batch=positions,
        )


def items_of_k(shape, groups, bounds, config):
    """``GroupedTiles::find``: rows are along k."""
    of_groups = [span for span in spans_of(groups, bounds) if span.group >= 0]
    tiles = shape["tiles_m"] * shape["tiles_n"]
    for item in range(shape["batches"] * tiles):
        stacked = item // tiles
        tile_m, tile_n = rasterized_tile(item % tiles, shape["tiles_m"], shape["tiles_n"],
                                     shape["raster_height"])  # fmt: skip
        span = of_groups[stacked]
        k_tiles = -(-span.rows // config.block_k)
        k = span.end - k_tiles * config.block_k
        yield Item(
            span,
            m=tile_m * config.cluster * config.block_m,
            n=tile_n * config.block_n,
            k=k,
            k_tiles=k_tiles,
            share=span.begin - k,
            batch=batch_positions(shape, stacked),
        )


@given(cases("m"), st.data())
def test_every_row_is_multiplied_once_by_its_groups_matrix(choice, data):
    geometry, config = choice.product.groups, choice.instance
    g = geometry
    *_, shape, groups = parameters_of(plan_of(choice))
    bounds = bounds_of(data, geometry)
    times = np.zeros((groups["batches"], g.n, g.m), int)
    found = 0
    for item in items_of_rows(shape, groups, bounds, config):
        found += 1
        span = item.span
        assert 1 <= item.share <= config.block_n
        assert span.begin <= item.n
        assert item.n + item.share <= span.end
        height = config.cluster * config.block_m
        times[span.batch, item.m : item.m + height, item.n : item.n + item.share] += 1
        # A group's rows have all of k, and rows of no group have none of it.
        assert (item.k, item.k_tiles) == (0, -(-g.k // config.block_k) * (span.group >= 0))
    np.testing.assert_array_equal(times, 1)
    assert found <= choice.max_work_tiles


@given(cases("k"), st.data())
def test_every_output_is_the_sum_over_its_groups_rows(choice, data):
    geometry, config = choice.product.groups, choice.instance
    g = geometry
    *_, shape, groups = parameters_of(plan_of(choice))
    bounds = np.array(bounds_of(data, geometry)).reshape(groups["batches"], -1)
    rows, columns = (g.n, g.m) if choice.swapped else (g.m, g.n)
    times = np.zeros((groups["batches"], geometry.groups, rows, columns), int)
    found = 0
    for item in items_of_k(shape, groups, bounds.ravel().tolist(), config):
        found += 1
        span = item.span
        height = config.cluster * config.block_m
        own = (slice(item.m, item.m + height), slice(item.n, item.n + config.block_n))
        times[span.batch, span.group][own] += 1
        if item.k_tiles == 0:
            assert span.rows == 0
            continue
        # The first k-tile skips MMA k-steps, and then clears rows.
        steps, cleared = divmod(item.share, STEP_OF_16_BITS)
        assert 0 <= steps < config.block_k // STEP_OF_16_BITS
        first = item.k + steps * STEP_OF_16_BITS + cleared
        assert (first, item.k + item.k_tiles * config.block_k) == (span.begin, span.end)
        assert (first, span.end) == tuple(bounds[span.batch, span.group : span.group + 2])
    np.testing.assert_array_equal(times, 1)
    assert found == choice.max_work_tiles


@given(any_case, st.data())
def test_maps_lead_to_the_elements_of_each_group(choice, data):
    product, config = choice.product, choice.instance
    geometry = g = product.groups
    ragged = geometry.ragged
    lhs_map, rhs_map, _, out_map, shape, groups = parameters_of(plan_of(choice))
    items_of = items_of_rows if ragged == "m" else items_of_k
    item = data.draw(
        st.sampled_from(list(items_of(shape, groups, bounds_of(data, geometry), config)))
    )
    batch = np.unravel_index(item.span.batch, g.outer_batch) if g.outer_batch else ()
    batch = (*batch, max(item.span.group, 0))

    sizes = (g.n, g.m) if choice.swapped else (g.m, g.n)
    assert (shape["m"], shape["n"]) == sizes
    lines = item.share if ragged == "m" else config.block_n
    height = config.cluster * config.block_m
    row = data.draw(st.integers(item.m, min(item.m + height, sizes[0]) - 1))
    column = data.draw(st.integers(item.n, min(item.n + lines, sizes[1]) - 1))
    k = data.draw(st.integers(0, g.k - 1))
    i, j = (column, row) if choice.swapped else (row, column)

    # The maps, major orders, MN extents and positions of the kernel's operands, and of the
    # product's.
    first = (lhs_map, config.lhs_k_major, row, sizes[0], item.batch["lhs_batch"])
    second = (rhs_map, config.rhs_k_major, column, sizes[1], item.batch["rhs_batch"])
    of_lhs, of_rhs = (second, first) if choice.swapped else (first, second)
    for buffer, (operand, strides, matrix, itemsize) in enumerate((
        (of_lhs, g.lhs_strides, (i, k), product.lhs_dtype.itemsize),
        (of_rhs, g.rhs_strides, (k, j), product.rhs_dtype.itemsize),
    )):  # fmt: skip
        tensor_map, k_major, line, count, position = operand
        assert tensor_map.buffer == buffer
        assert tensor_map.sizes[:2] == ((g.k, count) if k_major else (count, g.k))
        assert all(p < size for p, size in zip(position, tensor_map.sizes[:1:-1], strict=True))
        got = offset_bytes(tensor_map, (k, line) if k_major else (line, k), position)
        assert got == np.dot((*batch, *matrix), strides) * itemsize

    wanted, itemsize = np.dot((*batch, i, j), g.out_strides), product.out_dtype.itemsize
    inner = (row, column) if config.out_m_major else (column, row)
    position = item.batch["out_batch"]
    at = inner[0] + inner[1] * shape["out_stride"] + np.dot(position, shape["out_batch_strides"])
    assert at == wanted
    if config.tma_store:
        assert out_map.buffer == 3
        assert out_map.sizes[:2] == (sizes if config.out_m_major else sizes[::-1])
        assert offset_bytes(out_map, inner, position) == wanted * itemsize
        if ragged == "m":
            # Runs of 16 bytes of a partial tile's rows, too.
            assert g.n * itemsize % 16 == 0
            assert g.m == 1 or g.out_strides[-2] * itemsize % 16 == 0
    else:
        assert out_map == lhs_map


# -- Candidates. -----------------------------------------------------------------------------------


def name_of(product):
    geometry = product.geometry
    sizes = (geometry.groups, *geometry.outer_batch, geometry.m, geometry.n)
    return f"{product.arithmetic}-{geometry.ragged}-{'x'.join(map(str, sizes))}"


# -- What the C++ has. -----------------------------------------------------------------------------


ROWS_OF_BATCHES = ragged_product_of("bf16", "m", 5, 2000, 520, 328, batch=(2, 3))
WIDE_SUMS = ragged_product_of(
    "bf16", "k", 5, 264, 520, 2000, lhs_k_major=False, types=(BF16, BF16, F32)
)
SINGLE_STORES = ragged_product_of("int8", "m", 5, 2000, 511, 336, rhs_k_major=True)


@needs_nvrtc
@pytest.mark.parametrize("product", [ROWS_OF_BATCHES, WIDE_SUMS, SINGLE_STORES], ids=name_of)
def test_parameters_are_those_of_the_compiled_kernels(product):
    choice = min(candidates(product, H100), key=lambda choice: choice.cycles)
    # Launch compares them.
    launches, fakes = choice.plan(H100).launches, plan_of(choice).launches
    for launch, fake in zip(launches, fakes, strict=True):
        assert launch.entry.parameter_bytes == fake.entry.parameter_bytes
        assert launch.parameters == fake.parameters
        assert launch.entry.spill_bytes == 0

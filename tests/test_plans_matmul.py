"""Plans of matrix products: properties of the choice over random geometries; no GPU needed."""

import dataclasses
import itertools
import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_tilekern.plans.geometry import MatmulGeometry
from jax_tilekern.plans.gpu import KNOWN_GPUS, known_gpu
from jax_tilekern.plans.matmul import (
    ARITHMETICS,
    SMALL,
    SQUARE,
    TALL,
    TINY,
    MatmulChoice,
    NoKernel,
    choose_matmul,
    pack_shape,
    plan_matmul,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
F32, F64, INT8 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int8)
MODERN = [gpu for gpu in KNOWN_GPUS.values() if gpu.compute_capability >= (8, 0)]
H100 = known_gpu("sm_90")


def row_major(m, n, k, batch=(), *, lhs_k_major=True, rhs_k_major=False, padding=0, broadcast=()):
    """Geometry of arrays in row-major order, rows `padding` elements apart."""

    def strides(rows, columns, transposed, broadcast):
        row = (rows if transposed else columns) + padding
        step = row * (columns if transposed else rows)
        outer = []
        for dim, size in reversed(list(enumerate(batch))):
            outer.insert(0, 0 if dim in broadcast else step)
            step *= 1 if dim in broadcast else size
        return (*outer, *((1, row) if transposed else (row, 1)))

    return MatmulGeometry(
        batch=tuple(batch),
        m=m,
        n=n,
        k=k,
        lhs_strides=strides(m, k, not lhs_k_major, broadcast),
        rhs_strides=strides(k, n, rhs_k_major, ()),
        out_strides=strides(m, n, False, ()),
    )


def choose_bf16(geometry, gpu=H100):
    return choose_matmul(geometry, BF16, BF16, BF16, "bf16", gpu)


sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**20), st.sampled_from([64, 128, 4096]))
geometries = st.builds(
    row_major,
    m=sizes,
    n=sizes,
    k=sizes,
    batch=st.lists(st.integers(1, 5), max_size=4),
    lhs_k_major=st.booleans(),
    rhs_k_major=st.booleans(),
    padding=st.sampled_from([0, 0, 1, 4, 8]),
    broadcast=st.sets(st.integers(0, 3)),
)


@st.composite
def products(draw):
    """An arithmetic, types that it takes, a geometry and a GPU that has it."""
    name = draw(st.sampled_from(sorted(ARITHMETICS)))
    how = ARITHMETICS[name]
    operands = st.sampled_from(how.operands)
    gpus = [gpu for gpu in MODERN if gpu.compute_capability >= how.min_capability]
    types = (draw(operands), draw(operands), draw(st.sampled_from(how.results)))
    return draw(geometries), *types, name, draw(st.sampled_from(gpus))


@given(products())
def test_every_product_has_a_kernel_that_fits(product):
    geometry, lhs, _, _, name, gpu = product
    choice = choose_matmul(*product)
    assert isinstance(choice, MatmulChoice)
    instance, tile = choice.instance, choice.instance.tile
    assert tile in ARITHMETICS[name].tiles
    assert instance.shared_memory_bytes <= gpu.shared_memory_bytes
    assert instance.block_k * lhs.itemsize == 128
    assert instance.stages >= 2
    assert tile.threads <= 1024
    tiles_m, tiles_n, batch = choice.grid
    assert (tiles_m - 1) * tile.block_m < geometry.m <= tiles_m * tile.block_m
    assert (tiles_n - 1) * tile.block_n < geometry.n <= tiles_n * tile.block_n
    assert batch == math.prod(geometry.batch)
    assert 1 <= choice.band <= tiles_m


@given(products())
def test_copies_are_aligned_and_whole(product):
    geometry, lhs, rhs, out, *_ = product
    choice = choose_matmul(*product)
    m, n, k = geometry.m, geometry.n, geometry.k
    lhs_is, rhs_is = choice.instance.lhs, choice.instance.rhs
    for operand, dtype, strides, shape, unit in (
        (lhs_is, lhs, geometry.lhs_strides, (m, k), 1 if lhs_is.k_major else 0),
        (rhs_is, rhs, geometry.rhs_strides, (k, n), 0 if rhs_is.k_major else 1),
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
        assert all(step * out.itemsize % 16 == 0 for step in steps)


@given(products())
def test_the_choice_is_a_function_of_the_product(product):
    assert choose_matmul(*product) == choose_matmul(*product)


def unpack(scalars):
    """The fields of ``MatmulShape`` in matmul_shape.cuh."""
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
        "band": values[24],
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
    choice = choose_bf16(geometry)
    fields = unpack(pack_shape(geometry, choice))
    assert fields["lhs_batch_strides"] == (0, 0, 0, 2**40)
    assert fields["rhs_batch_strides"] == (0, 0, 2**41, 0)
    assert fields["out_batch_strides"] == (0, 0, 2**43, 2**42)
    assert (fields["lhs_stride"], fields["rhs_stride"]) == (2**33, 2**34)
    assert fields["out_stride"] == 2**35
    assert fields["batch"] == (1, 1, 3, 2)
    assert fields["sizes"] == (300, 200, 100)
    assert fields["tiles"] == choice.grid[:2]
    assert fields["band"] == choice.band
    assert fields["out_vectors"] == 1


@pytest.mark.parametrize(
    ("size", "strides", "k_major"),
    [
        ((64, 32), (32, 1), True),
        ((64, 32), (1, 64), False),
        ((1, 32), (32, 1), True),
        ((1, 32), (1, 1), True),
        ((1, 32), (1, 7), False),
        ((64, 1), (1, 1), False),
        ((64, 1), (7, 1), True),
        ((64, 1), (1, 64), False),
        ((1, 1), (1, 1), False),
    ],
)
def test_major_order_of_lhs_and_of_its_mirror_image(size, strides, k_major):
    m, k = size
    geometry = MatmulGeometry((), m, 16, k, strides, (16, 1), (16, 1))
    assert choose_bf16(geometry).instance.lhs.k_major == k_major
    mirrored = MatmulGeometry((), 16, m, k, (k, 1), strides[::-1], (m, 1))
    assert choose_bf16(mirrored).instance.rhs.k_major == k_major


def test_strides_of_dimensions_of_size_1_do_not_matter():
    geometry = MatmulGeometry((1, 2), 1, 64, 64, (3, 64, 5, 1), (7, 4096, 64, 1), (9, 64, 11, 1))
    choice = choose_bf16(geometry)
    assert choice.instance.lhs.load_bytes == choice.instance.rhs.load_bytes == 16
    assert choice.out_vectors


def test_loads_narrow_with_the_alignment():
    for columns, load_bytes in ((64, 16), (60, 8), (62, 4), (63, 1)):
        choice = choose_bf16(row_major(64, columns, 64))
        assert choice.instance.rhs.load_bytes == load_bytes
        assert choice.instance.lhs.load_bytes == 16
        assert choice.out_vectors == (load_bytes == 16)
    choice = choose_matmul(row_major(64, 63, 64), F64, F64, F64, "f64", H100)
    assert choice.instance.rhs.load_bytes == 8


def test_large_products_take_large_tiles():
    for size in (4096, 8192):
        assert choose_bf16(row_major(size, size, size)).instance.tile == TALL
    # The same memory traffic in fewer, larger tiles would leave most multiprocessors idle.
    assert choose_bf16(row_major(512, 512, 512)).instance.tile == SMALL
    assert choose_bf16(row_major(16, 16, 16, (16384,))).instance.tile == TINY


def test_shifting_loads_and_second_sums_leave_no_registers_for_the_widest_tile():
    assert choose_bf16(row_major(4095, 4097, 4093)).instance.tile == SQUARE
    choice = choose_matmul(row_major(8192, 8192, 8192), E4M3, E5M2, F32, "fp8", known_gpu("sm_89"))
    assert choice.instance.promote
    assert choice.instance.tile == SQUARE


def test_8_bit_floats_are_widened_where_mma_has_none():
    geometry = row_major(512, 512, 512)
    for gpu in MODERN:
        for arithmetic in ("fp8", "fp8_fast"):
            choice = choose_matmul(geometry, E4M3, E4M3, BF16, arithmetic, gpu)
            if gpu.compute_capability < (8, 9):
                assert choice == NoKernel(
                    f"{arithmetic} takes sm_89 or later, and this is {gpu.arch}"
                )
                continue
            instance = choice.instance
            assert instance.widen == (gpu.compute_capability[0] in (9, 10))
            assert instance.promote == (arithmetic == "fp8" and not instance.widen)


def test_bands_keep_running_blocks_compact():
    choice = choose_bf16(row_major(8192, 8192, 8192))
    tile, running = choice.instance.tile, H100.multiprocessors
    lines = choice.band * tile.block_m + math.ceil(running / choice.band) * tile.block_n
    square = 2 * math.sqrt(running * tile.block_m * tile.block_n)
    assert lines < 1.15 * square


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 32))
def test_banded_order_visits_every_tile_once(tiles_m, tiles_n, band):
    # banded_tile() of tile_order.cuh.
    visited = set()
    for index in range(tiles_m * tiles_n):
        per_band = band * tiles_n
        first = index // per_band * band
        height = min(band, tiles_m - first)
        within = index % per_band
        visited.add((first + within % height, within // height))
    assert visited == set(itertools.product(range(tiles_m), range(tiles_n)))


def test_reason_says_what_was_chosen():
    choice = choose_bf16(row_major(4096, 4096, 4096))
    assert choice.reason == "256x128x64, 3 stages, 512 tiles on 132 multiprocessors"


@pytest.mark.parametrize(
    ("types", "arithmetic", "gpu", "reason"),
    [
        ((BF16, BF16, BF16), "bf16", "sm_75", "bf16 takes sm_80 or later, and this is sm_75"),
        ((E4M3, E5M2, F32), "fp8", "sm_80", "fp8 takes sm_89 or later, and this is sm_80"),
        ((BF16, F32, F32), "bf16", "sm_90", "no bf16 kernel for bfloat16 x float32 -> float32"),
        ((BF16, BF16, F64), "bf16", "sm_90", "no bf16 kernel for bfloat16 x bfloat16 -> float64"),
        ((F32, F32, F32), "bf16_x9", "sm_90", "no kernel computes in bf16_x9"),
    ],
)
def test_says_why_there_is_no_kernel(types, arithmetic, gpu, reason):
    geometry = row_major(64, 64, 64)
    assert choose_matmul(geometry, *types, arithmetic, known_gpu(gpu)) == NoKernel(reason)


def test_grids_and_dimensions_have_limits():
    crowd = row_major(1 << 20, 1 << 20, 8, (1 << 12,))
    assert "more tiles than a grid has blocks" in choose_bf16(crowd).reason
    long = row_major(2**31, 8, 8)
    assert choose_bf16(long) == NoKernel("a dimension has more than 2**31 - 1024 elements")
    # More than 65535 products are one launch.
    assert isinstance(choose_bf16(row_major(16, 16, 16, (1 << 20,))), MatmulChoice)


def test_a_plan_is_one_launch_with_the_alignments_it_relies_on():
    geometry = row_major(96, 80, 62, (3,))
    plan = plan_matmul(geometry, BF16, BF16, F32, "bf16", H100)
    (launch,) = plan.launches
    choice = choose_matmul(geometry, BF16, BF16, F32, "bf16", H100)
    assert plan.alignments == (4, 16, 16)
    assert plan.reason == choice.reason
    assert launch.grid == (math.prod(choice.grid), 1, 1)
    assert launch.shared_memory_bytes == choice.instance.shared_memory_bytes


def test_no_plan_is_compiled_twice():
    # Sizes and strides are run-time parameters, so these share one kernel.
    one = plan_matmul(row_major(64, 64, 64), F32, F32, F32, "f32", H100)
    other = plan_matmul(row_major(60, 32, 68), F32, F32, F32, "f32", H100)
    assert one.cubin == other.cubin
    assert one.launches != other.launches


def test_kernels_are_named_by_their_fields():
    name = choose_bf16(row_major(4096, 4096, 4096)).instance.kernel.name
    assert name.startswith("tilekern::mma_matmul<tilekern::bfloat16, tilekern::bfloat16, ")
    assert ".block_m = 256, .block_n = 128, .block_k = 64, " in name
    assert ".lhs_k_major = 1, .rhs_k_major = 0, " in name


def test_every_field_of_the_config_is_given():
    from jax_tilekern.compiler import cuda_folder

    text = (cuda_folder() / "matmul_shape.cuh").read_text()
    body = text[text.index("struct MatmulConfig {") : text.index("constexpr int threads()")]
    fields = [
        line.split()[1].rstrip(";")
        for line in body.splitlines()
        if line.startswith("  ") and line.endswith(";")
    ]
    name = choose_bf16(row_major(64, 64, 64)).instance.kernel.name
    assert [part.split()[0] for part in name.split("{")[1].split(".")[1:]] == fields


def test_tiles_are_values():
    assert dataclasses.replace(TALL) == TALL
    assert TALL.stage_bytes == 49152

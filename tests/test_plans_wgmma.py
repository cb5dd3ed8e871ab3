"""Plans on Hopper's tensor cores: tensor maps of random geometries, and the kernels' parameters.

``test_emulated_gpu.py`` has the values of random layouts.
"""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from nvrtc_mark import needs_nvrtc
from products import (
    BF16,
    F32,
    H100,
    geometries,
    product_of,
    products,
    ragged_product_of,
    row_major,
    taken,
)
from wgmma_launches import (
    buffers_bytes,
    plan_of,
)

from jax_tilekern.plans.gemm.sm90.candidates import WGMMA
from jax_tilekern.plans.gemm.sm90.config import WGMMA_ARITHMETICS
from jax_tilekern.plans.grouped_gemm.sm90.candidates import GROUPED_WGMMA
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


def buffer_bytes(product, plan):
    """What each buffer of the plan has at least."""
    return buffers_bytes(product, product.geometry) + plan.workspace_bytes


@st.composite
def cases(draw, geometries):
    """A product and one of its candidates."""
    product = draw(products(WGMMA_ARITHMETICS, geometries))
    found = list(candidates(product, H100))
    assume(found)
    return product, draw(st.sampled_from(found))


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
        assert not tensor_map.element_strides
    assert math.prod(lhs.box[1:]) == (
        instance.block_m if instance.lhs_k_major else instance.block_k
    )
    assert math.prod(rhs.box[1:]) == (
        instance.block_n if instance.rhs_k_major else instance.block_k
    )
    if instance.tma_store:
        assert out.buffer == pointer.index
        assert math.prod(out.box) * out.element_bytes <= 8192
    else:
        assert out == lhs


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
@pytest.mark.one_in(2)
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


def name_of(product):
    geometry = product.geometry
    sizes = (geometry.groups, *geometry.outer_batch, geometry.m, geometry.n)
    return f"{product.arithmetic}-{geometry.ragged}-{'x'.join(map(str, sizes))}"


ROWS_OF_BATCHES = ragged_product_of("bf16", "m", 5, 2000, 520, 328, batch=(2, 3))
WIDE_SUMS = ragged_product_of(
    "bf16", "k", 5, 264, 520, 2000, lhs_k_major=False, types=(BF16, BF16, F32)
)
SINGLE_STORES = ragged_product_of("int8", "m", 5, 2000, 511, 336, rhs_k_major=True)


@needs_nvrtc
@pytest.mark.parametrize("product", [ROWS_OF_BATCHES, WIDE_SUMS, SINGLE_STORES], ids=name_of)
@pytest.mark.one_in(3)
def test_parameters_of_grouped_gemms_are_those_of_the_compiled_kernels(product):
    choice = min(taken(GROUPED_WGMMA, product, H100), key=lambda choice: choice.cycles)
    # Launch compares them.
    launches, fakes = choice.plan(H100).launches, plan_of(choice).launches
    for launch, fake in zip(launches, fakes, strict=True):
        assert launch.entry.parameter_bytes == fake.entry.parameter_bytes
        assert launch.parameters == fake.parameters
        assert launch.entry.spill_bytes == 0

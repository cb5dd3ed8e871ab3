"""The choice among all families of kernels for a matrix product; no GPU needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvrtc_mark import needs_nvrtc
from products import (
    BF16,
    E4M3,
    E5M2,
    F32,
    F64,
    H100,
    TYPES,
    geometries,
    product_of,
    row_major,
    taken,
)

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates, plan_matmul
from jax_tilekern.plans.gemm.sm80.candidates import MMA
from jax_tilekern.plans.gemm.sm90.candidates import WGMMA, WgmmaCandidate
from jax_tilekern.plans.gemm.sm90.config import ARITHMETICS
from jax_tilekern.plans.gemm.vector_product import vector_product_candidates
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.tuned import TunedChoices, using


@pytest.fixture(autouse=True)
def untuned():
    """Nothing that was tuned on this machine has a say."""
    with using(TunedChoices(None)):
        yield


sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**16), st.sampled_from([64, 128, 4096]))
wanted_products = st.builds(
    lambda arithmetic, geometry: Product(geometry, *TYPES[arithmetic], arithmetic),
    st.sampled_from(sorted(TYPES)),
    geometries(sizes, most_batch_dims=4),
)


@given(wanted_products)
def test_candidates_are_those_of_all_families_best_first(product):
    found = candidates(product, H100)
    assert sorted(found, key=lambda choice: choice.cycles) == found
    assert len({choice.key for choice in found}) == len(found)
    assert candidates(product, H100) == found
    vectors = vector_product_candidates(product, H100)
    if vectors:
        assert found == vectors
    else:
        for family in (MMA, WGMMA):
            assert all(choice in found for choice in taken(family, product, H100))
    assert all(choice.cycles > 0 for choice in found)


def is_wgmma(choice):
    return isinstance(choice, WgmmaCandidate)


@pytest.mark.parametrize("arithmetic", sorted(ARITHMETICS))
@pytest.mark.parametrize("layout", [{}, {"lhs_k_major": False}, {"rhs_k_major": True}])
def test_large_products_take_the_tensor_cores_of_the_architecture(arithmetic, layout):
    for size in (4096, 8192):
        product = product_of(arithmetic, size, size, size, **layout)
        assert is_wgmma(candidates(product, H100)[0])
        ampere = candidates(product, known_gpu("sm_80"))
        if arithmetic.startswith("fp8"):
            assert isinstance(ampere, NoKernel)
        else:
            assert not is_wgmma(ampere[0])


def test_odd_strides_of_large_products_are_worth_a_pack():
    for product in (
        product_of("bf16", 4096, 4095, 4096),
        product_of("bf16", 4096, 4096, 4095),
        product_of("int8", 4095, 4097, 4093),
    ):
        assert is_wgmma(candidates(product, H100)[0])


@pytest.mark.parametrize("arithmetic", ["f32", "f64"])
def test_arithmetics_without_warpgroup_products_have_other_kernels(arithmetic):
    found = candidates(product_of(arithmetic, 4096, 4096, 4096), H100)
    assert not any(map(is_wgmma, found))
    assert found


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
    product = Product(row_major(64, 64, 64), *types, arithmetic)
    assert candidates(product, known_gpu(gpu)) == NoKernel(reason)
    assert plan_matmul(product, known_gpu(gpu)) == NoKernel(reason)


@pytest.mark.parametrize("side", ["m", "n", "k"])
def test_dimensions_have_limits(side):
    sizes = {"m": 8, "n": 8, "k": 8, side: 2**31}
    product = Product(row_major(**sizes), BF16, BF16, BF16, "bf16")
    assert candidates(product, H100) == NoKernel("a dimension has more than 2**31 - 1024 elements")


@needs_nvrtc
def test_the_plan_is_a_candidates():
    product = product_of("f32", 100, 60, 80)
    plan = plan_matmul(product, H100)
    plans = [candidate.plan(H100) for candidate in candidates(product, H100)]
    own = next(x for x in plans if x.launches == plan.launches)
    assert plan.reason.startswith(f"{own.reason}; predicted ")


@needs_nvrtc
@pytest.mark.parametrize(
    ("product", "names"),
    [
        (product_of("bf16", 4096, 4096, 4096), ["wgmma_matmul"]),
        (product_of("int8", 4095, 4096, 4095), ["pack_operand", "wgmma_matmul"]),
        (product_of("bf16", 4095, 4097, 4093), ["pack_operand", "pack_operand", "wgmma_matmul"]),
        (product_of("tf32", 128, 128, 65536), ["wgmma_matmul", "sum_splits"]),
        (product_of("f64", 512, 512, 512), ["mma_matmul"]),
        (product_of("f64", 256, 256, 256), ["small_matmul"]),
        (product_of("bf16", 256, 256, 256, (2, 2, 2, 2)), ["mma_matmul"]),
    ],
    ids=["large", "odd", "odder", "long", "double", "small", "batches"],
)
def test_launches_are_in_order(product, names):
    plan = plan_matmul(product, H100)
    assert [launch.entry.name.split("<")[0] for launch in plan.launches] == [
        f"tilekern::{name}" for name in names
    ]
    assert f"_matmul {product.arithmetic}" in plan.name

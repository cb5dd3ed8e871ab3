"""The choice among all families of kernels for a matrix product; no GPU needed."""

import pytest
from hypothesis import strategies as st
from products import (
    BF16,
    E4M3,
    E5M2,
    F32,
    F64,
    H100,
    row_major,
)

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates, plan_matmul
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.tuned import TunedChoices, using


@pytest.fixture(autouse=True)
def untuned():
    """Nothing that was tuned on this machine has a say."""
    with using(TunedChoices(None)):
        yield


sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**16), st.sampled_from([64, 128, 4096]))


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

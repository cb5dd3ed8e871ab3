"""What is left to XLA on Hopper: each rule, what lies just outside of it, and other GPUs."""

import numpy as np
import pytest
from products import H100, product_of

from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gemm.xla import (
    left_to_xla,
    small_left_to_xla,
    small_sum_left_to_xla,
    sum_left_to_xla,
)
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.reduction.problem import Reduction

A100 = known_gpu("sm_80")
F32 = np.dtype(np.float32)
K_MAJOR = {"rhs_k_major": True}
NEITHER = {"lhs_k_major": False}


@pytest.mark.parametrize(
    ("words", "left", "ours"),
    [
        ("float64", ("f64", 2048, 2048, 2048), ("f64", 512, 2048, 2048)),
        ("short vectors", ("f32", 1, 1, 10**6, K_MAJOR), ("bf16", 1, 1, 10**6, K_MAJOR)),
        ("a matrix's columns", ("bf16", 1, 14336, 4096), ("bf16", 1, 14336, 4096, K_MAJOR)),
        ("a matrix's columns", ("f32", 1, 8192, 8192), ("f32", 1, 8191, 8191)),
        (
            "batched products",
            ("bf16", 2048, 2048, 128, {"batch": (128,), **K_MAJOR}),
            ("bf16", 512, 512, 512, {"batch": (64,)}),
        ),
        (
            "two transposed operands",
            ("bf16", 4096, 16384, 64, NEITHER),
            ("bf16", 4096, 16384, 16384, NEITHER),
        ),
        ("a small matrix", ("bf16", 32768, 512, 512), ("bf16", 32768, 1024, 1024)),
        ("so few rows", ("bf16", 128, 14336, 4096), ("bf16", 128, 4096, 14336)),
        ("k-major operands", ("fp8_fast", 4096, 4096, 4096, K_MAJOR), ("fp8", 4096, 4096, 4096)),
    ],
)
def test_products(words, left, ours):
    def product(arithmetic, m, n, k, layout=None):
        return product_of(arithmetic, m, n, k, **(layout or {}))

    reason = left_to_xla(product(*left), H100)
    assert reason is not None
    assert words in reason
    assert left_to_xla(product(*ours), H100) is None
    assert left_to_xla(product(*left), A100) is None


@pytest.mark.parametrize(
    ("words", "left", "ours"),
    [
        (
            "so short a k",
            ("tf32", 16, 16, 16, {"batch": (16384,)}),
            ("tf32", 64, 64, 65, {"batch": (16384,)}),
        ),
        ("so few results", ("f16", 40, 73, 7724), ("f16", 128, 128, 65536)),
        # Neither: cuBLAS and Triton take as long.
        ("so short a k", ("bf16", 64, 64, 16), ("bf16", 256, 256, 256)),
    ],
)
def test_small_products(words, left, ours):
    def reason(arithmetic, m, n, k, layout=None):
        product = product_of(arithmetic, m, n, k, **(layout or {}))
        return small_left_to_xla(product, candidates(product, H100)[0].cycles, H100)

    assert words in reason(*left)
    assert reason(*ours) is None
    product = product_of("bf16", 64, 64, 16)
    assert small_left_to_xla(product, 1e9, A100) is None


def test_short_products_with_a_vector():
    def reason(arithmetic, *sizes, batch):
        product = product_of(arithmetic, *sizes, batch=batch)
        return small_left_to_xla(product, 1e4, H100)

    assert "with a vector" in reason("bf16", 1, 512, 128, batch=(16,))
    assert reason("bf16", 1, 512, 128, batch=()) is None
    assert reason("tf32", 1, 512, 128, batch=(16,)) is None
    assert reason("bf16", 1, 4096, 4096, batch=(16,)) is None


def reduction(lines, k, dtype):
    total = np.dtype(np.float32 if np.dtype(dtype).kind == "f" else np.uint32)
    return Reduction((), lines, k, (k, 1), None, (1,), np.dtype(dtype), total, total)


def test_sums():
    assert "totals" in sum_left_to_xla(reduction(1, 10**8, np.float32), H100)
    assert "rows of 64 bytes" in sum_left_to_xla(reduction(4096, 16, np.float32), H100)
    for ours in (reduction(1, 10**9, np.int8), reduction(4096, 4096, np.float32)):
        assert sum_left_to_xla(ours, H100) is None
    assert sum_left_to_xla(reduction(1, 10**8, np.float32), A100) is None


def test_short_sums_over_columns():
    def columns(k, count):
        reduction = Reduction((), count, k, (1, count), None, (1,), F32, F32, F32)
        return small_sum_left_to_xla(reduction, H100)

    assert "columns of 600" in columns(600, 1000)
    assert columns(4096, 1000) is None
    assert columns(600, 100_000) is None

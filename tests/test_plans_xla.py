"""What is left to XLA on Hopper: each rule, what lies just outside of it, and other GPUs."""

import numpy as np
import pytest
from products import H100, product_of

from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gemm.xla import (
    left_to_xla,
    predicted_to_be_xlas,
    small_sum_left_to_xla,
    sum_left_to_xla,
)
from jax_tilekern.plans.gemm.xla_cost import load_costs, xla_microseconds
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.reduction.problem import Reduction

A100 = known_gpu("sm_80")
F32 = np.dtype(np.float32)
K_MAJOR = {"rhs_k_major": True}
NEITHER = {"lhs_k_major": False}
LARGE_FP8 = (512, 18944, 3584, K_MAJOR)


@pytest.mark.parametrize(
    ("words", "left", "ours"),
    [
        ("short vectors", ("bf16", 1, 1, 10**6, K_MAJOR), ("bf16", 1, 1, 10**8, K_MAJOR)),
        ("a matrix's columns", ("bf16", 1, 14336, 4096), ("bf16", 1, 14336, 4096, K_MAJOR)),
        ("a matrix's columns", ("f32", 1, 8192, 8192), ("f32", 1, 8191, 8191)),
        ("float8 products of two k-major", ("fp8_fast", *LARGE_FP8), ("fp8", *LARGE_FP8)),
        ("float8", ("fp8_fast", *LARGE_FP8), ("fp8_fast", 511, 18944, 3584, K_MAJOR)),
        ("float8", ("fp8_fast", *LARGE_FP8), ("fp8_fast", 512, 18940, 3584, K_MAJOR)),
        ("float8", ("fp8_fast", *LARGE_FP8), ("fp8_fast", 512, 18944, 3568, K_MAJOR)),
        ("float8", ("fp8_fast", *LARGE_FP8), ("fp8_fast", 512, 18944, 3592, K_MAJOR)),
        ("float8", ("fp8_fast", *LARGE_FP8), ("fp8_fast", 512, 18944, 3584)),
        ("k-major operands", ("int8", 512, 512, 512, K_MAJOR), ("int8", 512, 511, 512, K_MAJOR)),
        ("k-major operands", ("int8", 512, 512, 512, K_MAJOR), ("int8", 512, 512, 520, K_MAJOR)),
        ("k-major operands", ("int8", 512, 512, 512, K_MAJOR), ("int8", 512, 512, 512)),
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
    ("left", "ours"),
    [
        # Short k, few results, large float64 products, plain float32 of small matrices.
        (
            ("tf32", 16, 16, 16, {"batch": (16384,)}),
            ("tf32", 256, 255, 512, {"batch": (256,)}),
        ),
        (("f16", 40, 73, 7724), ("f16", 128, 128, 65536)),
        (("bf16", 64, 64, 16), ("bf16", 4095, 4095, 4095)),
        (("bf16", 4096, 4096, 4096), ("bf16", 4096, 4096, 4100)),
        (("bf16", 2048, 2048, 128, {"batch": (128,)}), ("bf16", 511, 511, 512, {"batch": (64,)})),
        (("bf16", 4096, 16384, 64, NEITHER), ("tf32", 4096, 4096, 4096, NEITHER)),
        # A long unaligned m of an m-major lhs, and a short one.
        (("f16", 2050, 1024, 4096, NEITHER), ("f16", 2046, 1024, 4096, NEITHER)),
        # A batch whose operands are not k-major, and one matrix.
        (
            ("tf32", 800, 64, 800, {"batch": (64,), **NEITHER}),
            ("tf32", 51200, 64, 800, NEITHER),
        ),
        (("f64", 2048, 2048, 2048), ("int8", 2048, 2048, 2048)),
        (("f32", 300, 300, 16), ("f32", 64, 256, 128)),
        # XLA pads and transposes larger float8 operands.
        (("fp8_fast", 64, 64, 256), ("fp8_fast", 512, 512, 256)),
    ],
)
def test_products_that_are_predicted_to_be_xlas(left, ours):
    def reason(arithmetic, m, n, k, layout=None):
        product = product_of(arithmetic, m, n, k, **(layout or {}))
        return predicted_to_be_xlas(product, candidates(product, H100)[0].cycles, H100)

    assert "predicted to take" in reason(*left)
    assert reason(*ours) is None
    product = product_of("bf16", 64, 64, 16)
    assert predicted_to_be_xlas(product, 1e9, A100) is None


def test_float8_products_over_a_short_k():
    def reason(k, **batch):
        return predicted_to_be_xlas(product_of("fp8_fast", 4096, 4096, k, **batch), 1, H100)

    assert "over 255 elements" in reason(255)
    assert reason(256) is None
    assert reason(255, batch=(2,)) is None


def test_costs_grow_with_sizes():
    """XLA's predicted time does not fall by more than a split's overhead where a size grows."""
    for arithmetic in ("bf16", "tf32", "int8", "fp8", "f32", "f64"):
        sizes = [512, 512, 512]
        for i in range(3):
            larger = [4 * size if i == j else size for j, size in enumerate(sizes)]
            least, most = (
                xla_microseconds(product_of(arithmetic, *x), H100, load_costs())
                for x in (sizes, larger)
            )
            assert least < most < 8 * least


def test_constants_of_costs_are_complete():
    costs = load_costs()
    assert costs.with_values(costs.values()) == costs
    assert all(x > 0 for x in costs.values())


@pytest.mark.parametrize(
    ("words", "left", "ours"),
    [
        # By columns, of one matrix and of a batch.
        ("short products", ("f32", 1, 200, 200), ("f32", 1, 1024, 1024)),
        ("short products", ("tf32", 1, 512, 1024, (16,)), ("tf32", 1, 512, 2048, (16,))),
        ("short products", ("bf16", 1, 512, 512, (16,)), ("bf16", 1, 4096, 4096, (16,))),
        ("vectors of 7 elements", ("f32", 1, 64, 7, (10**6,)), ("f32", 1, 64, 32, (10**6,))),
        ("few columns", ("tf32", 1, 4, 45914), ("tf32", 1, 16, 45914)),
        ("columns of 44", ("f16", 1, 14617, 44), ("f16", 1, 14617, 128)),
        ("columns of 84", ("f32", 1, 2000, 84), ("f32", 1, 54800, 84)),
        # By rows.
        (
            "vectors of 16 elements",
            ("tf32", 1, 4017773, 16, (), K_MAJOR),
            ("tf32", 1, 4017773, 32, (), K_MAJOR),
        ),
        (
            "short products",
            ("bf16", 1, 2048, 2048, (), K_MAJOR),
            ("bf16", 1, 4096, 4096, (), K_MAJOR),
        ),
        (
            "short products",
            ("f64", 1, 2048, 2048, (), K_MAJOR),
            ("f64", 1, 8192, 8192, (), K_MAJOR),
        ),
        (
            "short products",
            ("tf32", 1, 4288, 256, (16,), K_MAJOR),
            ("tf32", 1, 4288, 1024, (16,), K_MAJOR),
        ),
        (
            "rows of 120 elements",
            ("f64", 1, 622880, 120, (), K_MAJOR),
            ("f64", 1, 622880, 128, (), K_MAJOR),
        ),
        (
            "unaligned rows",
            ("bf16", 1, 99994, 289, (), K_MAJOR),
            ("bf16", 1, 99994, 288, (), K_MAJOR),
        ),
        (
            "unaligned rows",
            ("f32", 1, 8193, 8191, (), K_MAJOR),
            ("f32", 1, 8191, 8193, (), K_MAJOR),
        ),
    ],
)
def test_products_with_a_vector(words, left, ours):
    def reason(arithmetic, m, n, k, batch=(), layout=None):
        product = product_of(arithmetic, m, n, k, batch=batch, **(layout or {}))
        return predicted_to_be_xlas(product, 1e4, H100)

    assert words in reason(*left)
    assert reason(*ours) is None


def test_dot_products_of_unaligned_vectors():
    def reason(k):
        return left_to_xla(product_of("tf32", 1, 1, k, batch=(40000,), **K_MAJOR), H100)

    assert "unaligned vectors" in reason(4451)
    assert reason(4452) is None
    # In 16 bits, what is left to XLA is a slower sum in float32.
    assert left_to_xla(product_of("bf16", 1, 1, 4451, batch=(40000,), **K_MAJOR), H100) is None


def reduction(lines, k, dtype):
    total = np.dtype(np.float32 if np.dtype(dtype).kind == "f" else np.uint32)
    return Reduction((), lines, k, (k, 1), None, (1,), np.dtype(dtype), total, total)


def test_sums():
    assert "totals" in sum_left_to_xla(reduction(1, 10**8, np.float32), H100)
    assert "rows of 64 bytes" in sum_left_to_xla(reduction(4096, 16, np.float32), H100)
    assert "totals" in sum_left_to_xla(reduction(1, 10**9, np.int8), H100)
    assert "totals" in sum_left_to_xla(reduction(2, 10**7, np.float32), H100)  # a complex one
    assert sum_left_to_xla(reduction(3, 10**7, np.float32), H100) is None
    assert sum_left_to_xla(reduction(4096, 4096, np.float32), H100) is None
    assert sum_left_to_xla(reduction(1, 10**8, np.float32), A100) is None


def test_short_sums():
    assert "short sums" in small_sum_left_to_xla(reduction(100, 1000, np.float32), H100)
    assert small_sum_left_to_xla(reduction(4096, 4096, np.float32), H100) is None
    assert small_sum_left_to_xla(reduction(100, 1000, np.float32), A100) is None
    assert "short sums" in small_sum_left_to_xla(reduction(1300, 5120, np.float32), H100)
    assert small_sum_left_to_xla(reduction(5000, 5120, np.int8), H100) is None


def test_short_sums_over_columns():
    def columns(k, count):
        reduction = Reduction((), count, k, (1, count), None, (1,), F32, F32, F32)
        return small_sum_left_to_xla(reduction, H100)

    assert "short sums" in columns(4096, 1000)
    assert columns(4096, 9000) is None
    assert "sums of 2 rows" in columns(2, 10**7)
    assert columns(8, 10**7) is None

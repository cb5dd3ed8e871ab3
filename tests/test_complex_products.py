"""Complex products that are computed as real ones: values, layouts, derivatives and the choice."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import on_gpu
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.complex_product import complex_product, verdict_on_gpu
from jax_tilekern.plans.gpu import known_gpu

pytestmark = pytest.mark.usefixtures("highest_precision")
of_a_cpu = pytest.mark.skipif(on_gpu(), reason="a CPU's choices and program")

AS_REAL = "computed as a real product"


def normal(rng, shape, dtype=np.complex64):
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)


def whole(rng, shape, dtype=np.complex64):
    """Small whole numbers, of which all sums are exact."""
    return (rng.integers(-3, 4, shape) + 1j * rng.integers(-3, 4, shape)).astype(dtype)


def is_real(function, *args):
    return jtk.explain(function, *args)[0].reason.startswith(AS_REAL)


def called(function, *args):
    """Types of the operands and the result of the calls of CPU kernels."""
    text = jax.jit(function).lower(*args).as_text()
    return re.findall(r"@jax_tilekern_cpu_matmul.*: \((.*)\) -> (.*)", text)


@of_a_cpu
def test_pairs_are_read_and_written_in_place(rng):
    a, b = whole(rng, (50, 40)), whole(rng, (40, 30))
    ((operands, result),) = called(jtk.matmul, a, b)
    assert operands == "tensor<50x40xcomplex<f32>>, tensor<40x2x30x2xf32>"
    assert result == "tensor<50x30xcomplex<f32>>"
    # A left operand that lies by columns has its pairs across the contracted dimension.
    ((operands, result),) = called(
        lambda a, b: jtk.einsum("km,kn->mn", a, b), a, whole(rng, (50, 9))
    )
    assert "complex" not in operands + result
    # The one of fewer elements is expanded, unless the other has to be copied.
    ((operands, _),) = called(jtk.matmul, a, whole(rng, (40, 60)))
    assert operands.startswith("tensor<50x40xcomplex<f32>>")


@needs_nvrtc
def test_pairs_are_in_place_on_a_gpu(rng):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.complex64) for shape in ((256, 128), (128, 256))]
    with jtk.gpu_target("sm_90"):
        product = functools.partial(jtk.matmul, precision="default")
        lowered = jax.jit(product).trace(*shapes).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    (call,) = re.findall(r"= call @\w+\(.*: \((.*)\) -> (.*)", text)
    assert call == (
        "tensor<256x128xcomplex<f32>>, tensor<256x2x128x2xf32>",
        "tensor<256x256xcomplex<f32>>",
    )


def test_inside_patch(rng):
    a, b = whole(rng, (5, 6)), whole(rng, (6, 4))
    with jtk.patch():
        assert is_real(lambda a, b: a @ b, a, b)
        np.testing.assert_array_equal(jax.jit(lambda a, b: a @ b)(a, b), a @ b)


def test_an_epilogue_follows(rng):
    a, b = whole(rng, (5, 6)), whole(rng, (6, 4))
    got = jtk.matmul(a, b, epilogue=lambda z, c: z * z + c, operands=(b[0],))
    np.testing.assert_array_equal(got, (a @ b) ** 2 + b[0])


def test_result_types_and_precisions(x64, rng):
    a, b = whole(rng, (5, 6)), whole(rng, (6, 4))
    for options in (
        {"precision": "highest"},
        {"precision": (lax.Precision.HIGH, lax.Precision.DEFAULT)},
        # XLA has no complex product of another result type on a GPU.
        *([] if on_gpu() else [{"preferred_element_type": np.complex128}]),
    ):
        got, wanted = jtk.matmul(a, b, **options), jnp.matmul(a, b, **options)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
        # XLA's own, where the result is wider than the operands.
        plain = "preferred_element_type" not in options
        assert is_real(lambda a, b, o=options: jtk.matmul(a, b, **o), a, b) == plain
    np.testing.assert_array_equal(jtk.matmul(a, b.astype(np.complex128)), a @ b)


def test_infinities_and_nan(rng):
    """They are those of products and sums of the parts. XLA has further NaN."""
    a, b = normal(rng, (8, 8)), normal(rng, (8, 8))
    a[1, 2], a[3, 3], b[4, 5] = np.inf, np.nan + 1j, complex(0, -np.inf)
    b[2, 0] = 0
    with np.errstate(invalid="ignore"):
        parts = (a.real @ b.real - a.imag @ b.imag, a.real @ b.imag + a.imag @ b.real)
    got = np.asarray(jtk.matmul(a, b))
    for found, wanted in zip((got.real, got.imag), parts, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    of_xla = np.asarray(jnp.matmul(a, b))
    assert (np.isfinite(of_xla) <= np.isfinite(got)).all()


# The choice.


@of_a_cpu
@pytest.mark.defaults
def test_the_choice_on_a_cpu():
    def chosen(*sizes, dtype=jnp.complex64):
        m, k, n = sizes
        shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (k, n)))
        return is_real(jtk.matmul, *shapes)

    assert chosen(256, 256, 256)
    assert chosen(1024, 32, 1024)
    assert not chosen(8, 8, 8)
    # A vector is read once, and copies cost more than the product.
    assert not chosen(1, 1024, 1024)
    assert not chosen(2, 1024, 1024)
    with jtk.policy("xla"):
        assert not chosen(256, 256, 256)
    with jtk.policy("kernels"):
        assert chosen(8, 8, 8)


@pytest.mark.defaults
@pytest.mark.parametrize(
    ("gpu", "size", "dtype", "arithmetic", "expected"),
    [
        ("sm_90", 4096, np.float32, "tf32", "predicted"),
        ("sm_90", 4096, np.float32, "f32", "predicted"),
        ("sm_90", 512, np.float32, "tf32", "XLA's complex product is as fast"),
        ("sm_90", 4096, np.float32, "f32_emulated", "no times of complex products"),
        ("sm_90", 4096, np.float64, "f64", "no times of complex products"),
        ("sm_80", 4096, np.float32, "tf32", "no times of complex products"),
    ],
)
def test_the_choice_on_a_gpu(gpu, size, dtype, arithmetic, expected):
    product = complex_product(
        Contraction((0, 1), (1, 2), (0, 2)), (size,) * 2, (size,) * 2, np.dtype(dtype), arithmetic,
        k_major=True,
    )  # fmt: skip
    verdict = verdict_on_gpu(product, known_gpu(gpu))
    assert expected in verdict.reason
    assert verdict.is_real == expected.startswith("predicted")


def test_complex_dot_products_are_xlas_on_a_gpu():
    contraction = Contraction((0,), (0,), ())
    product = complex_product(
        contraction, (4096,), (4096,), np.dtype(np.float32), "f32", k_major=True
    )
    with jtk.policy("kernels"):
        verdict = verdict_on_gpu(product, known_gpu("sm_90"))
    assert not verdict.is_real
    assert "dot product" in verdict.reason

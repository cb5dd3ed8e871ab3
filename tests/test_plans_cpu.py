"""What is left to XLA on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tilekern as jtk
from jax_tilekern.plans import cpu
from jax_tilekern.plans.cpu import small_left_to_xla, transpose_left_to_xla
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.transpose.permutation import Permutation

pytestmark = pytest.mark.defaults


@pytest.mark.parametrize(
    ("shape", "axes", "itemsize", "reason"),
    [
        ((1000, 8, 8), (0, 2, 1), 4, "many matrices of 8 by 8"),
        ((1000, 16, 16), (0, 2, 1), 1, "many matrices"),
        ((1000, 8, 16), (0, 2, 1), 4, None),
        ((8, 8), (1, 0), 4, None),  # one matrix
        ((2, 1000, 64), (2, 1, 0), 4, "scattered rows of 2"),
        ((4, 1000, 64), (2, 1, 0), 4, None),
        ((2, 1000, 64), (1, 2, 0), 4, None),  # the result's rows lie one after the other
        ((20, 30, 64), (1, 0, 2), 4, None),  # rows are moved whole
        ((1000, 8, 4, 2), (0, 2, 1, 3), 4, "many matrices of 8 by 4"),  # items of 8 bytes
    ],
)
def test_transposes(shape, axes, itemsize, reason):
    found = transpose_left_to_xla(Permutation.reduced(shape, axes, itemsize))
    assert (found is None) if reason is None else reason in found


def test_results_that_do_not_stay_in_the_cache_are_streamed(monkeypatch):
    monkeypatch.setattr(cpu, "_last_cache_bytes", lambda: 1 << 20)
    for rows, streamed in [(512, False), (513, True)]:
        permutation = Permutation.reduced((rows, 1024), (1, 0), 1)
        assert cpu.is_streamed(permutation) == streamed
    monkeypatch.undo()
    # What the system knows, or less than what any processor with such a cache has.
    assert cpu._last_cache_bytes() >= 1 << 20


def test_transposes_say_why():
    x = jax.ShapeDtypeStruct((1000, 8, 8), np.float32)
    moved = functools.partial(jtk.transpose, axes=(0, 2, 1))
    (choice,) = jtk.explain(moved, x, platform="cpu")
    assert choice.kernel is None
    assert "many matrices" in choice.reason


@pytest.mark.parametrize(
    ("call", "shapes", "kernel"),
    [
        (jtk.transpose, [(64, 95)], None),
        (jtk.transpose, [(64, 96)], "cpu_transpose"),
        (jtk.sum, [(9, 111)], None),
        (jtk.sum, [(10, 100)], "cpu_sum float32"),
        (jtk.add, [(9, 1), (111,)], None),
        (jtk.add, [(10, 1), (100,)], "cpu_add float32"),
    ],
)
def test_few_elements_are_xlas(call, shapes, kernel):
    operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    (choice,) = jtk.explain(call, *operands, platform="cpu")
    assert choice.kernel == kernel
    if kernel is None:
        assert "elements are faster" in choice.reason


@pytest.mark.parametrize(
    ("batch", "m", "n", "k", "dtype", "reason"),
    [
        (9, 1, 1, 127, "float32", "dot products"),
        (9, 1, 1, 128, "float32", None),
        (1, 1, 1, 255, "float32", "with a vector"),  # one product
        (1, 16, 1, 16, "float32", None),
        (9, 19, 1, 10, "float32", "a vector and a matrix"),
        (9, 1, 19, 10, "float64", "a vector and a matrix"),
        (9, 1, 24, 8, "float32", None),
        (9, 1, 12, 10, "bfloat16", "a vector and a matrix"),
        (9, 1, 16, 8, "bfloat16", None),
        (9, 14, 1, 31, "float32", "fewer than 448"),  # of short rows
        (9, 15, 1, 31, "float32", None),
        (9, 6, 1, 32, "float32", None),
        (9, 10, 1, 31, "int8", "fewer than 320"),
        (9, 11, 1, 31, "int8", None),
        (9, 2, 2, 2, "float32", None),  # matrices
    ],
)
def test_small_products_of_a_batch(batch, m, n, k, dtype, reason):
    dense = (m * k, k, 1), (k * n, n, 1), (m * n, n, 1)
    geometry = MatmulGeometry((batch,), m, n, k, *dense)
    found = small_left_to_xla(Product(geometry, *[jnp.dtype(dtype)] * 3, dtype))
    assert (found is None) if reason is None else reason in found


def test_small_products_say_why():
    x = jax.ShapeDtypeStruct((9, 127), np.float32)
    (choice,) = jtk.explain(jax.vmap(jtk.vdot), x, x, platform="cpu")
    assert choice.kernel is None
    assert "batches of dot products" in choice.reason

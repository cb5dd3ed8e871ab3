"""Collapsing labels into a strided product, checked by computing with the strides."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jax_tilekern.plans.contraction import Contraction, Oriented, matmul_geometry
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS


@st.composite
def contractions(draw):
    """Labels in any order in each array, with their sizes."""
    counts = [draw(st.integers(0, 2)) for _ in range(4)]
    labels = iter(range(sum(counts)))
    batch, rows, columns, contracted = ([next(labels) for _ in range(n)] for n in counts)
    sizes = {label: draw(st.integers(1, 4)) for label in range(sum(counts))}
    orders = (draw(st.permutations(batch + extra)) for extra in
              (rows + contracted, columns + contracted, rows + columns))  # fmt: skip
    return Contraction(*map(tuple, orders)), sizes


def computed(geometry, lhs, rhs, size):
    """The product by its definition, over flat arrays and strides."""
    out = np.zeros(size, lhs.dtype)
    for b in np.ndindex(geometry.batch):
        base = [
            sum(i * s for i, s in zip(b, strides, strict=False))
            for strides in (geometry.lhs_strides, geometry.rhs_strides, geometry.out_strides)
        ]
        for i, j, k in np.ndindex(geometry.m, geometry.n, geometry.k):
            left = base[0] + i * geometry.lhs_strides[-2] + k * geometry.lhs_strides[-1]
            right = base[1] + k * geometry.rhs_strides[-2] + j * geometry.rhs_strides[-1]
            out[base[2] + i * geometry.out_strides[-2] + j] += lhs[left] * rhs[right]
    return out


@given(contractions(), st.integers(0, 2**32 - 1))
def test_geometry_computes_the_contraction(case, seed):
    contraction, sizes = case
    rng = np.random.default_rng(seed)
    shapes = [tuple(sizes[x] for x in labels) for labels in (contraction.lhs, contraction.rhs)]
    lhs, rhs = (rng.integers(-9, 10, shape) for shape in shapes)
    oriented = matmul_geometry(contraction, *shapes)
    if isinstance(oriented, str):
        return
    geometry, swapped, _ = oriented
    assert len(geometry.batch) <= MAX_BATCH_DIMS
    assert geometry.out_strides[-1] == 1 or geometry.n == 1
    expected = np.einsum(lhs, contraction.lhs, rhs, contraction.rhs, contraction.out)
    operands = (rhs, lhs) if swapped else (lhs, rhs)
    got = computed(geometry, *(x.ravel() for x in operands), expected.size)
    np.testing.assert_array_equal(got, expected.ravel())


@given(contractions())
def test_mergeable_order_always_has_a_geometry(case):
    contraction, sizes = case
    plain = contraction.mergeable()
    assert sorted(plain.lhs) == sorted(contraction.lhs)
    shapes = [tuple(sizes[x] for x in labels) for labels in (plain.lhs, plain.rhs)]
    oriented = matmul_geometry(plain, *shapes)
    assert isinstance(oriented, Oriented)
    assert len(oriented.geometry.batch) <= 1
    for strides in (oriented.geometry.lhs_strides, oriented.geometry.rhs_strides):
        assert 1 in strides[-2:], "a kernel finds no unit stride"

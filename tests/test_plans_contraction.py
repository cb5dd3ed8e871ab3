"""Labels are collapsed into a strided product, checked by computing with the strides."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ragged import contractions, masked_einsum, random_bounds

from jax_tilekern.plans.contraction import Contraction, Oriented, matmul_geometry
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS
from jax_tilekern.plans.grouped_gemm.problem import MAX_GROUP_BATCH_DIMS


@st.composite
def dense_contractions(draw):
    """Labels in any order in each array, with their sizes."""
    counts = [draw(st.integers(0, 2)) for _ in range(4)]
    labels = iter(range(sum(counts)))
    batch, rows, columns, contracted = ([next(labels) for _ in range(n)] for n in counts)
    sizes = {label: draw(st.integers(1, 4)) for label in range(sum(counts))}
    orders = (draw(st.permutations(batch + extra)) for extra in
              (rows + contracted, columns + contracted, rows + columns))  # fmt: skip
    return Contraction(*map(tuple, orders)), sizes


def computed_densely(geometry, lhs, rhs, size):
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


@given(dense_contractions(), st.integers(0, 2**32 - 1))
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
    got = computed_densely(geometry, *(x.ravel() for x in operands), expected.size)
    np.testing.assert_array_equal(got, expected.ravel())


@given(dense_contractions())
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


def shapes_of(contraction, sizes):
    """Return the shapes of the two operands and of the bounds."""
    lhs, rhs, bounds = (
        tuple(sizes[x] for x in labels)
        for labels in (contraction.lhs, contraction.rhs, contraction.bounds)
    )
    return lhs, rhs, (*bounds[:-1], bounds[-1] + 1)


def computed(geometry, lhs, rhs, bounds, size):
    """The product by its definition, over flat arrays and strides; -99 where nothing is written."""
    out = np.full(size, -99, lhs.dtype)
    m, n, k = (np.arange(extent) for extent in (geometry.m, geometry.n, geometry.k))

    def matrix(array, strides, base, rows, columns):
        return array[base + rows[:, None] * strides[-2] + columns * strides[-1]]

    for b in np.ndindex(geometry.outer_batch):

        def base(strides, group=0, b=b):
            return sum(i * s for i, s in zip((*b, group), strides, strict=False))

        first = sum(i * s for i, s in zip(b, geometry.bounds_strides, strict=True))
        written = base(geometry.out_strides) + m[:, None] * geometry.out_strides[-2] + n
        if geometry.ragged == "m":
            out[written] = 0
        for g in range(geometry.groups):
            rows = np.arange(bounds[first + g], bounds[first + g + 1])
            left = base(geometry.lhs_strides, g)
            right = base(geometry.rhs_strides, g)
            written = base(geometry.out_strides, g)
            if geometry.ragged == "m":
                values = matrix(lhs, geometry.lhs_strides, left, rows, k) @ matrix(
                    rhs, geometry.rhs_strides, right, k, n
                )
                out[written + rows[:, None] * geometry.out_strides[-2] + n] = values
            else:
                values = matrix(lhs, geometry.lhs_strides, left, m, rows) @ matrix(
                    rhs, geometry.rhs_strides, right, rows, n
                )
                out[written + m[:, None] * geometry.out_strides[-2] + n] = values
    return out


def in_the_primitives_form(contraction):
    """Labels of one operand alone, or of the bounds, are the output's too."""
    operands = {*contraction.lhs} & {*contraction.rhs}
    kept = (*contraction.out, contraction.group)
    if contraction.ragged_dimension == "m":
        return {*contraction.bounds} <= {*kept}
    return all(x in kept or x in operands for x in contraction.bounds)


@given(contractions(), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_geometry_computes_the_grouped_contraction(case, reordered, seed):
    contraction, sizes = case
    assume(in_the_primitives_form(contraction))
    if reordered and not (contraction.ragged_dimension == "k" and contraction.contracted):
        contraction = contraction.mergeable()
    rng = np.random.default_rng(seed)
    shapes = shapes_of(contraction, sizes)
    lhs, rhs = (rng.integers(-9, 10, shape) for shape in shapes[:2])
    bounds = random_bounds(rng, contraction, sizes)
    oriented = matmul_geometry(contraction, *shapes)
    if isinstance(oriented, str):
        return
    geometry, swapped, _ = oriented
    assert len(geometry.outer_batch) == len(geometry.bounds_strides) <= MAX_GROUP_BATCH_DIMS
    assert geometry.groups == sizes[contraction.group]
    assert geometry.rows == sizes[contraction.ragged]
    assert geometry.out_strides[-1] == 1
    group = len(geometry.outer_batch)
    without = (
        geometry.lhs_strides,
        geometry.out_strides if geometry.ragged == "m" else geometry.rhs_strides,
    )
    assert all(strides[group] == 0 for strides in without)
    expected = masked_einsum(contraction, lhs, rhs, bounds)
    operands = (rhs, lhs) if swapped else (lhs, rhs)
    got = computed(geometry, *(x.ravel() for x in (*operands, bounds)), expected.size)
    np.testing.assert_array_equal(got, expected.ravel())


@given(contractions())
@settings(max_examples=100)
def test_mergeable_order_of_groups_has_a_geometry(case):
    contraction, sizes = case
    assume(in_the_primitives_form(contraction))
    assume(not (contraction.ragged_dimension == "k" and contraction.contracted))
    plain = contraction.mergeable()
    assert plain.mergeable() == plain
    for ours, theirs in ((plain.lhs, contraction.lhs), (plain.rhs, contraction.rhs),
                         (plain.out, contraction.out)):  # fmt: skip
        assert sorted(ours) == sorted(theirs)
    oriented = matmul_geometry(plain, *shapes_of(plain, sizes))
    if isinstance(oriented, str):
        # Only with batch dimensions in lhs, in rhs, in both and in neither.
        assert "4 separate batch dimensions" in oriented
        return
    product = oriented.geometry
    assert product.without_unit_stride is None


def test_too_many_batch_dimensions():
    """Four that do not merge, because the groups are the same along every other one."""
    batch = (4, 5, 6, 7)
    contraction = Contraction((*batch, 0, 2), (*batch, 1, 2, 3), (*batch, 0, 3), (4, 6, 1), 0, 1)
    sizes = dict.fromkeys(range(8), 3)
    assert "4 separate" in matmul_geometry(contraction, *shapes_of(contraction, sizes))
    plain = contraction.mergeable()
    assert isinstance(matmul_geometry(plain, *shapes_of(plain, sizes)), Oriented)

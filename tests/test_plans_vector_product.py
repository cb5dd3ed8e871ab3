"""Candidates for products with a vector, without a GPU."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from products import F32, H100, TYPES, geometries

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.vector_product import SUM_DTYPES, vector_product_candidates
from jax_tilekern.plans.reduction.passes import reduction_passes
from jax_tilekern.plans.reduction.problem import Reduction
from jax_tilekern.plans.reduction.row_sums import RowPass

sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**16))
vectors = st.builds(
    lambda arithmetic, geometry: Product(geometry, *TYPES[arithmetic], arithmetic),
    st.sampled_from(sorted(set(TYPES) & set(SUM_DTYPES))),
    geometries(sizes, most_batch_dims=4),
)


def one_vector(product, side):
    """The product of a vector and a matrix that lies as it did."""
    geometry = product.geometry
    return dataclasses.replace(product, geometry=dataclasses.replace(geometry, **{side: 1}))


@given(vectors, st.sampled_from("mn"))
def test_every_pass_stays_inside_the_operands(product, side):
    geometry = (product := one_vector(product, side)).geometry
    for candidate in vector_product_candidates(product, H100):
        first = candidate.passes[0]
        reduction = first.reduction
        assert reduction.outputs * reduction.k == geometry.m * geometry.n * geometry.k
        assert first.splits * first.split_k >= reduction.k
        assert (first.splits - 1) * first.split_k < reduction.k
        assert first.blocks < 2**31
        # What a load must be a multiple of, every row is.
        for stride in (*reduction.lhs_strides[:-2], *(reduction.rhs_strides or ())[:-1]):
            if isinstance(first, RowPass):
                assert stride * product.lhs_dtype.itemsize % first.vector_bytes == 0
        for later in candidate.passes[1:]:
            assert later.reduction.rhs_strides is None
        if product.arithmetic == "int8":
            assert {p.reduction.sum_dtype.name for p in candidate.passes} == {"uint32"}


def elements_read(reduction):
    """Offsets into ``lhs`` of each sum, by the offset into ``out``."""
    sums = {}
    sizes = (*reduction.batch, reduction.outputs, reduction.k)
    for index in itertools.product(*map(range, sizes)):
        at = sum(i * s for i, s in zip(index, reduction.lhs_strides, strict=True))
        to = sum(i * s for i, s in zip(index, reduction.out_strides, strict=False))
        sums.setdefault(to, []).append(at)
    return sums


def elements_summed(passes):
    """What each element of the result is the sum of, by following partial sums."""
    known = None
    for step in passes.passes:
        read = elements_read(step.reduction)
        result = {}
        for to, elements in read.items():
            parts = [elements[i : i + step.split_k] for i in range(0, len(elements), step.split_k)]
            parts = parts if step.splits > 1 else [elements]
            assert len(parts) == step.splits
            for i, part in enumerate(parts):
                whole = part if known is None else [x for e in part for x in known[e]]
                assert to + i * step.split_stride not in result
                result[to + i * step.split_stride] = whole
        known = result
    return known


@pytest.mark.parametrize(
    ("batch", "outputs", "k", "k_major"),
    [((), 1, 70000, True), ((), 5, 9000, True), ((), 8, 9000, False), ((2, 3), 4, 3000, False)],
)
def test_every_element_is_added_once(batch, outputs, k, k_major):
    numbers = np.arange(math.prod(batch) * outputs * k)
    strides = [stride // 8 for stride in np.empty((*batch, outputs, k)).strides]
    if not k_major:
        strides[-2:] = 1, outputs
    out = [stride // 8 for stride in np.empty((*batch, outputs)).strides]
    expected = np.lib.stride_tricks.as_strided(
        numbers, (*batch, outputs, k), [8 * stride for stride in strides]
    ).reshape(-1, k)
    reduction = Reduction(
        batch, outputs, k, tuple(strides), (*(0 for _ in batch), 1), tuple(out), F32, F32, F32
    )
    counts = set()
    for passes in reduction_passes(reduction, H100):
        summed = elements_summed(passes)
        counts.add(len(passes.passes))
        assert sorted(summed) == list(range(len(expected)))
        for i, elements in summed.items():
            assert sorted(elements) == sorted(expected[i])
    assert max(counts) > 1

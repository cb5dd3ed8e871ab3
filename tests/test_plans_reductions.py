"""Plans for sums and for products with a vector."""

import dataclasses
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from products import BF16, F16, F32, F64, H100, TYPES, geometries

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.vector_product import SUM_DTYPES, vector_product_candidate
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.reduction.passes import reduction_candidate
from jax_tilekern.plans.reduction.problem import Reduction, SummedDims
from jax_tilekern.plans.reduction.select import sum_candidate, sum_dtype

U32, U64 = np.dtype(np.uint32), np.dtype(np.uint64)


def found(shape, axes, dtype=F32, gpu=H100):
    candidate = sum_candidate(SummedDims.of(shape, axes), dtype, dtype, gpu)
    assert not isinstance(candidate, NoKernel), candidate
    return candidate


@pytest.mark.parametrize(
    ("shape", "axes", "sizes", "reduced"),
    [
        ((6,), (0,), (6,), (True,)),
        ((2, 3), (0, 1), (6,), (True,)),
        ((2, 3), (1,), (2, 3), (False, True)),
        ((2, 1, 3, 4), (0, 1), (2, 12), (True, False)),
        ((2, 1, 3, 4), (0, 2), (6, 4), (True, False)),
        ((2, 3, 4, 5), (1, 2), (2, 12, 5), (False, True, False)),
        ((2, 3, 4, 5), (0, 2), (2, 3, 4, 5), (True, False, True, False)),
        ((1, 1), (0,), (), ()),
    ],
)
def test_neighbours_that_share_their_fate_are_one(shape, axes, sizes, reduced):
    assert SummedDims.of(shape, axes) == (sizes, reduced)


@pytest.mark.parametrize(
    ("dtype", "out", "expected"),
    [
        (F32, F32, F32), (BF16, BF16, F32), (F16, F32, F32), (F32, F64, F64), (F64, F64, F64),
        (F64, F32, None), (np.int8, np.int32, U32), (np.int8, np.int64, U64),
        (np.bool_, np.int32, U32), (np.uint16, np.uint64, U64), (np.int64, np.int8, U32),
        (np.int32, np.float32, None), (np.complex64, np.complex64, F32),
        (np.complex64, np.complex128, None), (np.complex128, np.complex128, F64),
        (ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2, None), (ml_dtypes.int4, np.int32, None),
    ],
)  # fmt: skip
def test_sums_are_made_in(dtype, out, expected):
    assert sum_dtype(np.dtype(dtype), np.dtype(out)) == expected


def elements_read(reduction):
    """Offsets into ``lhs`` of each sum, by the offset into ``out``."""
    sums = {}
    sizes = (*reduction.batch, reduction.outputs, reduction.k)
    for index in itertools.product(*map(range, sizes)):
        at = sum(i * s for i, s in zip(index, reduction.lhs_strides, strict=True))
        to = sum(i * s for i, s in zip(index, reduction.out_strides, strict=False))
        sums.setdefault(to, []).append(at)
    return sums


@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 5))
def test_every_element_of_a_sum_is_added_once(batch, k, columns):
    numbers = np.arange(batch * k * columns).reshape(batch, k, columns)
    expected = numbers.transpose(0, 2, 1).reshape(-1, k)
    (step,) = found((batch, k, columns), (1,)).passes
    summed = elements_read(step)
    assert sorted(summed) == list(range(len(expected)))
    for i, elements in summed.items():
        assert sorted(elements) == sorted(expected[i])


def test_separate_dimensions_are_xlas():
    dims = SummedDims.of((4, 5, 6), (0, 2))
    assert "several separate dimensions" in sum_candidate(dims, F32, F32, H100).reason


def test_parts_of_complex_numbers_are_columns():
    (step,) = found((50, 7), (1,), np.dtype(np.complex64)).passes
    assert (step.outputs, step.k, step.dtype) == (2, 7, F32)


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
    candidate = vector_product_candidate(product, H100)
    if candidate is None:
        return
    first, *rest = candidate.passes
    assert first.outputs * first.k == geometry.m * geometry.n * geometry.k
    assert first.chunks * first.chunk_k >= first.k
    assert (first.chunks - 1) * first.chunk_k < first.k
    assert first.ctas < 2**31
    # Loads are vectors of adjacent elements, and every distance between them is a multiple.
    *batch, output, k = first.lhs_strides
    if first.columns and first.vector > 1:
        assert output == 1
        steps = (*batch, first.outputs, k if first.k > 1 else 0)
        assert not any(step % first.vector for step in steps)
    if not first.columns:
        assert k == first.rhs_strides[-1] == 1
        steps = (*batch, *first.rhs_strides[:-1], output * (first.outputs > 1), first.k)
        assert not any(step % first.vector for step in (*steps, first.chunk_k))
    for later in rest:
        assert later.rhs_strides is None
        assert later.k == first.chunks
    if product.arithmetic == "int8":
        assert {step.sum_dtype.name for step in candidate.passes} == {"uint32"}


def elements_summed(passes):
    """What each element of the result is the sum of, by following partial sums."""
    known = None
    for step in passes:
        result = {}
        for to, elements in elements_read(step).items():
            parts = [elements[i : i + step.chunk_k] for i in range(0, len(elements), step.chunk_k)]
            assert len(parts) == step.chunks
            for i, part in enumerate(parts):
                whole = part if known is None else [x for e in part for x in known[e]]
                assert to + i * step.results not in result
                result[to + i * step.results] = whole
        known = result
    return known


@pytest.mark.parametrize(
    ("batch", "outputs", "k", "k_major"),
    [
        ((), 1, 70000, True), ((), 5, 9000, True), ((), 8, 9000, False), ((2, 3), 4, 3000, False),
        ((3,), 1, 20000, True), ((), 700, 30, True),
    ],
)  # fmt: skip
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
    passes = reduction_candidate(reduction, H100, "sums").passes
    assert len(passes) == (2 if math.prod(batch) * outputs < 700 else 1)
    summed = elements_summed(passes)
    assert sorted(summed) == list(range(len(expected)))
    for i, elements in summed.items():
        assert sorted(elements) == sorted(expected[i])


def test_loads_that_would_be_scattered():
    """A vector that is no row, and a matrix whose rows lie apart and have their elements apart."""
    rows = Reduction((), 64, 64, (64, 1), (2,), (1,), F32, F32, F32)
    apart = Reduction((), 64, 64, (128, 2), (1,), (1,), F32, F32, F32)
    assert reduction_candidate(rows, H100, "sums") is None
    assert reduction_candidate(apart, H100, "sums") is None

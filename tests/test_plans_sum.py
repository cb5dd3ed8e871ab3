"""Plans for sums, without a GPU: which dimensions, types and launches."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from products import H100

from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.reduction.problem import SummedDims
from jax_tilekern.plans.reduction.select import sum_candidate, sum_dtype

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
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
def test_every_element_is_added_once(batch, k, columns):
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

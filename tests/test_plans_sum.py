"""Plans for sums, without a GPU: which dimensions, types and launches."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from products import H100

from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.reduction.column_sums import ColumnPass
from jax_tilekern.plans.reduction.row_sums import RowPass
from jax_tilekern.plans.reduction.select import SummedDims, sum_candidates, sum_dtype

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
U32, U64 = np.dtype(np.uint32), np.dtype(np.uint64)


def found(shape, axes, dtype=F32, gpu=H100):
    candidates = sum_candidates(SummedDims.of(shape, axes), dtype, dtype, gpu)
    assert not isinstance(candidates, NoKernel), candidates
    return [candidate.passes for candidate in candidates]


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


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@given(shapes, st.data())
def test_every_element_is_added_once(shape, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    if all(shape[axis] == 1 for axis in axes):
        return
    numbers = np.arange(math.prod(shape)).reshape(shape)
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    expected = numbers.transpose(*kept, *sorted(axes)).reshape(
        math.prod(shape[axis] for axis in kept), -1
    )
    for passes in found(shape, axes):
        summed = elements_summed(passes)
        assert sorted(summed) == list(range(len(expected)))
        for i, elements in summed.items():
            assert sorted(elements) == sorted(expected[i])


@pytest.mark.parametrize(
    ("shape", "axes"), [((70000,), (0,)), ((5, 9000), (1,)), ((9000, 8), (0,))]
)
def test_splits_cover_k(shape, axes):
    for passes in found(shape, axes):
        summed = elements_summed(passes)
        assert sum(map(len, summed.values())) == math.prod(shape)
        assert len({x for elements in summed.values() for x in elements}) == math.prod(shape)


def test_large_sums_use_every_sm_and_a_small_second_launch():
    for size in (10**6, 10**8, 10**9):
        best = found((size,), (0,))[0]
        first, *rest = best.passes
        assert first.blocks >= H100.sm_count
        assert rest[-1].blocks == 1
        assert best.workspace_bytes[0] == 4 * first.splits
        assert best.workspace_bytes[0] <= 1 << 18


def test_small_sums_are_one_launch():
    for shape, axes in (((1000,), (0,)), ((100, 100), (0,)), ((64, 64), (1,))):
        assert len(found(shape, axes)[0].passes) == 1


def test_the_kernel_follows_from_what_lies_innermost():
    assert isinstance(found((512, 512), (1,))[0].passes[0], RowPass)
    assert isinstance(found((512, 512), (0,))[0].passes[0], ColumnPass)
    assert isinstance(found((8, 512, 512), (1,))[0].passes[0], ColumnPass)


def test_loads_are_as_wide_as_rows_allow():
    for columns, dtype, width in ((64, F32, 16), (62, F32, 8), (63, F32, 4), (63, BF16, 2)):
        assert found((99, columns), (1,), dtype)[0].passes[0].vector_bytes == width
    # The length of a single row does not matter, as its end is taken by elements.
    assert found((1000003,), (0,), BF16)[0].passes[0].vector_bytes == 16


def test_complex_numbers_are_two_columns():
    best = found((1 << 20,), (0,), np.dtype(np.complex64))[0]
    assert isinstance(best.passes[0], ColumnPass)
    assert best.passes[0].reduction.outputs == 2
    assert best.passes[0].vector_bytes == 8


def test_candidates_are_best_first_with_keys_of_their_own():
    for shape, axes in (((1 << 24,), (0,)), ((4096, 4096), (0,)), ((4096, 4096), (1,))):
        candidates = found(shape, axes)
        assert sorted(candidates, key=lambda c: c.cycles) == candidates
        assert len({c.key for c in candidates}) == len(candidates)
        assert found(shape, axes) == candidates


def test_memory_bounds_the_estimate():
    best = found((1 << 28,), (0,))[0]
    microseconds = best.cycles / 1700
    assert 330 < microseconds < 400


@pytest.mark.parametrize(
    ("shape", "axes", "reason"),
    [
        ((2,) * 14, tuple(range(0, 14, 2)), "14 separate dimensions (at most 6)"),
        ((1 << 20, 4, 3), (1,), "a CTA for each of many short sums is slower than XLA's kernel"),
    ],
)
def test_says_why_there_is_no_kernel(shape, axes, reason):
    assert sum_candidates(SummedDims.of(shape, axes), F32, F32, H100) == NoKernel(reason)


def test_every_architecture_has_kernels():
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120"):
        assert found((1 << 20, 64), (0,), gpu=known_gpu(arch))

"""Passes around a matrix product: their plans, the code they compile to, and a model of splitting.

The model is what ``split_float32.cuh`` computes, in NumPy. It shows here that the flag keeps its
promise; ``test_cuda_operand_passes.py`` shows that the kernel computes what it does.
"""

import dataclasses
import itertools
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvrtc_mark import needs_nvrtc
from products import BF16, F16, F32, F64, H100, INT32, batch_strides

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gemm.geometry import MatmulGeometry, StridedOperand
from jax_tilekern.plans.gemm.passes.pack_operand import PackPass
from jax_tilekern.plans.gemm.passes.reduce_splits import SumPass
from jax_tilekern.plans.gemm.passes.split_float32 import DECIDE_KERNEL, SplitPass
from jax_tilekern.plans.launch import Buffer

SUMS = [(F32, F32), (F32, BF16), (F32, F16), (INT32, INT32), (F64, F64)]


def operand(mn, k, batch=(), *, k_major=True, padding=0, broadcast=()):
    """An operand in row-major order, rows `padding` elements apart."""
    row = (k if k_major else mn) + padding
    strides = batch_strides(batch, row * (mn if k_major else k), broadcast)
    steps = (row, 1) if k_major else (1, row)
    return StridedOperand(tuple(batch), mn, k, strides, *steps)


sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**17))
operands = st.builds(
    operand,
    mn=sizes,
    k=sizes,
    batch=st.lists(st.integers(1, 5), max_size=4),
    k_major=st.booleans(),
    padding=st.sampled_from([0, 0, 1, 4, 8]),
    broadcast=st.sets(st.integers(0, 3)),
)


@dataclasses.dataclass(frozen=True)
class FakeEntry:
    """Stands in for a compiled kernel, so that launches can be made without a compiler."""

    name: str
    parameter_bytes: tuple[int, ...]
    max_threads: int = 1024


@dataclasses.dataclass(frozen=True)
class FakeCompiled:
    parameter_bytes: tuple[int, ...]

    def entry(self, name):
        return FakeEntry(name, self.parameter_bytes)


ROWS = "5q5I1I"


def launch_of(one, buffers, layout):
    """The launch of a pass and the fields of its struct."""
    widest = struct.calcsize(f"{layout}0q")
    launch = one.launch(
        FakeCompiled((*(8,) * buffers, widest)), *(Buffer(i) for i in range(buffers))
    )
    return launch, struct.unpack_from(layout, launch.parameters[-1].data)


def row_offsets(fields):
    """What ``row_offset`` gives for each row."""
    strides, extents, count = fields[:5], fields[5:10], fields[10]
    assert math.prod(extents) == count
    offsets = np.zeros(1, np.int64)
    for stride, extent in zip(strides, extents, strict=True):
        offsets = (offsets[:, None] + stride * np.arange(extent)).ravel()
    return offsets


def expected_offsets(source, itemsize, *, lines):
    """Byte offsets of the matrices of an operand, or of their lines, in the packed order."""
    dims = [
        (1, 0) if stride == 0 else (size, stride)
        for size, stride in zip(source.batch, source.batch_strides, strict=True)
    ]
    dims += [(source.mn, source.mn_stride)] if lines else []
    offsets = np.zeros(1, np.int64)
    for size, stride in dims:
        offsets = (offsets[:, None] + stride * np.arange(size)).ravel()
    return offsets * itemsize


small = st.builds(
    operand,
    mn=st.integers(1, 9),
    k=st.integers(1, 9),
    batch=st.lists(st.integers(1, 4), max_size=4),
    k_major=st.booleans(),
    padding=st.integers(0, 2),
    broadcast=st.sets(st.integers(0, 3)),
)


@given(small, st.sampled_from([1, 2, 4, 8]))
def test_rows_are_where_the_operand_has_them(source, itemsize):
    _, fields = launch_of(PackPass(source, itemsize), 2, f"{ROWS}q7I")
    expected = expected_offsets(source, itemsize, lines=source.k_major)
    np.testing.assert_array_equal(row_offsets(fields), expected)


def test_what_no_launch_can_hold_is_an_error():
    source = operand(2**30, 8, (4,), k_major=True)
    for one, buffers in ((PackPass(source, 2), 2), (SplitPass(source, H100), 3)):
        assert not one.fits
        with pytest.raises(ValueError, match="4294967296 rows are more than"):
            launch_of(one, buffers, f"{ROWS}q7I")
    for k_major in (True, False):
        blocks = PackPass(operand(2**25, 2**25, k_major=k_major), 8)
        assert not blocks.fits
        with pytest.raises(ValueError, match="exceeds"):
            launch_of(blocks, 2, f"{ROWS}q7I")


outputs = st.tuples(
    st.lists(st.integers(1, 4), max_size=4), st.integers(1, 9), st.integers(1, 20)
).flatmap(
    lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape[0]) + 1)))
)  # fmt: skip


def output(batch, m, n, order=None):
    """Geometry of an output whose batch dimensions and rows lie in an order of their own."""
    extents = [*batch, m]
    strides, step = [0] * len(extents), n
    for dim in reversed(order or range(len(extents))):
        strides[dim] = step
        step *= extents[dim]
    none = (0,) * len(batch)
    return MatmulGeometry(tuple(batch), m, n, 1, (*none, 1, 1), (*none, 1, 1), (*strides, 1))


@given(outputs, st.integers(1, 9), st.sampled_from(SUMS))
def test_sums(shape_and_order, splits, dtypes):
    (batch, m, n), order = shape_and_order
    geometry = output(batch, m, n, order)
    one = SumPass(geometry, splits, *dtypes)
    total = math.prod(batch) * m * n
    assert one.split_stride == total
    assert one.workspace_bytes == splits * total * dtypes[0].itemsize
    launch, fields = launch_of(one, 2, f"{ROWS}2q2I3i")
    columns, split_stride, segments, log2_lanes, packed_splits, *extents = fields[11:]
    assert (split_stride, packed_splits, extents) == (total, splits, [m, n])
    # Every element is in a row of the output, in the partial sums' order.
    expected = np.zeros(1, np.int64)
    for size, stride in zip((*batch, m, n), geometry.out_strides, strict=True):
        expected = (expected[:, None] + stride * np.arange(size)).ravel()
    rows = row_offsets(fields)
    found = (rows[:, None] + np.arange(columns)).ravel()
    np.testing.assert_array_equal(found, expected)
    vector = one.out_alignment // dtypes[1].itemsize
    assert vector in (1, 16 // dtypes[0].itemsize)
    assert vector == 1 or not (np.append(rows, [columns, total]) % vector).any()
    units, lanes = columns // vector, 1 << log2_lanes
    assert segments * lanes >= units > (segments - 1) * lanes
    assert launch.grid[0] // segments * (256 // lanes) >= len(rows)


def kernels():
    """Every instance of the passes."""
    k_majors = [
        operand(64, k, k_major=major)
        for k, major in ((64, 1), (128, 1), (256, 1), (999, 1), (9999, 1), (64, 0))
    ]
    k_majors.append(operand(4096, 64, k_major=False))
    found = [PackPass(one, size).kernel for one in k_majors for size in (1, 2, 4, 8)]
    found += [SplitPass(one, H100).kernel for one in k_majors]
    found += [
        SumPass(output((), 8, n, (0,)), 2, *dtypes).kernel for n in (64, 1) for dtypes in SUMS
    ]
    found += [
        SumPass(MatmulGeometry((), 8, 5, 1, (1, 1), (1, 1), (9, 1)), 2, *dtypes).kernel
        for dtypes in SUMS
    ]
    return list(dict.fromkeys([*found, DECIDE_KERNEL]))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize(
    "kernel", kernels(), ids=lambda kernel: kernel.name.replace("tilekern::", "")
)
@pytest.mark.one_in(8)
def test_compiles(arch, kernel):
    compiled = compile_kernels(kernel, arch=arch)
    entry = compiled.entry(kernel.name)
    assert compiled.log == ""
    assert entry.spill_bytes == entry.stack_bytes == 0
    # Half of an SM's threads, or of its registers, hide the latency of DRAM.
    assert -(-entry.registers // 8) * 8 * entry.max_threads <= 65536


# -- The model


BEYOND_REPAIR = 2**31 - 1


@dataclasses.dataclass
class Split:
    """Pieces ``[..., 2, k]``, and of each line its exponent, lost and dense elements."""

    parts: np.ndarray
    exponents: np.ndarray
    lost: np.ndarray
    dense: np.ndarray


def split(lines):
    """The model of ``split_float32``, of float32 ``[..., k]``."""
    k = lines.shape[-1]
    with np.errstate(all="ignore"):
        magnitude = np.abs(lines)
        largest = np.max(np.where(np.isnan(magnitude), np.inf, magnitude), -1)
        regular = np.isfinite(largest) & (largest > 0)
        # frexp's fraction is in [1/2, 1).
        exponents = np.where(regular, np.frexp(largest)[1] - 15, 0)
        # In the kernel's two steps, each of which rounds what falls below the normal numbers.
        first = np.trunc(-exponents / 2).astype(np.int32)
        scaled = np.ldexp(np.ldexp(lines, first[..., None]), (-exponents - first)[..., None])
        rest, found = scaled.copy(), []
        for _ in range(2):
            found.append(rest.astype(F16).astype(F32))
            rest = rest - found[-1]
        kept = (np.abs(rest) * np.float32(2**22) <= np.abs(scaled)) & ((scaled != 0) | (lines == 0))
        lost = np.where(np.isfinite(largest), (~kept).sum(-1), BEYOND_REPAIR)
        near = magnitude * np.float32(256) >= largest[..., None]
        dense = np.where(largest == 0, k, near.sum(-1))
    return Split(np.stack(found, -2), exponents, lost, dense)


def is_float32_needed(lhs, rhs, k):
    """The model of ``decide_float32``."""
    lost = int(lhs.lost.max()) + int(rhs.lost.max())
    both_dense = int(lhs.dense.min()) + int(rhs.dense.min()) - k
    return not (lost == 0 or (lost < BEYOND_REPAIR and lost <= 2 * both_dense))


def product(lhs, rhs):
    """Products of hi and lo, except lo by lo, with a dimension ``[m, n]`` per operand."""
    pairs = [(0, 0), (0, 1), (1, 0)]
    left, right = lhs.parts.astype(np.float64), rhs.parts.astype(np.float64)
    total = sum(left[:, i] @ right[:, j].T for i, j in pairs)
    return np.ldexp(total, lhs.exponents[:, None] + rhs.exponents[None])


# The factor of 2^-22 sum |a||b|; see gemm/passes/split_float32.cuh.
PROMISE = 4


def error_over_bound(lhs, rhs, got):
    """The worst error of an element, over sum |a||b| 2^-22, beside float32's own underflow."""
    a, b = lhs.astype(np.float64), rhs.astype(np.float64)
    error = np.abs(got - a @ b.T) - a.shape[-1] * 2.0**-149
    bound = 2.0**-22 * (np.abs(a) @ np.abs(b).T)
    return np.max(np.where(error > 0, error / np.where(bound > 0, bound, 2.0**-300), 0))


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def adversaries(rng, k):
    """Pairs of operands ``[lines, k]`` that are hard in some way."""
    m, n = 24, 20
    plain = lambda lines: normal(rng, lines, k)  # noqa: E731
    power = lambda *shape: np.exp2(rng.uniform(-30, 30, shape)).astype(np.float32)  # noqa: E731
    yield "normal", plain(m), plain(n)
    yield "lines scaled", plain(m) * power(m, 1), plain(n) * power(n, 1)
    yield "k scaled", plain(m) * power(1, k), plain(n) / power(1, k)
    yield "k scaled alike", plain(m) * (scale := power(1, k)), plain(n) * scale
    a, b = plain(m), plain(n)
    a[:, k // 2] *= np.float32(2.0**-24)
    b[:, k // 2] *= np.float32(2.0**24)
    yield "tiny column against huge row", a, b
    yield "elements scaled", plain(m) * power(m, k), plain(n) * power(n, k)
    a = plain(m) * (rng.random((m, k)) < 0.02)
    yield "sparse", a.astype(np.float32), plain(n)
    yield "both rectified", np.maximum(plain(m), 0), np.maximum(plain(n), 0)
    yield "one rectified", np.maximum(plain(m), 0), plain(n)
    a, b = plain(m), plain(n)
    a[:, : k // 2] *= np.float32(2.0**-20)
    b[:, k // 2 :] *= np.float32(2.0**-20)
    yield "halves that never meet", a, b
    yield "zeros", np.zeros((m, k), np.float32), plain(n)
    yield "subnormal", plain(m) * np.float32(2.0**-140), plain(n)
    yield "smallest normal", plain(m) * np.float32(2.0**-124), plain(n) * np.float32(2.0**60)
    a = plain(m)
    a[3, 1], a[5, 2] = 3e38, -3.4e38
    yield "near infinity", a, plain(n) * np.float32(1e-3)
    yield "all near infinity", np.float32(3.4e38) * np.sign(a), plain(n) * np.float32(1e-5)
    yield "cancelling", np.concatenate([a[:4], -a[:4]], 1), np.concatenate([b[:4], b[:4]], 1)
    for value in (np.inf, -np.inf, np.nan):
        a = plain(m)
        a[2, 3] = value
        yield str(value), a, plain(n)


@pytest.mark.parametrize("k", [1, 7, 64, 1000])
def test_the_flag_is_set_or_the_promise_is_kept(k):
    flags = {}
    for name, a, b in itertools.chain.from_iterable(
        adversaries(np.random.default_rng(seed), max(k, 4)) for seed in range(3)
    ):
        left, right = split(a), split(b)
        flags[name] = is_float32_needed(left, right, a.shape[-1])
        if not flags[name]:
            assert np.isfinite(left.parts).all()
            assert error_over_bound(a, b, product(left, right)) <= PROMISE, name
    assert flags["inf"]
    assert flags["nan"]
    assert not flags["lines scaled"]
    assert not flags["zeros"]
    assert flags["k scaled alike"] or k < 64

"""The passes around a matrix product on a GPU, bit for bit, into memory that held something else.

Every buffer is bytes, so that any type can lie at any address.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numerics import poison
from nvrtc_mark import require_gpu
from test_plans_operand_passes import (
    SUMS,
    Split,
    adversaries,
    is_float32_needed,
    operand,
    output,
    split,
)

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.interop import ffi
from jax_tilekern.plans.gemm.passes.pack_operand import PackPass
from jax_tilekern.plans.gemm.passes.reduce_splits import SumPass
from jax_tilekern.plans.gemm.passes.split_float32 import DECIDE_KERNEL, SplitPass, decide_launch
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import Buffer, LaunchPlan

require_gpu()

GPU = current_gpu()


def runner(kernels, launches_of, operands, result_bytes):
    """Return a function of arrays of bytes that returns such arrays; `launches_of(compiled)`."""
    compiled = compile_kernels(*kernels, arch=GPU.arch)
    alignments = (1,) * operands + (16,) * len(result_bytes)
    plan = LaunchPlan("passes", GPU, tuple(launches_of(compiled)), alignments)
    primitive = Primitive("passes")
    primitive.multiple_results = True
    results = [jax.core.ShapedArray((size,), np.dtype(np.uint8)) for size in result_bytes]
    primitive.def_abstract_eval(lambda *_: results)
    rule = functools.partial(_emit, plan)
    mlir.register_lowering(primitive, rule, platform="cuda")
    return primitive.bind


def _emit(plan, ctx, *values):
    return ffi.cuda_launch(ctx, values, plan)


def run(kernels, launches_of, arrays, result_bytes):
    bind = runner(kernels, launches_of, len(arrays), result_bytes)
    given = [jnp.asarray(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in arrays]
    for size in result_bytes:
        poison((size,), np.int8)
    return [np.asarray(x) for x in jax.jit(bind)(*given)]


def strided(array, shape, strides):
    step = [stride * array.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(array, shape, step)


def elements_of(source):
    steps = (*source.batch_strides, source.mn_stride, source.k_stride)
    extents = (*source.batch, source.mn, source.k)
    return 1 + sum((n - 1) * step for n, step in zip(extents, steps, strict=True))


def view_of(source, flat):
    steps = (*source.batch_strides, source.mn_stride, source.k_stride)
    return strided(flat, (*source.batch, source.mn, source.k), steps)


# Batch, lines, k, elements between rows, elements before the first, broadcast dimensions.
CASES = [
    ((), 1, 1, 0, 0, ()),
    ((), 128, 256, 0, 0, ()),
    ((), 129, 515, 0, 1, ()),
    ((), 131, 83, 5, 3, ()),
    ((), 3, 9001, 1, 2, ()),
    ((), 5003, 7, 0, 1, ()),
    ((3,), 30, 65, 0, 0, ()),
    ((2, 3), 17, 33, 1, 1, (0,)),
    ((2, 1, 3, 2), 9, 40, 0, 1, (2,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_pack(rng, itemsize, k_major, case):
    batch, lines, k, padding, before, broadcast = case
    source = operand(lines, k, batch, k_major=k_major, padding=padding, broadcast=broadcast)
    one = PackPass(source, itemsize)
    data = rng.integers(1, 256, (before + elements_of(source)) * itemsize, np.uint8)

    def launches(compiled):
        yield one.launch(compiled, Buffer(0, before * itemsize), Buffer(1))

    (got,) = run([one.kernel], launches, [data], [one.workspace_bytes])
    unsigned = f"u{itemsize}"
    expected = np.zeros((*batch, lines, one.k_padded), unsigned)
    expected[..., :k] = view_of(source, data.view(unsigned)[before:])
    np.testing.assert_array_equal(
        strided(got.view(unsigned), expected.shape, one.strides), expected
    )


@pytest.mark.parametrize("k_major", [True, False])
def test_pack_more_than_2_to_the_31_elements(k_major):
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < 14 << 30:
        pytest.skip(f"takes 14 GB of GPU memory, and JAX may use {limit >> 30}")
    lines, k = 65_600, 32_769
    assert lines * k > 2**31
    one = PackPass(operand(lines, k, k_major=k_major), 1)

    def launches(compiled):
        yield one.launch(compiled, Buffer(0), Buffer(1))

    bind = runner([one.kernel], launches, 1, [one.workspace_bytes])

    def matrix(rows, columns, line_dim):
        line = lax.broadcasted_iota(np.uint32, (rows, columns), line_dim)
        step = lax.broadcasted_iota(np.uint32, (rows, columns), 1 - line_dim)
        value = (line * 131 + step * 71 + (line >> 8) * (step & 15)) % 255 + 1
        return jnp.where(step < k, value, 0).astype(np.uint8)

    @jax.jit
    def wrong():
        source = matrix(lines, k, 0) if k_major else matrix(k, lines, 1)
        (packed,) = bind(lax.optimization_barrier(source.reshape(-1)))
        expected = matrix(lines, one.k_padded, 0)
        return (packed.reshape(lines, one.k_padded) != expected).any(1).sum()

    assert wrong() == 0


def numbers(rng, size, style):
    x = rng.standard_normal(size).astype(np.float32)
    if style == "spread":
        x = np.ldexp(x, rng.integers(-30, 30, size))
    elif style == "wide":
        x = np.ldexp(x, rng.integers(-149, 126, size))
    elif style == "large":
        x[::3] = np.finfo(np.float32).max
    elif style == "sparse":
        x = x * (rng.random(size) < 0.1)
    return x.astype(np.float32)


def split_launch(one, source, before, parts, facts):
    return lambda compiled: one.launch(
        compiled, Buffer(source, 4 * before), Buffer(parts), Buffer(facts)
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("k_major", [True, False])
def test_split(rng, k_major, case):
    batch, lines, k, padding, before, broadcast = case
    source = operand(lines, k, batch, k_major=k_major, padding=padding, broadcast=broadcast)
    one = SplitPass(source, GPU)
    for style in ("normal", "spread", "wide", "large", "sparse"):
        data = numbers(rng, before + elements_of(source), style)
        make = split_launch(one, 0, before, 1, 2)
        got, facts = run(
            [one.kernel],
            lambda c, make=make: [make(c)],
            [data],
            [one.parts_bytes, one.facts_bytes],
        )
        expected = split(np.ascontiguousarray(view_of(source, data[before:])))
        padded = np.zeros((*expected.parts.shape[:-1], one.k_padded), np.float32)
        padded[..., :k] = expected.parts
        found = strided(got.view(np.float16), padded.shape, one.strides).astype(np.float32)
        # The same bits: 0 and -0 differ.
        np.testing.assert_array_equal(found.view(np.uint32), padded.view(np.uint32), style)
        arrays = facts.view(np.int32).reshape(3, -1)
        for array, of_model in zip(
            arrays, (expected.exponents, expected.lost, expected.dense), strict=True
        ):
            found = strided(array, of_model.shape, one.fact_strides)
            np.testing.assert_array_equal(found, of_model, style)


def test_the_flag(rng):
    k = 333
    for name, a, b in adversaries(rng, k):
        passes = [
            SplitPass(operand(len(a), a.shape[1]), GPU),
            SplitPass(operand(len(b), b.shape[1], k_major=False), GPU),
        ]
        lhs, rhs = passes

        def launches(compiled, lhs=lhs, rhs=rhs):
            yield split_launch(lhs, 0, 0, 2, 3)(compiled)
            yield split_launch(rhs, 1, 0, 4, 5)(compiled)
            yield decide_launch(compiled, lhs, rhs, Buffer(3), Buffer(5), Buffer(6))

        sizes = [size for one in passes for size in (one.parts_bytes, one.facts_bytes)]
        kernels = [lhs.kernel, rhs.kernel, DECIDE_KERNEL]
        *_, flag = run(kernels, launches, [a, b.T], [*sizes, 4])
        expected = is_float32_needed(split(a), split(b), a.shape[1])
        assert flag.view(np.int32)[0] == expected, name


def test_the_flag_over_many_lines():
    """The one line that decides may be any."""
    lines = 5000
    one = SplitPass(operand(lines, 64), GPU)
    for at in (0, 31, 1024, lines - 1):
        facts = np.zeros((3, lines), np.int32)
        facts[2] = 64
        facts[1, at] = 8

        def launches(compiled):
            yield decide_launch(compiled, one, one, Buffer(0), Buffer(0), Buffer(1))

        for dense, flag in ((35, 1), (36, 0)):
            facts[2, (at + 7) % lines] = dense
            (got,) = run([DECIDE_KERNEL], launches, [facts], [4])
            model = Split(np.zeros(()), *facts)
            assert got.view(np.int32)[0] == is_float32_needed(model, model, 64) == flag


OUTPUTS = [
    ((), 1, 1, None),
    ((), 128, 256, None),
    ((), 77, 131, None),
    ((3,), 40, 20, (1, 0)),
    ((2, 3), 17, 9, (2, 0, 1)),
    ((2, 1, 3, 2), 5, 16, (4, 3, 2, 1, 0)),
    ((), 3000, 1, None),
]


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("shape", OUTPUTS, ids=str)
@pytest.mark.parametrize("dtypes", SUMS, ids=str)
def test_sum(rng, dtypes, shape, splits):
    geometry = output(*shape)
    sum_dtype, out_dtype = dtypes
    one = SumPass(geometry, splits, *dtypes)
    if sum_dtype.kind == "i":
        partials = rng.integers(-(2**31), 2**31, (splits, one.split_stride), np.int32)
    else:
        partials = rng.standard_normal((splits, one.split_stride)).astype(sum_dtype)
    assert one.workspace_bytes == partials.nbytes

    def launches(compiled):
        yield one.launch(compiled, Buffer(0), Buffer(1))

    (got,) = run([one.kernel], launches, [partials], [one.split_stride * out_dtype.itemsize])
    expected = functools.reduce(np.add, partials).astype(out_dtype)
    expected = expected.reshape(*geometry.batch, geometry.m, geometry.n)
    found = strided(got.view(out_dtype), expected.shape, geometry.out_strides)
    unsigned = f"u{out_dtype.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(unsigned), expected.view(unsigned)
    )

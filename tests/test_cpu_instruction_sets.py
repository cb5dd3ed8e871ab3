"""Every instruction set that this CPU has kernels for, and not only the best of them.

An executable looks the instruction set up when it runs, so one compilation serves all of them.
"""

import hashlib
import json
import os
import subprocess
import sys
from functools import partial

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import (
    BF16,
    F8E4,
    F8E5,
    assert_product,
    assert_same_nan_and_inf,
    operands,
    operands_with_nan_and_inf,
    product,
)

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS
from benchmarks.catalog.draw import Draw
from jax_tilekern import _core
from jax_tilekern.plans import cpu

pytestmark = pytest.mark.usefixtures("on_the_cpu")

LEVELS = _core.cpu_instruction_sets()


def check_each_level(check, function, *operands):
    """``check`` what a function of arrays returns under every instruction set."""
    compiled = jax.jit(function).lower(*operands).compile()
    for level in LEVELS:
        _core.set_cpu_instruction_set(level)
        assert _core.cpu_instruction_set() == level
        try:
            check(compiled(*operands))
        except AssertionError as error:
            raise AssertionError(f"{level}: {error}") from error


@pytest.mark.parametrize("name", ["", "sse9", "PORTABLE", "avx2 "])
def test_unknown_level_is_refused(name):
    before = _core.cpu_instruction_set()
    with pytest.raises(ValueError, match="portable"):
        _core.set_cpu_instruction_set(name)
    assert _core.cpu_instruction_set() == before


@pytest.mark.parametrize("calls", [1, pytest.param(6, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [name for name, x in DESCRIPTIONS.items() if not x.on_host])
@pytest.mark.one_in(2)
def test_calls_of_every_operation(rng, name, calls):
    """Calls of any types, layouts and sizes, as ``test_fuzz.py`` draws them."""
    for _ in range(calls):
        draw = Draw(rng)
        call = DESCRIPTIONS[name].draw(draw)
        if fuzz.Outcome(call, "", None, "").known:
            continue
        values = [draw.value(x, special=False) for x in call.operands]
        try:
            jax.eval_shape(partial(call.function, fuzz.ORACLES), *values)
        except (TypeError, ValueError):
            continue  # JAX refuses the types.
        stored = [
            x.transpose(operand.order) for x, operand in zip(values, call.operands, strict=True)
        ]

        def function(*stored, call=call):
            pairs = zip(stored, call.operands, strict=True)
            return call.function(jtk, *(x.transpose(np.argsort(y.order)) for x, y in pairs))

        def check(result, call=call, values=values):
            for error, bound in call.errors(result, *values):
                assert (error <= bound).all(), call

        check_each_level(check, function, *stored)


@pytest.mark.parametrize(
    ("dtype", "n"),
    [
        (np.float32, 19),
        (np.float32, 48),
        (np.float32, 49),
        (np.float32, 127),
        (np.float64, 5),
        (np.float64, 23),
        (np.float64, 64),
        (BF16, 12),
    ],
)
@pytest.mark.one_in(6)
def test_few_columns_along_a_long_k(rng, dtype, n):
    """Such a product is packed in parts of k, and read in place where k has up to 2048 elements."""
    cases = [("mk,kn", 61, 2047), ("mk,kn", 29, 2049), ("mk,kn", 40, 4500), ("mk,nk", 300, 1100)]
    for subscripts, m, k in cases:
        a, b = operands(rng, subscripts, {"m": m, "n": n, "k": k}, dtype, dtype)
        check = partial(assert_product, lhs=a, rhs=b, subscripts=f"{subscripts}->mn")
        check_each_level(check, partial(product, subscripts, out=None), a, b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.float16, F8E5])
def test_nan_and_inf_propagate(rng, dtype):
    out = np.float64 if dtype is np.float64 else np.float32
    for m, n, k in [(17, 33, 65), (1, 64, 128), (70, 3, 96)]:
        a, b, expected = operands_with_nan_and_inf(rng, m, n, k, dtype)
        check = partial(assert_same_nan_and_inf, reference=expected)
        check_each_level(check, partial(product, "mk,kn", out=out), a, b)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (np.float32, np.float32),
        (np.float64, np.float64),
        (BF16, np.float32),
        (np.float16, np.float32),
        (F8E4, np.float32),
        (np.int8, np.int32),
    ],
)
@pytest.mark.parametrize("vectors", [1, 3])
@pytest.mark.one_in(12)
def test_short_rows_do_not_read_the_next_one(rng, dtype, out, vectors):
    """Whatever follows a row in memory, NaN among it, is no part of its sums."""
    for k in (1, 3, 7, 9, 17, 31, 33, 70):
        a, b = operands(rng, "mk,kn", {"m": 45, "n": vectors, "k": k}, dtype, dtype)
        if dtype is not np.int8:
            a = a.at[::2].set(np.nan)

        def check(found, a=a, b=b):
            assert_product(found[1::2], lhs=a[1::2], rhs=b, subscripts="mk,kn->mn")
            assert dtype is np.int8 or np.all(np.isnan(found[::2]))

        check_each_level(check, partial(product, "mk,kn", out=out), a, b)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(np.float32, np.float32), (np.float64, np.float64), (BF16, BF16), (np.int8, np.int32)],
)
@pytest.mark.parametrize("columns", [17, 100])
def test_terms_of_narrow_matrices_are_added_in_parts(rng, dtype, out, columns):
    """Several parts of k, of which the last is shorter, whose accumulators are added."""
    a, b = operands(rng, "mk,kn", {"m": 2, "n": columns, "k": 9001}, dtype, dtype)
    check = partial(assert_product, lhs=a, rhs=b, subscripts="mk,kn->mn")
    check_each_level(check, partial(product, "mk,kn", out=out), a, b)


def test_integers_are_the_same_on_every_level(rng):
    """Extremes of int8, where instructions that saturate or take one unsigned side go wrong."""
    a = jnp.asarray(rng.choice(np.array([-128, 127], np.int8), (37, 1031)))
    b = jnp.asarray(rng.choice(np.array([-128, 127], np.int8), (1031, 41)))
    check = partial(assert_product, lhs=a, rhs=b, subscripts="mk,kn->mn")
    check_each_level(check, partial(product, "mk,kn", out=np.int32), a, b)


@pytest.mark.parametrize("item", [3, 5, 7, 9, 15, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.one_in(3)
def test_runs_of_bytes_are_copied_exactly(rng, item):
    """Runs that start anywhere, of words that overlap and of several vectors."""
    x = rng.integers(0, 256, (13, 7, item), np.uint8)
    check = partial(np.testing.assert_array_equal, np.transpose(x, (1, 0, 2)))
    check_each_level(check, lambda x: jtk.transpose(x, (1, 0, 2)), jnp.asarray(x))


@pytest.mark.parametrize("shape", [(51, 61, 64), (51, 61, 96), (53, 64, 4), (129, 200, 1)])
def test_results_past_the_caches_are_written_exactly(rng, monkeypatch, shape):
    """Runs of bytes, and items of which vectors are transposed."""
    monkeypatch.setattr(cpu, "_last_cache_bytes", lambda: 0)
    x = rng.integers(0, 256, shape, np.uint8)
    check = partial(np.testing.assert_array_equal, np.transpose(x, (1, 0, 2)))
    check_each_level(check, lambda x: jtk.transpose(x, (1, 0, 2)), jnp.asarray(x))


@pytest.mark.parametrize("shape", [(4, 9, 5, 70), (3, 300, 2, 33), (1, 17, 3, 64), (2, 601, 1, 2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_narrow_rows_of_a_result_that_are_next_to_each_other(rng, dtype, shape):
    x = rng.integers(0, 256, shape).astype(dtype)
    axes = (2, 3, 1, 0)
    check = partial(np.testing.assert_array_equal, np.transpose(x, axes))
    check_each_level(check, lambda x: jtk.transpose(x, axes), jnp.asarray(x))


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("rows", [2, 4, 8, 16])
def test_contiguous_columns_of_up_to_16_bytes(rng, dtype, rows):
    x = rng.integers(0, 256, (3, rows, 201)).astype(dtype)
    check = partial(np.testing.assert_array_equal, np.transpose(x, (0, 2, 1)))
    check_each_level(check, lambda x: jtk.transpose(x, (0, 2, 1)), jnp.asarray(x))


def test_sums_of_negative_zeros_are_zero():
    def check(found):
        assert not np.signbit(found).any()

    check_each_level(check, lambda x: jtk.sum(x, 0), jnp.full((2, 1000), -0.0))


# In processes of their own, for XLA makes its pool once: a digest of the products for each level.
_DIGESTS = """
import json
from test_cpu_instruction_sets import digests
print(json.dumps(digests()))
"""


def digests():
    """Digests of products and sums that threads share, under every instruction set."""
    rng = np.random.default_rng(0)
    calls = []
    # Split by columns, by rows of a tall matrix, by chunks of a vector product, and by batches.
    shapes = [((150, 700), (700, 331)), ((3000, 130), (130, 24)), ((2, 900), (900, 1500)),
              ((64, 20, 150), (64, 150, 20))]  # fmt: skip
    for dtype in (np.float32, np.float64, BF16):
        for left, right in shapes:
            calls.append((jtk.matmul, dtype, (left, right)))
        # A sum of all, of long rows and of shorter ones, of columns, of what lies between; a dot
        # product.
        for shape, axis in (((900001,), 0), ((3, 300001), 1), ((999, 901), 1), ((3001, 301), 0),
                            ((3, 999, 99), 1)):  # fmt: skip
            calls.append((partial(jtk.sum, axis=axis), dtype, (shape,)))
        calls.append((jtk.vdot, dtype, ((900001,), (900001,))))
        # Balanced groups, skewed ones, and many of a few rows.
        for sizes in ([120] * 8, [2, 700, 0, 90, 31, 130, 6], [4] * 128):
            ragged = partial(jtk.ragged_dot, group_sizes=np.array(sizes, np.int32))
            calls.append((ragged, dtype, ((2000, 130), (len(sizes), 130, 150))))
        # Few segments, many of wide rows, and one that all threads have a part of.
        for rows, columns, segments, is_sorted in (
            (60001, 9, 6, False), (9001, 301, 8000, False), (20001, 90, 2, True),
        ):  # fmt: skip
            ids = np.arange(rows) * segments // rows if is_sorted else np.arange(rows) % segments
            reduce = partial(
                jtk.segment_sum, segment_ids=ids, num_segments=segments,
                indices_are_sorted=is_sorted,
            )  # fmt: skip
            calls.append((reduce, dtype, ((rows, columns),)))
    found = {}
    for function, dtype, shapes in calls:
        operands = [jnp.asarray(rng.standard_normal(s).astype(dtype)) for s in shapes]
        with jtk.policy("kernels"):
            compiled = jax.jit(function).lower(*operands).compile()
        for level in LEVELS:
            _core.set_cpu_instruction_set(level)
            digest = hashlib.sha256(np.asarray(compiled(*operands)).tobytes()).hexdigest()
            found[f"{level} {np.dtype(dtype)} {shapes}"] = digest
    return found


@pytest.mark.thorough
def test_results_do_not_depend_on_the_number_of_threads():
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGESTS],
            # XLA takes the size of its pool from the first of these that it knows.
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PYTHONPATH": path,
                 "PJRT_NPROC": threads, "NPROC": threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads in ("1", "5")
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    one, several = map(json.loads, outputs)
    assert len(one) == 48 * len(LEVELS)
    assert several == one

"""Kernels of attention for Hopper: their plans, and emulated calls with all first derivatives."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_attention import MODES, RNG, draw, everything, relative_errors
from emulated_gpu import emulated_gpu
from nvrtc_mark import needs_emulator, require_nvrtc
from products import BF16, F16, H100

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop import compat
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.ops.attention import kernel_lowering
from jax_tilekern.ops.attention.index_functions import traced
from jax_tilekern.ops.attention.score_numbers import Sizes, number_of_difference, score_numbers
from jax_tilekern.ops.attention.score_text import score_text
from jax_tilekern.ops.attention.scores import Scores, score_jaxpr
from jax_tilekern.plans.attention import problem as problems
from jax_tilekern.plans.attention import sm90
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.primitives.operation import Fallback

require_nvrtc()

A100 = known_gpu("sm_80")
SLOPES = np.array([0.1, 0.3], np.float32)
DOCUMENTS = np.sort(RNG.integers(0, 4, (2, 400))).astype(np.int32)
TABLE = RNG.standard_normal((2, 32)).astype(np.float32)
CAP = 3.0


def capped(s, *_):
    return CAP * jnp.tanh(s / CAP)


def gate(s, *_):
    return s * (1 + jnp.tanh(s))


def saturated(s, *_):
    return 70 * jnp.tanh(s / 4)


def bounded(s, *_):
    return jnp.tanh(s / 2) * 60


def slopes(s, b, h, q, k):
    return s - jnp.asarray(SLOPES)[h] * (q - k)


def table(s, b, h, q, k):
    return s + jnp.asarray(TABLE)[h, jnp.clip(q - k, 0, 31)]


def bucket(difference):
    """Places in a table: of half as many differences, and then of their logarithms, as T5's."""
    distance = jnp.abs(difference)
    far = 8 + (jnp.log(jnp.maximum(distance, 1) / 8) * 3).astype(np.int32)
    return jnp.where(distance < 8, distance, jnp.minimum(far, 15)) + 16 * (difference < 0)


def distances(s, b, h, q, k):
    """A bias that decreases with the logarithm of the distance, as KERPLE's."""
    return s - jnp.asarray(SLOPES)[h] * jnp.log1p(jnp.abs(k - q))


def documents(b, h, q, k):
    return jnp.asarray(DOCUMENTS)[b, q] == jnp.asarray(DOCUMENTS)[b, k]


def dilated(b, h, q, k):
    return (k <= q) & ((q - k) % (h + 2) == 0)


# Sizes of (batch, queries, keys, heads, key heads, features, value features), type, and options.
CALLS = {
    "plain": ((1, 150, 200, 2, 1, 64, 64), BF16, {}),
    "functions": ((2, 150, 200, 2, 2, 80, 72), F16, {"score_mod": capped, "mask_mod": documents}),
    "causal": ((1, 200, 200, 2, 2, 128, 128), BF16, {"is_causal": True, "score_mod": slopes}),
    "wide": ((1, 150, 200, 2, 1, 192, 128), BF16, {"is_causal": True}),
    "widest": (
        (1, 140, 136, 2, 2, 256, 200), F16,
        {"bias": RNG.standard_normal((1, 2, 140, 136)).astype(F16), "score_mod": capped},
    ),
    "window": ((1, 300, 300, 2, 1, 64, 128), BF16, {"local_window_size": (70, 3)}),
    "lengths": (
        (2, 140, 140, 2, 2, 64, 64), BF16,
        {"key_value_seq_lengths": np.array([70, 0]), "query_seq_lengths": np.array([130, 9])},
    ),
    "bias": (
        (1, 70, 90, 2, 2, 64, 64), BF16,
        {"bias": RNG.standard_normal((1, 2, 70, 90)).astype(np.float32)},
    ),
    "gate": ((1, 140, 200, 2, 1, 64, 64), BF16, {"score_mod": gate, "is_causal": True}),
    "saturated cap": ((1, 100, 140, 1, 1, 64, 64), BF16, {"score_mod": saturated}),
    "bounded": (
        (2, 140, 200, 2, 1, 64, 64), BF16,
        {"score_mod": bounded, "key_value_seq_lengths": np.array([150, 0])},
    ),
    "table": ((2, 150, 200, 2, 1, 64, 64), BF16, {"score_mod": table, "is_causal": True}),
    "distances": ((2, 150, 200, 2, 1, 64, 72), BF16, {"score_mod": distances, "is_causal": True}),
    "staged bias": (
        (2, 150, 200, 2, 1, 64, 72), BF16,
        {"bias": RNG.standard_normal((1, 2, 150, 200)).astype(BF16), "is_causal": True},
    ),
    "staged bias of all heads": (
        (2, 200, 136, 2, 2, 128, 64), F16,
        {"bias": RNG.standard_normal((2, 1, 200, 136)).astype(F16), "score_mod": table},
    ),
}  # fmt: skip
# Calls and modes of the emulator. A CTA of the lengths has queries that see no key.
DEFAULT = {
    ("plain", None),
    ("functions", None),
    ("causal", None),
    ("wide", "late"),
    ("bounded", "late"),
    ("distances", "backwards"),
    ("lengths", "late"),
    ("staged bias", "late"),
    ("staged bias", "held"),
}
CASES = [
    pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.thorough)
    for case in itertools.product(CALLS, (None, *MODES))
]


@pytest.fixture(params=[True, False])
def is_compiled(request, monkeypatch):
    """Whether kernels are compiled; the operations run without them, too."""
    if not request.param:
        monkeypatch.setattr(kernel_lowering, "planned_kernel", lambda *_: Fallback("no compiler"))
    return request.param


def gradients(function, options, m, where_empty=0):
    """The gradients by an array that a score function reads, and by the operands."""

    def of(x, query, key, value, d_out, d_residual):
        def attention(x, query, key, value):
            score_mod = lambda *scalars: function(*scalars, x)  # noqa: E731
            return m.attention(
                query, key, value, score_mod=score_mod, return_residual=True, **options
            )

        (_, residual), back = jax.vjp(attention, x, query, key, value)
        # A query that sees no key has no derivative, whatever this cotangent is.
        cotangent = jnp.where(jnp.isneginf(residual), where_empty, d_residual)
        return back((d_out, cotangent.astype(residual.dtype)))

    return of


def operands_and_cotangents(keys):
    """Two heads of queries on one of keys, and cotangents of the result and of the logsumexp."""
    shapes = (2, 150, 2, 64), (2, keys, 1, 64), (2, keys, 1, 72), (2, 150, 2, 72)
    return *(draw(*x, dtype=BF16) for x in shapes), draw(2, 150, 2, dtype=np.float32)


def emulated_and_exact(ours, exact, operands, sms=2, **mode):
    """The results of a function, those of another in float64, and the kernels that ran."""
    # An SM has several tiles.
    with emulated_gpu(dataclasses.replace(H100, sm_count=sms), **mode) as ran:
        found = jax.tree.map(np.asarray, jax.jit(ours)(*operands))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), operands)
        expected = jax.jit(exact)(*wide)
    return found, expected, {plan.name.split()[0] for plan in ran}


@needs_emulator
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_values_and_derivatives(name, mode):
    (b, t, s, n, k, h, d), dtype, options = CALLS[name]
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, d)
    operands, dots = (tuple(draw(*x, dtype=dtype) for x in shapes) for _ in range(2))
    d_out = draw(b, t, n, d, dtype=dtype)

    def of(m):
        return everything(lambda *x: m.attention(*x, return_residual=True, **options))

    found, expected, names = emulated_and_exact(
        of(jtk), of(ORACLES), (operands, d_out, dots), sms=1, **MODES.get(mode, {})
    )
    assert {"attention", "attention_gradient"} <= names
    assert ("attention_tangent" in names) == (max(h, d) <= 128)
    # Weights, gradients of scores and results are rounded to the type, each by half a unit at most.
    assert max(relative_errors(found, expected)) <= 3 * float(jnp.finfo(dtype).eps) / 2


# Sizes, the shape and type of a bias, a mode, and options. The first tests are of staged tiles.
BIASES = {
    "whole": ((2, 150, 200, 2, 1, 64, 64), (1, 2, 150, 200), BF16, None, {}),
    "of all heads": (
        (2, 150, 200, 2, 1, 64, 64), (1, 1, 150, 200), F16, "late",
        {"is_causal": True, "score_mod": capped},
    ),
    "odd": ((2, 150, 201, 2, 1, 72, 64), (2, 1, 150, 201), BF16, None, {"is_causal": True}),
    "of keys": ((2, 300, 200, 2, 1, 64, 64), (1, 1, 1, 200), np.float32, "late", {}),
    "of keys and heads": (
        (2, 70, 140, 2, 2, 64, 80), (1, 2, 1, 140), BF16, "backwards",
        {"score_mod": capped, "mask_mod": dilated},
    ),
}  # fmt: skip
OTHERS = set(BIASES) - {"whole", "of keys"}


@needs_emulator
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.thorough] if x in OTHERS else []) for x in BIASES],
)
def test_gradient_of_a_bias(name, is_compiled, monkeypatch):
    # Chunks of two tiles, and one of the last.
    monkeypatch.setattr(problems, "_MOST_CHUNKS", 2)
    (b, t, s, n, k, h, d), shape, bias_dtype, mode, options = BIASES[name]
    dtype = F16 if bias_dtype == F16 else BF16
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, d), (b, t, n, d)
    operands = *(draw(*x, dtype=dtype) for x in shapes), draw(*shape, dtype=bias_dtype)

    def of(m):
        def gradient(query, key, value, d_out, bias):
            return jax.vjp(lambda x: m.attention(query, key, value, x, **options), bias)[1](d_out)

        return gradient

    found, expected, names = emulated_and_exact(
        of(jtk), of(ORACLES), operands, **MODES.get(mode, {})
    )
    assert ("attention_bias_gradient" in names) == is_compiled
    # The result of attention, of which the kernel reads a sum, and the gradient are rounded.
    assert found[0].dtype == bias_dtype
    assert max(relative_errors(found, expected)) <= 3 * float(jnp.finfo(dtype).eps) / 2


# Score functions of an array that they read by the batch and the head, and options.
NUMBERS = {
    "slopes": (lambda s, b, h, q, k, x: s - x[h] * (q - k), {"is_causal": True}),
    "a cap": (lambda s, b, h, q, k, x: 9 * x[0] * jnp.tanh(s / (9 * x[0])), {}),
    "several": (
        lambda s, b, h, q, k, x: s * jnp.exp(x)[b] - x[h] ** 2 * jnp.log(1.0 + jnp.abs(q - k)),
        {"key_value_seq_lengths": np.array([70, 0])},
    ),
}


@needs_emulator
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.thorough] * (x == "a cap")) for x in NUMBERS]
)
def test_gradients_by_arrays_of_the_batch_and_heads(name, is_compiled):
    function, options = NUMBERS[name]
    operands = jnp.asarray(SLOPES), *operands_and_cotangents(140)
    found, (of_array, *expected), names = emulated_and_exact(
        gradients(function, options, jtk, jnp.inf), gradients(function, options, ORACLES),
        operands, late=("reads", "writes"),
    )  # fmt: skip
    assert ("attention_gradient" in names) == is_compiled
    # The sums by the array are in float32, of terms that cancel to some hundredths.
    assert max(relative_errors(found[:1], [of_array])) <= 1e-4
    assert max(relative_errors(found[1:], expected)) <= 3 * float(jnp.finfo(BF16).eps) / 2


# Score functions of an array that they read by the difference of query and key, its type, a mode,
# and options.
DIFFERENCES = {
    "table": (
        lambda s, b, h, q, k, x: s + x[h, jnp.clip(q - k, 0, 31)], np.float32, "late",
        {"is_causal": True},
    ),
    "of the batch": (
        lambda s, b, h, q, k, x: s * (1 + jnp.sin(x[b, jnp.abs(k - q) // 8])), np.float32,
        "backwards", {"key_value_seq_lengths": np.array([70, 0]), "local_window_size": (30, 90)},
    ),
    "logarithmic buckets": (
        lambda s, b, h, q, k, x: s + x[h, bucket(q - k)], BF16, "late", {"is_causal": True},
    ),
    "buckets": (
        lambda s, b, h, q, k, x: 20 * jnp.tanh((s + x[1, (q - k) % 20]) / 20), BF16, None, {},
    ),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.thorough] * (x == "buckets")) for x in DIFFERENCES]
)
def test_gradients_by_arrays_of_differences(name, is_compiled, monkeypatch):
    if is_compiled:
        monkeypatch.setattr(kernel_lowering.blocks, "backward", None)
    # Several chunks of differences.
    monkeypatch.setattr("jax_tilekern.ops.attention.score_numbers._MOST_ELEMENTS", 100 * TABLE.size)
    function, table_dtype, mode, options = DIFFERENCES[name]
    operands = jnp.asarray(TABLE, table_dtype), *operands_and_cotangents(240)
    found, expected, names = emulated_and_exact(
        *(gradients(function, options, m) for m in (jtk, ORACLES)), operands, **MODES.get(mode, {})
    )
    assert ("attention_gradient" in names) == is_compiled
    # The result of attention, of which the kernel reads a sum, is rounded.
    assert max(relative_errors(found, expected)) <= 3 * float(jnp.finfo(BF16).eps) / 2


# Score functions, how many numbers they read, and whether by the difference of query and key.
@pytest.mark.parametrize(
    ("function", "covered"),
    [
        (lambda s, x, b, h, q, k: s - x[0, h] * (q - k) + x[b, 0] * jnp.sin(s), (2, False)),
        (lambda s, x, b, h, q, k: s * jnp.tanh(x).sum(), (1, False)),
        (lambda s, x, b, h, q, k: s * (h + 1) - x[0, h] * (q + k), (1, False)),
        (lambda s, x, b, h, q, k: s + x[0, jnp.clip(q - k, 0, 1)], (1, True)),
        (lambda s, x, b, h, q, k: s * x[b, h] + x[0, jnp.abs(k - q) % 2], None),
        (lambda s, x, b, h, q, k: s + x[0, jnp.clip(q - 2 * k, 0, 1)], None),
        (lambda s, x, b, h, q, k: x[b, h], None),
        (lambda s, x, b, h, q, k: x[b, k - q], None),
        (lambda s, x, *_: sum((s**i * x[i // 2, i % 2] ** i for i in range(7)), s), None),
    ],
)
def test_numbers_of_a_score(function, covered):
    x = jnp.ones((4, 2))
    score, arrays = traced(lambda s, *i: function(s, x, *i), "score_mod", np.dtype(np.float32))
    scores = Scores(1.0, score_mod=score)
    found = score_numbers(scores, (0,))
    assert (None if found is None else (len(found.numbers), found.axes.difference)) == covered
    if found is None:
        return
    # The score of the numbers is the score.
    s, *indices = np.float32(0.5), *(np.int32(i) for i in (1, 1, 3, 2))
    given = found.values(*indices, *arrays)
    assert found.score(given, s, *indices, *arrays) == function(s, x, *indices)
    # Gradients by each difference of many would take long.
    many = Sizes(4, 2, 2**27, 2**27)
    assert found.has_gradients(arrays, Sizes(4, 2, 8, 8))
    assert found.has_gradients(arrays, many) != found.axes.difference


@pytest.mark.parametrize("origins", [None, np.array([2, 1, 3], np.int32)])
@pytest.mark.parametrize("function", [distances, lambda s, b, h, q, k: s * jnp.cos(q - k) + b])
def test_long_functions_of_a_difference_are_read(function, origins):
    score, arrays = traced(function, "score_mod", np.dtype(np.float32))
    scores = Scores(1.0, score_mod=score)
    given = [*arrays, *([] if origins is None else [jnp.asarray(origins)])]
    numbers = number_of_difference(scores)
    read, own, position = numbers.as_array(scores, given, Sizes(2, 1, 5, 4))
    assert own[position].shape == (2, 1, 8)
    for place in itertools.product(range(2), range(1), range(5), range(4)):
        of_place = [
            compat.jaxpr_as_fun(score_jaxpr(x, np.dtype(np.float32), xs))(
                np.float32(0.5), *map(np.int32, place), *xs
            )
            for x, xs in ((scores, given), (read, own))
        ]
        np.testing.assert_allclose(*of_place, rtol=1e-6)
    # It takes no longer than a read then, and others do not from the start.
    assert number_of_difference(read) is None
    for short in (slopes, table, gate):
        score, _ = traced(short, "score_mod", np.dtype(np.float32))
        assert number_of_difference(Scores(1.0, score_mod=score)) is None


@pytest.mark.parametrize("reads_table", [False, True])
def test_numbers_of_float64_exceed_float32(reads_table):
    """They are read as they are, and gradients by them, which underflow, are not a kernel's."""
    with jax.enable_x64(True):
        x = jnp.arange(9.0, dtype=np.float64) * 40

        def function(s, b, h, q, k):
            number = x[q - k + 4] if reads_table else 80.0 * jnp.abs(q - k).astype(np.float64)
            return jnp.log(jnp.exp(jnp.sin(number) + number) + jnp.exp(s.astype(np.float64)))

        score, arrays = traced(function, "score_mod", np.dtype(np.float32))
        scores = Scores(1.0, score_mod=score)
        numbers = number_of_difference(scores)
        read, own, position = numbers.as_array(scores, arrays, Sizes(1, 1, 5, 4))
        assert 1e39 < float(own[position].max()) < np.inf
        for q, k in itertools.product(range(5), range(4)):
            of_place = [
                compat.jaxpr_as_fun(score_jaxpr(x, np.dtype(np.float32), xs))(
                    np.float32(0.5), *map(np.int32, (0, 0, q, k)), *xs
                )
                for x, xs in ((scores, arrays), (read, own))
            ]
            np.testing.assert_allclose(*of_place, rtol=1e-6)
        if reads_table:
            assert score_numbers(scores, (0,)) is None


@needs_emulator
@pytest.mark.parametrize("sign", [-1, 0])
def test_scales_that_turn_the_order_of_scores(sign):
    query, key, value = (draw(1, 100, 1, 64, dtype=BF16) for _ in range(3))
    with emulated_gpu(H100):
        call = jax.jit(lambda *x: jtk.attention(*x, scale=sign / 8, is_causal=True))
        found = np.asarray(call(query, key, value), np.float64)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (sign * query, key, value)]
        expected = ORACLES.attention(*wide, is_causal=True)
    assert max(relative_errors([found], [expected])) <= 3 * float(jnp.finfo(BF16).eps) / 2


def plans(options, features, gpu=H100):
    functions = [options.get("score_mod"), options.get("mask_mod")]
    score, of_score = traced(functions[0], "s", np.dtype("f4")) if functions[0] else (None, [])
    mask, of_mask = traced(functions[1], "m", None) if functions[1] else (None, [])
    scores = Scores(1.0, score_mod=score, mask_mod=mask, is_causal="is_causal" in options)
    sizes = problems.Attention(2, 512, 512, 2, 2, features, features, BF16, 1.0)
    text = score_text(scores, [*of_score, *of_mask], sizes)
    problem = dataclasses.replace(sizes, functions=text, listed=(1, 1) if text.has_mask else None)
    return [
        sm90.plan_forward(problem, gpu),
        sm90.plan_backward(problem, gpu),
        sm90.plan_tangent(problem, (True,) * 3, gpu),
        sm90.plan_bias_gradient(
            dataclasses.replace(problem, bias=(1, 2, 512, 512)),
            problems.Bias((1, 2, 512, 512), BF16),
            gpu,
        ),
    ]


FUNCTIONS = {
    "plain": {},
    "cap": {"score_mod": capped, "is_causal": True},
    "slopes": {"score_mod": slopes, "is_causal": True},
    "table": {"score_mod": table},
    "documents": {"mask_mod": documents},
    "dilated": {"mask_mod": dilated},
}


@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(3)
def test_plans_spill_little_and_serialize_no_mma(name, features):
    for plan in plans(FUNCTIONS[name], features):
        for launch in plan.launches:
            # Score functions take registers beside four accumulators of 128 features.
            assert launch.entry.spill_bytes <= (128 if features == 128 else 0)
            assert not launch.entry.serialized


@pytest.mark.parametrize("features", [192, 256])
def test_gradients_of_wide_heads_spill_nothing(features):
    for launch in plans({"score_mod": capped, "is_causal": True}, features)[1].launches:
        assert launch.entry.spill_bytes == 0
        assert not launch.entry.serialized


def test_what_no_kernel_covers():
    for plan in plans({}, 64, A100):
        assert isinstance(plan, NoKernel)
        assert "Hopper" in plan.reason
    forward, gradient, *others = plans({}, 256)
    assert not isinstance(forward, NoKernel)
    assert not isinstance(gradient, NoKernel)
    for plan in others:
        assert isinstance(plan, NoKernel)
        assert "128 features" in plan.reason


def test_functions_without_cuda_are_computed_in_blocks():
    def sorted_scores(s, b, h, q, k):
        return s + jnp.linalg.eigh(jnp.eye(40))[0][0]

    with pytest.raises(Untranslatable):
        plans({"score_mod": sorted_scores}, 64)
    x = jnp.ones((1, 4, 1, 64), BF16)
    with gpu_target(H100):
        (choice,) = jtk.explain(jtk.attention, x, x, x, score_mod=sorted_scores)
    assert choice.kernel is None
    assert "eigh" in choice.reason


LONG, WIDE = (2, 1024, 8, 128), (2, 1024, 8, 64)
# Shapes of query and of key, options, a GPU, and what computes the value and the gradient.
CHOICES = {
    "plain": (LONG, LONG, {}, "sm_90", ("cuDNN", "cuDNN")),
    "causal": (LONG, LONG, {"is_causal": True}, "sm_90", ("cuDNN", "cuDNN")),
    "a function": (LONG, LONG, {"score_mod": capped}, "sm_90", ("kernel", "kernel")),
    "few queries": ((2, 8, 8, 128), LONG, {}, "sm_90", ("cuDNN", "cuDNN")),
    "few features": (WIDE, WIDE, {}, "sm_90", ("cuDNN", "cuDNN")),
    "a window": (LONG, LONG, {"local_window_size": (9, 0)}, "sm_90", ("cuDNN", "cuDNN")),
    "a window of later keys": (
        LONG, LONG, {"local_window_size": (9, 1)}, "sm_90", ("kernel", "kernel"),
    ),
    "causal, of other keys": (
        LONG, (2, 1100, 8, 128), {"is_causal": True}, "sm_90", ("kernel", "kernel"),
    ),
    "a bias": (
        LONG, LONG, {"bias": np.ones((1, 8, 1024, 1024), BF16)}, "sm_90", ("kernel", "kernel"),
    ),
    "a bias on Ampere": (
        LONG, LONG, {"bias": np.ones((1, 8, 1024, 1024), BF16)}, "sm_80", ("cuDNN", "cuDNN"),
    ),
    "a bias of keys": (
        LONG, LONG, {"bias": np.ones((1, 1, 1, 1024), BF16)}, "sm_90", ("kernel", "kernel"),
    ),
    "plain on Ampere": (LONG, LONG, {}, "sm_80", ("cuDNN", "cuDNN")),
    "plain on Turing": (LONG, LONG, {}, "sm_75", ("blocks", "blocks")),
}  # fmt: skip


@pytest.mark.defaults
@pytest.mark.parametrize("name", CHOICES)
def test_what_computes_a_call(name):
    of_query, of_key, options, arch, expected = CHOICES[name]
    query, key = (jnp.ones(x, BF16) for x in (of_query, of_key))

    def gradient(query, key, d_out):
        return jax.vjp(lambda *x: jtk.attention(*x, **options), query, key, key)[1](d_out)

    with gpu_target(known_gpu(arch)):
        choices = jtk.explain(gradient, query, key, query, platform="cuda")
    found = []
    for choice in choices:
        if choice.call.startswith("attention forward") or choice.call.startswith(
            "attention backward"
        ):
            found[-1] = "kernel" if choice.kernel else "lost"
        else:
            found.append("cuDNN" if choice.reason.startswith("cuDNN's") else "blocks")
    assert tuple(found) == expected


@pytest.mark.defaults
def test_a_bias_is_cudnns_where_there_are_no_kernels():
    x, bias = jnp.ones(LONG, BF16), jnp.ones((1, 8, 1024, 1024), BF16)

    def gradient(x, bias):
        return jax.vjp(lambda *given: jtk.attention(x, *given), x, x, bias)[1](x)

    for arch, is_cudnns in (("sm_90", False), ("sm_80", True)):
        with gpu_target(known_gpu(arch)):
            choices = jtk.explain(gradient, x, bias, platform="cuda")
        of_passes = [choice for choice in choices if choice.depth == 0]
        assert [choice.reason.startswith("cuDNN's") for choice in of_passes] == [is_cudnns] * 2
        kernels = [choice.call for choice in choices if choice.kernel is not None]
        assert ("attention bias gradient" in kernels) == (not is_cudnns)


@pytest.mark.defaults
@pytest.mark.parametrize("empty", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_empty_calls_are_chosen_for(empty, options):
    shape = tuple(0 if i == empty else x for i, x in enumerate(LONG))
    x = jnp.ones(shape, BF16)

    def gradient(x):
        return jax.vjp(lambda *y: jtk.attention(*y, **options), x, x, x)[1](x)

    with gpu_target("H200"):
        assert jtk.explain(gradient, x, platform="cuda")


@pytest.mark.defaults
def test_explain_predicts_every_side():
    x = jnp.ones((2, 2048, 8, 128), BF16)

    def gradient(x):
        return jax.vjp(lambda *y: jtk.attention(*y, is_causal=True), x, x, x)[1](x)

    with gpu_target("H200"):
        found = jtk.explain(gradient, x, platform="cuda")
    of_passes = [choice for choice in found if choice.depth == 0]
    assert len(of_passes) == 2
    for choice in of_passes:
        assert choice.is_rewritten
        assert 0 < choice.predicted_us.ours < choice.predicted_us.xla
        assert re.search(r"cuDNN [\d.]+ us", choice.reason)
        assert re.search(r"kernels [\d.]+ us", choice.reason)
    ours, xla = map(sum, zip(*(x.predicted_us for x in of_passes), strict=True))
    np.testing.assert_allclose(found.predicted_us, (ours, xla))


@pytest.mark.defaults
def test_policies_of_attention():
    x = jnp.ones((2, 256, 8, 128), BF16)

    def choices(name):
        with jtk.policy(name), gpu_target("H200"):
            return jtk.explain(lambda x: jtk.attention(x, x, x), x, platform="cuda")

    (by_cudnn,), (_, kernel), (by_xla,) = map(choices, ("auto", "kernels", "xla"))
    assert by_cudnn.reason.startswith("cuDNN's")
    assert kernel.kernel
    assert by_xla.kernel is None
    assert not by_xla.is_rewritten


def test_explain_shows_the_tiles_that_a_mask_empties():
    x = jnp.zeros((1, 1024, 1, 64), BF16)
    with gpu_target("H200"):
        first, *_ = jtk.explain(
            lambda x: jtk.attention(x, x, x, is_causal=True), x, platform="cuda"
        )
    (share,) = re.findall(r"of which the mask empties (\d+)%", first.reason)
    assert 30 <= int(share) < 50


def test_scores_of_float64_with_a_function_are_computed_in_blocks():
    with jax.enable_x64(True), gpu_target(H100):
        x = jnp.ones((1, 4, 1, 64), np.float64)
        slope = jnp.ones(1, np.float64)
        (choice,) = jtk.explain(
            lambda x, s: jtk.attention(x, x, x, score_mod=lambda y, *_: y - s[0]), x, slope
        )
    assert choice.kernel is None
    assert "not float64" in choice.reason

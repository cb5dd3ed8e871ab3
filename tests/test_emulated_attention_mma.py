"""Kernels of attention by ``mma.sync``: their plans, and emulated values and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_attention import MODES, RNG, draw, relative_errors
from emulated_gpu import emulated_gpu
from nvrtc_mark import needs_emulator, require_nvrtc
from products import BF16, F16, F32, H100
from test_emulated_attention import FUNCTIONS, capped, documents, slopes, table

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.ops.attention.index_functions import traced
from jax_tilekern.ops.attention.score_text import score_text
from jax_tilekern.ops.attention.scores import Scores
from jax_tilekern.plans.attention import mma
from jax_tilekern.plans.attention import problem as problems
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel

require_nvrtc()

A100 = known_gpu("sm_80")
HIGHEST = jax.lax.Precision.HIGHEST
BIAS = RNG.standard_normal((1, 2, 70, 90)).astype(np.float32)


def far(s, b, h, q, k):
    return s * 2 - 1e4 * (q % 2) + k * 0.5


# A GPU, a type, sizes of (batch, queries, keys, heads, key heads, features, value features), a
# mode of the emulator, and options. The masks of some leave queries without keys.
CALLS = {
    "plain": (H100, F32, (1, 150, 200, 2, 1, 64, 64), None, {}),
    "causal": (
        H100, F32, (1, 200, 200, 2, 2, 16, 128), "late", {"is_causal": True, "score_mod": slopes},
    ),
    "wide": (A100, F32, (1, 70, 90, 2, 1, 192, 256), "backwards", {"is_causal": True}),
    "functions": (
        A100, F32, (2, 150, 200, 2, 2, 80, 68), "held",
        {"score_mod": capped, "mask_mod": documents},
    ),
    "lengths": (
        H100, F32, (2, 140, 140, 2, 2, 64, 64), "late",
        {"key_value_seq_lengths": np.array([70, 0]), "query_seq_lengths": np.array([130, 9])},
    ),
    "bias": (A100, F32, (1, 70, 90, 2, 2, 36, 100), None, {"bias": BIAS}),
    "exact": (H100, F32, (1, 150, 200, 2, 1, 64, 128), "late", {"precision": HIGHEST}),
    "exact table": (
        A100, F32, (2, 150, 200, 2, 1, 64, 64), None,
        {"precision": HIGHEST, "score_mod": table, "is_causal": True},
    ),
    "exact bases": (
        H100, F32, (1, 70, 90, 1, 1, 256, 256), None, {"precision": HIGHEST, "score_mod": far},
    ),
    "bfloat16": (A100, BF16, (1, 200, 200, 2, 1, 128, 64), "late", {"local_window_size": (70, 3)}),
    "float16": (
        A100, F16, (1, 140, 136, 2, 2, 256, 200), "held",
        {"bias": RNG.standard_normal((1, 2, 140, 136)).astype(F16), "score_mod": capped},
    ),
}  # fmt: skip
DEFAULT = {"plain", "functions", "exact", "bfloat16"}


def bounds(operands, options):
    """Bounds of the errors of the result, and of the logsumexp, from those of each rounding.

    Scores err by ``d``, so weights by a factor of ``exp(2 d)``.
    """
    query, key, value = (np.asarray(x, np.float64) for x in operands)
    dtype, features, keys = operands[0].dtype, query.shape[-1], key.shape[1]
    is_exact = "precision" in options
    # Rounding of a product's operands, and of its sums in float32, of 8 or 16 terms for an MMA.
    of_operands = {F32: 3 * 2.0**-22 if is_exact else 2 * 2.0**-11, BF16: 0, F16: 0}[dtype]
    of_sums = 3 * 2.0**-24
    group = query.shape[2] // key.shape[2]
    products = np.einsum("btnd,bsnd->btns", abs(query), np.repeat(abs(key), group, 2))
    largest = products.max(-1) / np.sqrt(features)
    d = (of_operands + features / 8 * of_sums) * largest
    # Functions have terms of up to 200 and slopes of up to 2, and a base of 1e4 in one call.
    terms = 1e4 if options.get("score_mod") is far else 200
    d = 2 * d + 2.0**-22 + 8 * 2.0**-24 * (largest + terms)
    own = float(jnp.finfo(dtype).eps) / 2
    of_weights = own if dtype != F32 else of_operands
    of_value = np.expm1(2 * d)[..., None] + 2 * of_weights + (keys / 8 + 8) * of_sums
    weighed, _ = ORACLES.attention(query, key, abs(value), return_residual=True, **options)
    return (of_value + own) * np.asarray(weighed), d + 2.0**-20


@needs_emulator
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in DEFAULT else [pytest.mark.thorough]) for x in CALLS],
)
def test_values_and_logarithms(name):
    gpu, dtype, (b, t, s, n, k, h, d), mode, options = CALLS[name]
    operands = tuple(draw(*x, dtype=dtype) for x in ((b, t, n, h), (b, s, k, h), (b, s, k, d)))

    def of(m):
        return jax.jit(lambda *x: m.attention(*x, return_residual=True, **options))

    with emulated_gpu(dataclasses.replace(gpu, sm_count=1), **MODES.get(mode, {})) as ran:
        found = [np.asarray(x, np.float64) for x in of(jtk)(*operands)]
    assert {plan.name.split()[0] for plan in ran} == {"attention"}
    assert "mma_attention_forward" in ran[0].launches[0].entry.name
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in operands]
        expected = [np.asarray(x) for x in of(ORACLES)(*wide)]
        allowed = bounds(operands, options)
    finite = np.isfinite(expected[1])
    np.testing.assert_array_equal(found[1][~finite], expected[1][~finite])
    np.testing.assert_array_equal(found[0][~finite], 0)
    for x, y, bound in zip(found, expected, allowed, strict=True):
        assert (abs(x[finite] - y[finite]) <= bound[finite]).all()


# A GPU, a type, sizes, a mode, and options, as above.
GRADIENTS = {
    "plain": (H100, F32, (1, 100, 150, 2, 1, 64, 64), "late", {}),
    "causal": (
        H100, F32, (1, 140, 140, 2, 1, 128, 96), "held", {"is_causal": True, "score_mod": slopes},
    ),
    "functions": (
        A100, BF16, (2, 100, 150, 2, 2, 80, 72), "backwards",
        {"score_mod": capped, "mask_mod": documents},
    ),
    "lengths": (
        A100, F16, (2, 140, 140, 2, 2, 64, 128), "late",
        {"key_value_seq_lengths": np.array([70, 0]), "query_seq_lengths": np.array([130, 9])},
    ),
    "bias": (H100, F32, (1, 70, 90, 2, 2, 36, 100), None, {"bias": BIAS}),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x == "causal" else [pytest.mark.thorough]) for x in GRADIENTS],
)
def test_gradients(name):
    gpu, dtype, (b, t, s, n, k, h, d), mode, options = GRADIENTS[name]
    # Numbers of float16 are numbers of TF32.
    drawn = F16 if dtype == F32 else dtype
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, d), (b, t, n, d)
    operands = tuple(draw(*x, dtype=drawn).astype(dtype) for x in shapes)

    def of(m):
        def gradient(query, key, value, d_out):
            return jax.vjp(lambda *x: m.attention(*x, **options), query, key, value)[1](d_out)

        return jax.jit(gradient)

    with emulated_gpu(dataclasses.replace(gpu, sm_count=1), **MODES.get(mode, {})) as ran:
        found = [np.asarray(x) for x in of(jtk)(*operands)]
    names = [launch.entry.name for plan in ran for launch in plan.launches]
    assert sum("mma_attention_backward" in name for name in names) == 2
    with jax.enable_x64(True):
        expected = of(ORACLES)(*(np.asarray(x, np.float64) for x in operands))
    # Weights, gradients of scores and results are rounded, each by half a unit at most.
    unit = 2.0**-10 if dtype == F32 else float(jnp.finfo(dtype).eps)
    assert max(relative_errors(found, expected)) <= 3 * unit / 2


def plan(options, features, dtype, precision, gpu):
    functions = options.get("score_mod"), options.get("mask_mod")
    score, of_score = traced(functions[0], "s", F32) if functions[0] else (None, [])
    mask, of_mask = traced(functions[1], "m", None) if functions[1] else (None, [])
    scores = Scores(1.0, score_mod=score, mask_mod=mask, is_causal="is_causal" in options)
    sizes = problems.Attention(
        2, 512, 512, 2, 2, features, features, np.dtype(dtype), 1.0, precision, by_wgmma=False
    )
    text = score_text(scores, [*of_score, *of_mask], sizes)
    listed = (1, 1) if text.has_mask else None
    problem = dataclasses.replace(sizes, functions=text, listed=listed)
    return mma.plan_forward(problem, gpu), mma.plan_backward(problem, gpu)


@pytest.mark.parametrize("gpu", [A100, H100], ids=["sm_80", "sm_90a"])
@pytest.mark.parametrize("features", [64, 128, 256])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(6)
def test_plans_spill_little(name, features, gpu):
    for dtype, precision in ((F32, "DEFAULT"), (F32, "HIGHEST"), (BF16, "DEFAULT")):
        value, gradient = plan(FUNCTIONS[name], features, dtype, precision, gpu)
        # Parts of operands of HIGHEST take registers.
        spilled = 8 * features * (precision == "HIGHEST")
        assert value.launches[0].entry.spill_bytes <= spilled
        assert isinstance(gradient, NoKernel) == (features > 128 or precision == "HIGHEST")
        for launch in () if isinstance(gradient, NoKernel) else gradient.launches:
            assert launch.entry.spill_bytes == 0


def test_tiles_beyond_the_shared_memory_are_xlas():
    # Arrays of the function are staged beside the tiles.
    found, _ = plan(FUNCTIONS["table"], 256, F32, "DEFAULT", known_gpu("sm_86"))
    assert isinstance(found, NoKernel)
    assert "shared memory" in found.reason
    assert not isinstance(plan({}, 256, F32, "DEFAULT", known_gpu("sm_86"))[0], NoKernel)


@pytest.mark.defaults
def test_what_computes_a_call():
    def choices(gpu, dtype, **options):
        x = jnp.ones((2, 1024, 8, 64), dtype)

        def gradient(x):
            return jax.vjp(lambda *y: jtk.attention(*y, score_mod=capped, **options), x, x, x)[1](x)

        with gpu_target(gpu):
            found = jtk.explain(gradient, x, platform="cuda")
        return [choice for choice in found if choice.depth == 0]

    # Those that are not timed are asked for by the policy.
    for gpu, dtype, is_default in ((H100, F32, True), (A100, F32, False), (A100, BF16, False)):
        found = choices(gpu, dtype)
        assert [choice.is_rewritten for choice in found] == [is_default] * 2
        assert all(('policy("kernels")' in choice.reason) != is_default for choice in found)
        with jtk.policy("kernels"):
            assert all(choice.is_rewritten for choice in choices(gpu, dtype))
    value, _ = choices(H100, F32, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    assert "BF16_BF16_F32" in value.reason
    with jtk.policy("kernels"):
        value, gradient = choices(H100, F32, precision=HIGHEST)
    assert value.is_rewritten
    assert "HIGHEST" in gradient.reason


@pytest.mark.defaults
def test_times_of_float32_are_estimates():
    x = jnp.ones((2, 2048, 8, 128), F32)
    with gpu_target("H200"):
        value, highest = (
            jtk.explain(lambda x, p=p: jtk.attention(x, x, x, precision=p), x, platform="cuda")[0]
            for p in (None, HIGHEST)
        )
    assert 0 < value.predicted_us.ours < value.predicted_us.xla
    assert value.predicted_us.ours < highest.predicted_us.ours

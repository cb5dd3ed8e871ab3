"""What computes a call of attention is what the page says, and its score functions are right."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from guides import DOCS, snippets
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES

PAGE = (DOCS / "attention.md").read_text()
BF16, F32 = jnp.bfloat16, np.float32
LENGTH, HEADS = 1024, 8


def sized(features, dtype=BF16):
    """Large enough for kernels to be faster than XLA's blocks."""
    return jax.ShapeDtypeStruct((2, LENGTH, HEADS, features), dtype)


def gradient(*wanted, **options):
    """The gradient of attention by operands, with a cotangent of its result alone."""

    def function(d_out, *operands):
        def own(*moved):
            given = dict(zip(wanted, moved, strict=True))
            return attend(*(given.get(i, x) for i, x in enumerate(operands)), **options)

        return jax.vjp(own, *(operands[i] for i in wanted))[1](d_out)

    return function


def attend(query, key, value, bias=None, **options):
    return jtk.attention(query, key, value, bias, **options)


def tangent(*operands):
    return jax.jvp(attend, operands, operands)


def capped(score, *_):
    return 20 * jnp.tanh(score / 20)


def of_slopes(x, slopes):
    def value(slopes):
        return jtk.attention(x, x, x, score_mod=lambda s, b, h, q, k: s * slopes[h])

    return jax.vjp(value, slopes)[1](x)


def of_table(x, table):
    def value(table):
        score_mod = lambda s, b, h, q, k: s + table[h, jnp.clip(q - k, 0, 9)]  # noqa: E731
        return jtk.attention(x, x, x, score_mod=score_mod)

    return jax.vjp(value, table)[1](x)


def of_rows(x, rows):
    def value(rows):
        score_mod = lambda s, b, h, q, k: s + rows[h, q // 2]  # noqa: E731
        return jtk.attention(x, x, x, score_mod=score_mod)

    return jax.vjp(value, rows)[1](x)


def by_eigenvalues(score, b, h, q, k):
    return score + jnp.linalg.eigh(jnp.eye(40))[0][0]


X, WIDE, ODD = sized(64), sized(192), sized(20)
BIAS = jax.ShapeDtypeStruct((1, HEADS, LENGTH, LENGTH), BF16)
KEYS_BIAS = jax.ShapeDtypeStruct((2, 1, 1, LENGTH), BF16)
MASK = np.arange(LENGTH) % 3 > 0


def values(function, *operands, options):
    return [(lambda *x, own=own: function(*x, **own), operands) for own in options]


PLAIN = [{}, {"is_causal": True}, {"local_window_size": (9, 0)}]
OTHERS = [
    {"score_mod": capped},
    {"mask_mod": lambda b, h, q, k: q >= k},
    {"mask": MASK},
    {"key_value_seq_lengths": np.array([5, LENGTH])},
    {"local_window_size": (9, 9)},
]
# By the first words of a line of the page: functions and operands.
CALLS = {
    "plain": [
        *values(attend, X, X, X, options=PLAIN),
        (attend, (X, X, X, BIAS)),
        *((gradient(0, 1, 2, **own), (X,) * 4) for own in PLAIN),
    ],
    "functions, masks": [
        *values(attend, X, X, X, options=OTHERS),
        (attend, (X, X, X, KEYS_BIAS)),
        *((gradient(0, 1, 2, **own), (X,) * 4) for own in OTHERS),
        (gradient(0, 1, 2), (X, X, X, X, KEYS_BIAS)),
    ],
    "`jax.jvp` |": [(tangent, (X,) * 3)],
    "129 to 256 features: value": [(attend, (WIDE,) * 3), (gradient(0, 1, 2), (WIDE,) * 4)],
    "129 to 256 features: `jax.jvp`": [(tangent, (WIDE,) * 3)],
    "float32: value": [
        (attend, (sized(64, F32),) * 3),
        (gradient(0, 1, 2), (sized(64, F32),) * 4),
    ],
    "float32: `jax.jvp`": [(tangent, (sized(64, F32),) * 3)],
    "float64": [
        (function, (x,) * count)
        for x in (sized(264), sized(264, F32), ODD)
        for function, count in ((attend, 3), (gradient(0, 1, 2), 4), (tangent, 3))
    ],
    "functions that": values(attend, X, X, X, options=[{"score_mod": by_eigenvalues}]),
    "gradients by arrays": [(of_slopes, (X, jax.ShapeDtypeStruct((HEADS,), F32)))],
    "gradients by tables": [
        (of_table, (X, jax.ShapeDtypeStruct((HEADS, 10), dtype))) for dtype in (F32, BF16)
    ],
    "gradients by other arrays": [(of_rows, (X, jax.ShapeDtypeStruct((HEADS, 99), F32)))],
}
GPUS = {1: ["H200"], 2: ["sm_80", "sm_89", "sm_100"], 3: ["sm_75"]}
# The pass that a line is about: the derivative, not the value that it needs.
LAST = (
    "`jax.jvp` |",
    "129 to 256 features: `jax.jvp`",
    "float32: `jax.jvp`",
    "gradients by arrays",
    "gradients by tables",
    "gradients by other arrays",
)


def line(words):
    """The cells of the line of the page's table that begins with some words."""
    (found,) = re.findall(rf"^\| ({re.escape(words)}.*) \|$", PAGE, re.MULTILINE)
    return found.split(" | ")


def sides(function, operands, gpu):
    """What computes each call of attention: the kernels, cuDNN, or XLA."""
    with jtk.gpu_target(gpu):
        choices = jtk.explain(function, *operands, platform="cuda")
    found = []
    for choice in choices:
        if choice.depth == 0:
            found.append("XLA")
        if choice.reason.startswith("cuDNN's"):
            found[-1] = "cuDNN"
        elif choice.kernel is not None and found[-1] == "XLA":
            found[-1] = "kernels"
    return found


@needs_nvrtc
@pytest.mark.defaults
@pytest.mark.parametrize("column", GPUS)
@pytest.mark.parametrize("words", CALLS)
def test_the_page_says_what_computes_a_call(words, column):
    expected = set(line(words)[column].split(" or "))
    for gpu in GPUS[column]:
        for function, operands in CALLS[words]:
            found = sides(function, operands, gpu)
            assert set(found[-1:] if words in LAST else found) <= expected, (gpu, operands)


@needs_nvrtc
@pytest.mark.defaults
@pytest.mark.parametrize("gpu", [x for names in GPUS.values() for x in names])
@pytest.mark.parametrize("bias", [BIAS, KEYS_BIAS])
def test_the_page_says_what_computes_the_gradient_of_a_bias(gpu, bias):
    cells = line("gradient by a `bias` that has keys")
    (column,) = (i for i, names in GPUS.items() if gpu in names)
    with jtk.gpu_target(gpu):
        choices = jtk.explain(gradient(0, 1, 2, 3), X, X, X, X, bias, platform="cuda")
    kernels = [x.call for x in choices if x.kernel is not None]
    if cells[column] == "kernels":
        assert "attention bias gradient" in kernels
    elif cells[column] == "XLA":
        assert not any(x.is_rewritten for x in choices)
    else:
        assert cells[column] == "cuDNN if plain, else XLA"
        by_cudnn = [x.reason.startswith("cuDNN's") for x in choices]
        assert by_cudnn == [bias is BIAS] * 2


def outputs(attention):
    """What the page's snippets compute by a function in the place of ours, but for ``explain``."""
    found = []

    def recorded(*operands, **options):
        out = attention(*operands, **options)
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(out)):
            found.append(out)
        return out

    namespace = {"__name__": "page"}
    with mock.patch.object(jtk, "attention", recorded):
        for _, code, _ in snippets(PAGE):
            if "jtk.explain" not in code:
                exec(code, namespace)
    names = "gradient", "values", "slopes_of_values", "second"
    return [*found, *(namespace[name] for name in names)]


def test_score_functions_of_the_page_are_those_of_all_scores():
    with jax.default_matmul_precision("highest"):
        ours, dense = (jax.tree.leaves(outputs(m.attention)) for m in (jtk, ORACLES))
    assert len(ours) >= 8 + 4 + 3
    for x, y in zip(ours, dense, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())

"""Emulated kernels of attention, of rows of scores that are large beside their logarithm's digits.

The oracles have float64, with scores that are rounded to float32 as the kernels have them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_attention import MODES, RNG, draw, relative_errors
from emulated_gpu import emulated_gpu
from nvrtc_mark import needs_emulator, require_nvrtc
from products import BF16, F16, H100

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES

require_nvrtc()

B, T, S, N = 2, 150, 200, 2
LOWEST = float(jnp.finfo(np.float32).min)


def hidden(large, dtype, shape=(1, N, T, S)):
    """A bias that hides all keys of a third of the queries, and some of those of another third."""
    bias = RNG.standard_normal(shape).astype(dtype)
    bias[:, :, 0::3] = large
    bias[:, :, 1::3][RNG.random(bias[:, :, 1::3].shape) < 0.5] = large
    # Queries see the first key at least.
    bias[..., 1:][RNG.random(bias[..., 1:].shape) < 0.1] = -np.inf
    return bias


def of_rows(s, b, h, q, k):
    return (s + jnp.where(q % 3 == 0, -1e9, jnp.where((q % 3 == 1) & (k % 2 == 0), 1e9, 0))) * 1.5


def of_heads(s, b, h, q, k):
    """Scores whose products with the rate are rounded, also to more than their differences."""
    return s + jnp.where((h == 1) & (q % 3 == 1), 2.0**27 + 64 * (k % 2), 7e6)


# The type of operands, a bias, options, a mode, and whether the gradient of the bias is a kernel's.
CALLS = {
    "a staged bias": (BF16, hidden(-1e9, BF16), {}, None, True),
    "a staged bias of larger numbers": (
        F16, hidden(-6e4, F16), {"is_causal": True}, "held", True,
    ),
    "a bias of float32": (
        F16, hidden(LOWEST, np.float32, (1, 1, T, S)),
        {"key_value_seq_lengths": np.array([150, 0])}, "late", True,
    ),
    "a bias of keys": (BF16, hidden(-1e30, np.float32, (B, 1, 1, S)), {}, "backwards", True),
    "a function": (BF16, None, {"score_mod": of_rows}, "held", False),
    "a function of rounded products": (F16, None, {"score_mod": of_heads}, "late", False),
    "a function of a bias": (
        BF16, hidden(-1e9, BF16), {"score_mod": of_rows, "is_causal": True}, "late", True,
    ),
}  # fmt: skip
DEFAULT = {
    "a staged bias", "a bias of float32", "a function", "a function of rounded products",
}  # fmt: skip


def rounded(score_mod):
    def score(s, *indices):
        s = s.astype(np.float32).astype(s.dtype)
        s = s if score_mod is None else score_mod(s, *indices)
        return s.astype(np.float32).astype(s.dtype)

    return score


@needs_emulator
@pytest.mark.parametrize("name", [
    pytest.param(x, marks=[] if x in DEFAULT else pytest.mark.thorough) for x in CALLS
])  # fmt: skip
@pytest.mark.parametrize("features", [64, 192])
def test_rows_of_large_scores(name, features):
    dtype, bias, options, mode, has_bias_kernel = CALLS[name]
    shapes = (B, T, N, features), (B, S, 1, features), (B, S, 1, 64)
    operands, dots = ([draw(*x, dtype=dtype) for x in shapes] for _ in range(2))
    if bias is not None:
        operands.append(jnp.asarray(bias))
        dots.append(draw(*bias.shape, dtype=bias.dtype))
    cotangents = draw(B, T, N, 64, dtype=dtype), draw(B, T, N, dtype=np.float32)

    def of(m, **given):
        def attention(*x):
            return m.attention(*x, return_residual=True, **options | given)

        def everything(operands, dots, d_out, d_residual):
            (out, residual), back = jax.vjp(attention, *operands)
            d_residual = jnp.where(jnp.isneginf(residual), 0, d_residual).astype(residual.dtype)
            return out, residual, *back((d_out, d_residual)), *jax.jvp(attention, operands, dots)[1]

        return everything

    with emulated_gpu(dataclasses.replace(H100, sm_count=1), **MODES.get(mode, {})) as ran:
        found = jax.tree.map(np.asarray, jax.jit(of(jtk))(operands, dots, *cotangents))
    names = {plan.name.split()[0] for plan in ran}
    assert {"attention", "attention_gradient"} <= names
    assert ("attention_bias_gradient" in names) == (has_bias_kernel and features <= 128)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (operands, dots, *cotangents))
        oracle = of(ORACLES, score_mod=rounded(options.get("score_mod")))
        expected = jax.tree.map(np.asarray, jax.jit(oracle)(*wide))
    # Weights, gradients of scores and results are rounded to the type, each by half a unit at most.
    bound = 3 * float(jnp.finfo(dtype).eps) / 2
    assert max(relative_errors(found, expected)) <= bound
    # So are the output, its tangent and the gradient of queries of each third of the rows.
    of_queries = [0, 2, len(found) - 2]
    for first in range(3):
        rows = [[x[i][:, first::3] for i in of_queries] for x in (found, expected)]
        assert max(relative_errors(*rows)) <= bound


@needs_emulator
def test_gradients_by_a_table_of_large_scores():
    """Those by what a function reads by the difference of query and key: large for one head."""
    table = RNG.standard_normal((N, 32)).astype(np.float32)
    table[0] = -1e9
    shapes = (B, T, N, 64), (B, S, 1, 64), (B, S, 1, 72), (B, T, N, 72)
    *operands, d_out = (draw(*x, dtype=BF16) for x in shapes)

    def score(s, b, h, q, k, x):
        return s + x[h, jnp.clip(q - k, 0, 31)]

    def of(m, rounds):
        def gradients(table, operands, d_out):
            def attention(table, *operands):
                score_mod = lambda *given: rounds(lambda *x: score(*x, table))(*given)  # noqa: E731
                return m.attention(*operands, score_mod=score_mod)

            return jax.vjp(attention, table, *operands)[1](d_out)

        return gradients

    given = jnp.asarray(table), operands, d_out
    with emulated_gpu(dataclasses.replace(H100, sm_count=2), late=("reads", "writes")) as ran:
        found = jax.tree.map(np.asarray, jax.jit(of(jtk, lambda f: f))(*given))
    assert "attention_gradient" in {plan.name.split()[0] for plan in ran}
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), given)
        expected = jax.tree.map(np.asarray, jax.jit(of(ORACLES, rounded))(*wide))
    bound = 3 * float(jnp.finfo(BF16).eps) / 2
    assert max(relative_errors(found, expected)) <= bound
    assert max(relative_errors(found[0], expected[0])) <= bound


@needs_emulator
def test_mapped_and_checkpointed_calls_of_large_scores():
    """A residual of two arrays is mapped, and saved by the name of a policy."""
    bias = jnp.asarray(np.stack([hidden(x, BF16) for x in (-1e9, 1e9)]))
    query, key, value, d_out = (
        draw(2, *x, dtype=BF16)
        for x in ((1, T, N, 64), (1, S, 1, 64), (1, S, 1, 64), (1, T, N, 64))
    )
    policy = jax.checkpoint_policies.save_only_these_names("attention")

    def gradients(attention):
        return lambda *x: jax.vjp(attention, *x[:-1])[1](x[-1])

    given = query, key, value, bias, d_out
    with emulated_gpu(H100) as ran:
        mapped = jax.jit(jax.vmap(gradients(jax.checkpoint(jtk.attention, policy=policy))))(*given)
        names = [plan.name.split()[0] for plan in ran]
        each = [jax.jit(gradients(jtk.attention))(*(x[i] for x in given)) for i in range(2)]
    assert names.count("attention") == 1
    for i in range(2):
        for x, y in zip(mapped, each[i], strict=True):
            np.testing.assert_array_equal(np.asarray(x[i]), np.asarray(y))

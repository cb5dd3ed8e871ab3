"""Tokens are drawn from the logits of a large vocabulary by top-k and top-p.

    python examples/sampling.py

The k most probable tokens are found by ``jtk.top_k``, and those of them are kept that are needed
for a probability of p. So only k numbers of each row are sorted. The check sorts all of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

import jax_tilekern as jtk

ROWS, VOCABULARY = 64, 150_000


def kept_tokens(logits: Array, k: int, p: float) -> tuple[Array, Array]:
    """Return the k largest logits, those that top-p leaves out as -inf, and their tokens."""
    largest, tokens = jtk.top_k(logits, k)
    # Probabilities are those among all tokens.
    probabilities = jnp.exp(largest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    return jnp.where(before < p, largest, -jnp.inf), tokens


@functools.partial(jax.jit, static_argnames=("k", "p"))
def sample(key: Array, logits: Array, temperature: float, k: int, p: float) -> Array:
    """Draw a token for each row."""
    largest, tokens = kept_tokens(logits / temperature, k, p)
    place = jax.random.categorical(key, largest)
    return jnp.take_along_axis(tokens, place[:, None], axis=-1)[:, 0]


def kept_by_sort(logits: Array, k: int, p: float) -> Array:
    """Return whether each token of the vocabulary is kept, by a sort of all of them."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    probabilities = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (before < p) & (jnp.arange(logits.shape[-1]) < k)
    return jnp.zeros_like(kept).at[jnp.arange(len(logits))[:, None], order].set(kept)


def main(rows: int = ROWS, vocabulary: int = VOCABULARY, k: int = 50, p: float = 0.9) -> int:
    """Draw tokens; return how many of the rows keep others than a sort of the vocabulary does."""
    logits_key, key = jax.random.split(jax.random.key(0))
    logits = 6 * jax.random.normal(logits_key, (rows, vocabulary))
    for choice in jtk.explain(sample, key, logits, 0.8, k=k, p=p):
        print(f"{choice.call}: {choice.kernel or choice.reason}")
    largest, tokens = kept_tokens(logits, k, p)
    kept = jnp.zeros(logits.shape, bool)
    kept = kept.at[jnp.arange(rows)[:, None], tokens].set(jnp.isfinite(largest))
    wrong = int(jnp.any(kept != kept_by_sort(logits, k, p), axis=-1).sum())
    drawn = sample(key, logits, 1.0, k, p)
    outside = int((~jnp.take_along_axis(kept, drawn[:, None], axis=-1)).sum())
    print(f"{rows} rows of {vocabulary:,} tokens, of which {kept.sum(-1).mean():.1f} are kept")
    print(f"rows that keep other tokens than a sort: {wrong}; draws of other tokens: {outside}")
    return wrong + outside


if __name__ == "__main__":
    raise SystemExit(main())

"""The log of the sum of exponentials of each query, as the primitives have it: one or two arrays.

A row of scores of -1e9 has a logarithm that float32 rounds to -1e9, whatever the number of keys is.
So where a bias or a function makes the scores, there are a ``base``, which is about the largest
score, and ``log_sum``, the logarithm of the sum of exponentials of scores less the base. It is
``-inf`` for a query that sees no key. Both are of shape ``(batch, heads, queries)``.

Scores that are scaled products have the logarithm in one array, ``log_sum``, and no base. Since the
base may be any number, all of the derivative is that of ``log_sum``.
"""

from __future__ import annotations

from jax import Array

from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention.scores import Scores


def count(scores: Scores) -> int:
    """Return how many arrays there are."""
    return 2 if scores.has_score else 1


def without_base(scores: Scores, lse: Array) -> list[Array]:
    """Return a logarithm as the arrays, with a base of zero."""
    return [lse, jnp.zeros_like(lse)][: count(scores)]


def logsumexp(log_sum: Array, *base: Array) -> Array:
    """Return the logarithm from the arrays."""
    return sum(base, log_sum)

"""Point clouds are rotated onto each other by batched ``svd``, and learn which points to trust.

    python examples/alignment.py

The rotation that moves one cloud onto another with the least squared error is a product of the
singular vectors of their 3x3 covariance (Kabsch, 1976). A third of the markers moved by themselves.
Each marker's weight is found by gradients of the remaining error through all rotations.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

import jax_tilekern as jtk

CLOUDS, POINTS = 2000, 24
WRONG = POINTS // 3


def rotations(source: Array, target: Array, weights: Array) -> Array:
    """Return the best proper rotations of clouds of shape ``(..., points, 3)``."""
    covariance = jnp.einsum("...pi,p,...pj->...ij", target, weights, source)
    u, _, vt = jtk.linalg.svd(covariance)
    # A reflection is no rotation: the last axis is turned round.
    signs = jnp.ones_like(covariance[..., 0]).at[..., -1].set(jtk.linalg.det(u @ vt))
    return (u * signs[..., None, :]) @ vt


def errors(logits: Array, source: Array, target: Array) -> Array:
    """Return the squared distance of every marker after the alignment of its cloud."""
    rotation = rotations(source, target, jax.nn.softmax(logits))
    return jnp.mean(jnp.sum((source @ rotation.mT - target) ** 2, axis=-1), axis=0)


@functools.partial(jax.jit, static_argnames="rate")
def update(logits: Array, source: Array, target: Array, rate: float) -> tuple[Array, Array]:
    """Return the logits after a step of gradient descent, and the loss before it."""

    def loss(logits: Array) -> Array:
        return jnp.sum(jax.nn.softmax(logits) * errors(logits, source, target))

    value, gradient = jax.value_and_grad(loss)(logits)
    return logits - rate * gradient, value


def main(updates: int = 60) -> tuple[float, float]:
    """Learn the weights; return the largest error of a rotation before and after."""
    keys = jax.random.split(jax.random.key(0), 4)
    source = jax.random.normal(keys[0], (CLOUDS, POINTS, 3))
    true, _ = jtk.linalg.qr(jax.random.normal(keys[1], (CLOUDS, 3, 3)))
    true = true * jnp.sign(jtk.linalg.det(true))[..., None, None]
    target = source @ true.mT + 0.01 * jax.random.normal(keys[2], source.shape)
    target = target.at[:, :WRONG].add(jax.random.normal(keys[3], (CLOUDS, WRONG, 3)))
    for choice in jtk.explain(jtk.linalg.svd, jnp.zeros((CLOUDS, 3, 3))):
        print(f"svd of covariances: {choice.kernel or choice.reason}")

    logits = jnp.zeros(POINTS)
    before = jnp.abs(rotations(source, target, jax.nn.softmax(logits)) - true).max()
    for step in range(updates):
        logits, value = update(logits, source, target, rate=20.0)
        if step % 20 == 0:
            print(f"update {step:3}  loss {value:.4f}")
    weights = jax.nn.softmax(logits)
    after = jnp.abs(rotations(source, target, weights) - true).max()
    print(f"weight of the markers that moved: {weights[:WRONG].sum():.5f}")
    print(f"largest error of a rotation: {before:.3f} with equal weights, {after:.3f} after")
    return float(before), float(after)


if __name__ == "__main__":
    main()

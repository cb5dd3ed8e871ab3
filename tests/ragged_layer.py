"""A layer of ``ragged_dot`` with an epilogue, and what it means in terms of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tilekern as jtk

M, K, N, GROUPS = 40, 24, 32, 4
# An empty group, and rows past the last group.
SIZES = np.array([7, 0, 20, 9], np.int32)
# The shapes of x, w, residual, bias and scale.
SHAPES = (M, K), (GROUPS, K, N), (M, N), (GROUPS, N), (GROUPS, 1)
HIGHEST = lax.Precision.HIGHEST


def function(y, residual, bias, scale):
    return jax.nn.gelu(y * scale + bias) + residual


def fused(x, w, residual, bias, scale, sizes=SIZES, *, function=function, **kwargs):
    return jtk.ragged_dot(
        x,
        w,
        sizes,
        precision=HIGHEST,
        epilogue=function,
        operands=(residual,),
        group_operands=(bias, scale),
        **kwargs,
    )


def unfused(x, w, residual, bias, scale, sizes=SIZES, *, function=function):
    """The same by ``lax.ragged_dot`` and a gather of the operands of each row's group."""
    ends = jnp.cumsum(sizes)
    position = jnp.arange(x.shape[0])
    group = jnp.clip((ends[:, None] <= position).sum(0), 0, len(ends) - 1)
    y = lax.ragged_dot(x, w, jnp.asarray(sizes), precision=HIGHEST)
    # NaNs in rows of no group must not reach derivatives.
    inside = position[:, None] < ends[-1]
    rows = [jnp.where(inside, x, 1) for x in (y, residual, bias[group], scale[group])]
    return jax.tree.map(lambda z: jnp.where(inside, z, 0), function(*rows))


def drawn(rng):
    return [jnp.asarray(rng.normal(size=shape), np.float32) for shape in SHAPES]


def loss(call):
    return lambda *xs: jnp.sum(jnp.sin(call(*xs)))

"""Random elementwise functions of a product and of arrays that broadcast to it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tilekern as jtk

UNARY = [
    jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.silu, jax.nn.gelu, jax.nn.softplus, jax.nn.elu, lax.erf,
    jnp.round, jnp.abs, jnp.sign, lax.stop_gradient, lambda x: jnp.exp(jnp.sin(x)),
    lambda x: lax.integer_pow(jnp.sin(x), 3), lambda x: lax.integer_pow(2 + jnp.sin(x), -2),
    lambda x: x.astype(jnp.bfloat16).astype(x.dtype), lambda x: lax.clamp(-1.0, x, 0.5),
    lambda x: lax.rsqrt(1 + x * x), lambda x: jnp.power(1.5 + jnp.sin(x), 0.7),
    lambda x: jnp.clip(8 * x, -100, 100).astype(jnp.int8).astype(x.dtype) / 8,
    lambda x: ((jnp.clip(8 * x, -100, 100).astype(jnp.int32) & 7) >> 1).astype(x.dtype),
    lambda x: jnp.where(jnp.isnan(x), 0, x), jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    jax.jit(lambda x: jnp.cos(x) * 2),
]  # fmt: skip


def _of_one_rank(function):
    """Return a function whose operands of one rank ``lax`` broadcasts."""
    return lambda x, y: function(*((x, y) if x.ndim == y.ndim else jnp.broadcast_arrays(x, y)))


BINARY = [
    jnp.subtract, jnp.maximum, lambda x, y: jnp.sin(x) * y, lambda x, y: x / (1.5 + jnp.sin(y)),
    lambda x, y: jnp.where(x > y, x, 0.5 * y), lambda x, y: jnp.arctan2(x, 2 + jnp.cos(y)),
    lambda x, y: (x >= y).astype(x.dtype), _of_one_rank(lax.add), _of_one_rank(lax.min),
    _of_one_rank(lambda x, y: lax.mul(lax.sin(x), y)),
    _of_one_rank(lambda x, y: lax.div(x, 2 + lax.cos(y))),
]  # fmt: skip
# Arrays that broadcast to that which they are made of.
SMALLER = [
    lambda x: x.mean(-1, keepdims=True), lambda x: x.max(-2, keepdims=True), lambda x: x[..., :1],
    lambda x: x[..., :1, :], lambda x: x.mean(), lambda x: x.mean((-1, -2), keepdims=True),
]  # fmt: skip


def random_fusion(seed):
    """Return a function of a product and of arrays, and factors of products and such arrays."""
    rng = np.random.default_rng(seed)
    m, k, n = rng.choice([1, 2, 5, 8], 3)
    batch = [(), (1,), (3,)][rng.integers(3)]
    shapes = [
        (), (1,), (1, 1), (n,), (1, n), (m, 1), (m, n), (*batch, m, n), (*batch, 1, 1),
        (*batch, m, 1), (*batch, 1, n),
    ]  # fmt: skip
    chosen = [shapes[i] for i in rng.integers(len(shapes), size=3)]
    args = [
        rng.normal(size=shape).astype(np.float32)
        for shape in ((*batch, m, k), (*batch, k, n), (n, n), *chosen)
    ]
    steps = rng.integers(2**16, size=(rng.integers(4, 12), 3)).tolist()
    kept = rng.integers(2**16, size=rng.integers(3)).tolist()

    def after(y, *arrays, square=None):
        values = [*arrays]
        for kind, i, j in steps:
            if kind % 10 < 4 or (kind % 10 > 7 and square is None):
                y = UNARY[i % len(UNARY)](y)
            elif kind % 10 < 7:
                other = values[j % len(values)]
                y = BINARY[i % len(BINARY)](*((y, other) if j % 3 else (other, y)))
            elif kind % 10 == 7:
                values.append(UNARY[i % len(UNARY)](values[j % len(values)]))
            elif kind % 10 == 8:
                values.append(SMALLER[i % len(SMALLER)](y))
            else:
                y = y @ square / n**0.5
            values.append(y)
        return [y, *(values[i % len(values)] for i in kept)]

    return after, args


def fused(after):
    """Return a function of products and arrays, for ``fuse``."""
    return lambda x, w, square, *arrays: after(x @ w, *arrays, square=square)


def with_epilogue(after):
    """Return a product with an epilogue, and the same by JAX."""

    def ours(x, w, square, *arrays):
        del square
        # Each result is an element of the product's shape.
        return jtk.matmul(
            x,
            w,
            epilogue=lambda y, *scalars: [z + 0 * y for z in after(y, *scalars)],
            operands=arrays,
        )

    def theirs(x, w, square, *arrays):
        del square
        y = x @ w
        return [z + 0 * y for z in after(y, *arrays)]

    return ours, theirs

"""SiLU with Pallas: the kernel is a JAX function of references to blocks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

BLOCK = 256


def silu(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Return x * sigmoid(x) of a vector."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] / (1 + jnp.exp(-x[...]))

    block = pl.BlockSpec((BLOCK,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.size, BLOCK),),
        in_specs=[block],
        out_specs=block,
        interpret=interpret,
    )(x)

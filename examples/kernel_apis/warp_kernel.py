"""SiLU with Warp: a typed Python function, compiled by Warp's own NVRTC."""

import jax
import warp as wp
from warp import jax_kernel


@wp.kernel
def kernel(x: wp.array(dtype=wp.float32), out: wp.array(dtype=wp.float32)):
    """Compute an element of the result."""
    i = wp.tid()
    out[i] = x[i] / (1.0 + wp.exp(-x[i]))


_call = jax_kernel(kernel, enable_backward=True)


def silu(x: jax.Array) -> jax.Array:
    """Return x * sigmoid(x) of a vector."""
    return _call(x)[0]

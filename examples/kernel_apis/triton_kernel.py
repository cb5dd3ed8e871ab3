"""SiLU with jax-triton: Triton compiles the function when a call is lowered."""

from typing import Any

import jax
import jax_triton as jt
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def kernel(x: Any, out: Any, size: tl.constexpr, block: tl.constexpr) -> None:
    """Compute a block of the result."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + i, mask=i < size)
    tl.store(out + i, value / (1 + tl.exp(-value)), mask=i < size)


def silu(x: jax.Array) -> jax.Array:
    """Return x * sigmoid(x)."""
    return jt.triton_call(
        x,
        kernel=kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=triton.cdiv(x.size, BLOCK),
        size=x.size,
        block=BLOCK,
    )

"""SiLU of vectors with jax_tilekern: NVRTC compiles the string when a call is lowered."""

import jax
import numpy as np

import jax_tilekern as jtk

silu = jtk.cuda_kernel(
    """
    __global__ void silu(const float* x, float* out, int size) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < size) out[i] = x[i] / (1 + expf(-x[i]));
    }
    """,
    out=lambda x: x,
    grid=lambda x: -(-x.size // 256),
    block=256,
    scalars=lambda x: np.int32(x.size),
    sharding_rule="size -> size",
    reference=jax.nn.silu,
)

"""A user's kernel, with the reference that runs on a CPU."""

from __future__ import annotations

import functools

import numpy as np

import jax_tilekern as jtk
from benchmarks.catalog.bounds import F32, compared, wide
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw

_SOURCE = """
__global__ void triple(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 3 * x[i];
}
"""


@functools.cache
def _tripled():
    kernel = jtk.cuda_kernel(
        _SOURCE,
        out=lambda x: x,
        grid=lambda x: max(1, -(-x.size // 128)),
        block=128,
        scalars=lambda x: (np.int32(x.size),),
        reference=lambda x: 3 * x,
    )
    kernel.deflinear(0, lambda cotangent, x: 3 * cotangent)
    return kernel


def triple(draw: Draw, name: str) -> Call:
    """Draw an array of any rank, tripled."""
    shape = tuple(max(1, draw.size(40)) for _ in range(draw.one(1, 2, 3)))
    return Call(
        name,
        "",
        (draw.operand(shape, F32),),
        lambda m, x: _tripled()(x) if m is jtk else 3 * x,
        lambda result, x: [compared(result, 3 * wide(x), 0)],
        lambda cotangents, cotangent, x: [compared(cotangents[0], 3 * wide(cotangent), 0)],
        is_plain=False,
    )


DESCRIPTIONS = describe(triple, "cuda_kernel", linear=True)

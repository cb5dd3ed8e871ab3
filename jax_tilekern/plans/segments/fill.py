"""Plans of ``segments/fill.cuh``: an array of equal elements."""

from __future__ import annotations

import math

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars

_THREADS, _CTAS_OF_SM = 256, 8


def plan_fill(count: int, element: bytes, gpu: Gpu) -> LaunchPlan:
    """Plan the call without operands whose result has ``count`` copies of an element."""
    size = count * len(element)
    vector = math.gcd(size, VECTOR_BYTES)
    words = size // vector
    kernel = Kernel("segments/fill.cuh", f"tilekern::fill<{vector}>")
    launch = Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=(min(math.ceil(words / _THREADS), _CTAS_OF_SM * gpu.sm_count), 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(Buffer(0), Scalars.int64(words), Scalars(element * (vector // len(element)))),
    )
    return LaunchPlan(
        name=f"fill {vector} bytes",
        gpu=gpu,
        launches=(launch,),
        alignments=(vector,),
        reason=f"{words} words",
    )

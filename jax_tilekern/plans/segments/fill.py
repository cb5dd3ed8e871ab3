"""Plans of ``segments/fill.cuh``: an array of equal elements."""

from __future__ import annotations

import math

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars

_THREADS, _CTAS_OF_SM = 256, 8


def plan_fill(count: int, element: bytes, gpu: Gpu) -> LaunchPlan:
    """Plan the call without operands whose result has ``count`` copies of an element."""
    words, bytes_ = divmod(count * len(element), VECTOR_BYTES)
    kernel = Kernel("segments/fill.cuh", "tilekern::fill")
    ctas = min(math.ceil(words / _THREADS), _CTAS_OF_SM * gpu.sm_count)
    launch = Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=(max(1, ctas), 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(
            Buffer(0),
            Scalars.int64(words),
            Scalars(element * (VECTOR_BYTES // len(element))),
            Scalars.pack("i", bytes_),
        ),
    )
    return LaunchPlan(
        name="fill",
        gpu=gpu,
        launches=(launch,),
        alignments=(VECTOR_BYTES,),
        reason=f"{count} elements of {len(element)} bytes",
    )

"""Launch plans of ``attention/mma``, for float32 and for GPUs that are not Hopper's.

Operands are those of ``sm90.py``, but for a bias, which the functions of the call read.
"""

from __future__ import annotations

import math

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.attention.launches import (
    buffers_of,
    config_of,
    flags,
    kernel_of,
    plan_of,
    shape_of,
)
from jax_tilekern.plans.attention.problem import MOST_STAGED_BYTES, Attention, refusal
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars

_THREADS = 128


def plan_forward(problem: Attention, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan out and logsumexp, with a list of tiles of keys for tiles of queries.

    Where rows have bases, the logsumexp is less the base, and the last result has the bases.
    """
    if why := refusal(problem, gpu):
        return NoKernel(why)
    tiles, (features, values) = problem.tiles("forward"), problem.padded
    rows = (tiles.queries + tiles.keys, features), (tiles.keys, values)
    # Rows are 16 bytes apart.
    shared = sum(n * (width * problem.dtype.itemsize + VECTOR_BYTES) for n, width in rows)
    arrays = MOST_STAGED_BYTES if problem.functions.pointers else 0
    if shared + arrays > gpu.shared_memory_bytes:
        return NoKernel(f"tiles of {max(features, values)} features exceed the shared memory")
    buffers = buffers_of(problem, operands=3, lists=2, results=2 + problem.has_bases)
    out, log, *bases = buffers.results
    template = f"{flags(problem.is_split)}, {config_of(problem, tiles)}, "
    kernel = kernel_of(problem, "mma", "forward", "mma_attention_forward", template)
    launch = Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=(math.ceil(problem.queries / tiles.queries), problem.heads, problem.batch),
        block=(_THREADS, 1, 1),
        parameters=(
            *map(Buffer, range(3)),
            out,
            log,
            *(bases or [log]),
            *buffers.lists,
            Scalars.pack("i", problem.features),
            Scalars.pack("i", problem.value_features),
            shape_of(problem, tiles, of_keys=False),
            *buffers.arrays,
        ),
        shared_memory_bytes=shared,
    )
    return plan_of("attention", problem, gpu, buffers, launch)

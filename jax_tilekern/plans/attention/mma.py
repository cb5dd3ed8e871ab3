"""Launch plans of ``attention/mma``, for float32 and for GPUs that are not Hopper's.

Operands are those of ``sm90.py``, but for a bias, which the functions of the call read.
"""

from __future__ import annotations

import math

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.attention.launches import (
    buffers_of,
    config_of,
    deltas_of,
    flags,
    kernel_of,
    plan_of,
    shape_of,
)
from jax_tilekern.plans.attention.problem import (
    MOST_STAGED_BYTES,
    Attention,
    gradient_refusal,
    refusal,
)
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
    if why := _shared_memory_refusal(problem, gpu, shared):
        return NoKernel(why)
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


def plan_backward(problem: Attention, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the gradients of query, key and value.

    Operands are the gradient of out and statistics, with a list of tiles of queries for tiles of
    keys, and one of tiles of keys for tiles of queries.
    """
    if why := refusal(problem, gpu) or gradient_refusal(problem):
        return NoKernel(why)
    buffers = buffers_of(problem, operands=5, lists=4, results=3)
    d_query, d_key, d_value = buffers.results
    launches = []
    for name, results, lists in (
        ("keys", (d_key, d_value), buffers.lists[:2]),
        ("queries", (d_query,), buffers.lists[2:]),
    ):
        of_keys, tiles = name == "keys", problem.tiles(f"backward_{name}")
        widths = (width * problem.dtype.itemsize + VECTOR_BYTES for width in problem.padded)
        shared = (tiles.queries + tiles.keys) * sum(widths)
        if why := _shared_memory_refusal(problem, gpu, shared):
            return NoKernel(why)
        template = f"{config_of(problem, tiles)}, "
        kernel = kernel_of(problem, "mma", "backward", f"mma_attention_backward_{name}", template)
        length, tile, heads = (
            (problem.keys, tiles.keys, problem.key_heads)
            if of_keys
            else (problem.queries, tiles.queries, problem.heads)
        )
        launches.append(
            Launch(
                entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
                grid=(math.ceil(length / tile), heads, problem.batch),
                block=(_THREADS, 1, 1),
                parameters=(
                    *map(Buffer, range(5)),
                    *results,
                    *lists,
                    Scalars.int64(deltas_of(problem)),
                    Scalars.pack("i", problem.features),
                    Scalars.pack("i", problem.value_features),
                    shape_of(problem, tiles, of_keys=of_keys),
                    *buffers.arrays,
                ),
                shared_memory_bytes=shared,
            )
        )
    return plan_of("attention_gradient", problem, gpu, buffers, *launches)


def _shared_memory_refusal(problem: Attention, gpu: Gpu, shared: int) -> str:
    arrays = MOST_STAGED_BYTES if problem.functions.pointers else 0
    if shared + arrays > gpu.shared_memory_bytes:
        return f"tiles of {max(problem.padded)} features exceed the shared memory"
    return ""

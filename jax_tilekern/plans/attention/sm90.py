"""Launch plans of ``attention/sm90`` for a Hopper GPU.

The operands of a plan are query, key, value and those that its docstring names; the bias, if it is
staged; lists of the tiles that the mask leaves, if there is one; and the arrays that the functions
of the call read. A list is
two arrays, counts and tiles. Statistics of rows are those of ``backward.cuh``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.attention.launches import (
    Buffers,
    buffers_of,
    config_of,
    deltas_of,
    flags,
    kernel_of,
    plan_of,
    shape_of,
)
from jax_tilekern.plans.attention.problem import (
    CHUNK,
    ITEM_BYTES,
    ROWS,
    Attention,
    Bias,
    Tiles,
    bias_refusal,
    refusal,
    tangent_refusal,
)
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import (
    Buffer,
    Launch,
    LaunchPlan,
    NoKernel,
    Parameter,
    Scalars,
    TensorMap,
)

_WARPGROUP = 128  # threads
_BARRIERS_BYTES = 256
_STATISTICS_BYTES = 1024  # of a stage of the kernel of keys
_DIFFERENCES_BYTES = 20480  # of a consumer of the kernel of queries: difference_sums.cuh
_TENSOR_MAP_DTYPES: dict[np.dtype[Any], Any] = {BF16: "bfloat16", F16: "float16"}


def plan_forward(problem: Attention, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan out and logsumexp, with a list of tiles of keys for tiles of queries.

    Where rows have bases, the logsumexp is less the base, and the last result has the bases.
    """
    if why := refusal(problem, gpu):
        return NoKernel(why)
    tiles, (features, values) = problem.tiles("forward"), problem.padded
    buffers = buffers_of(problem, operands=3, lists=2, results=2 + problem.has_bases)
    out, log, *bases = buffers.results
    launch = _launch(
        problem,
        gpu,
        "forward",
        buffers,
        maps=_maps(problem, tiles, 0, 1, 2),
        parameters=(
            out,
            log,
            *(bases or [log]),
            *buffers.lists,
            Scalars.pack("i", problem.value_features),
        ),
        staged=tiles.queries * features + tiles.stages * tiles.keys * (features + values),
        biases=tiles.stages,
        works=math.ceil(problem.queries / tiles.queries) * problem.heads * problem.batch,
    )
    return plan_of("attention", problem, gpu, buffers, launch)


def plan_backward(problem: Attention, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the gradients of query, key and value, and by numbers of the score if it has any.

    Operands are the gradient of out and statistics, with a list of tiles of queries for tiles of
    keys, and one of tiles of keys for tiles of queries.
    """
    if why := refusal(problem, gpu):
        return NoKernel(why)
    features, values = problem.padded
    of_keys, of_queries = (problem.tiles(x) for x in ("backward_keys", "backward_queries"))
    has_numbers = problem.functions.numbers > 0
    buffers = buffers_of(problem, operands=5, lists=4, results=3 + has_numbers)
    d_query, d_key, d_value, *d_numbers = buffers.results
    deltas = Scalars.int64(deltas_of(problem))
    sizes = Scalars.pack("i", problem.features), Scalars.pack("i", problem.value_features)
    keys = _launch(
        problem,
        gpu,
        "backward_keys",
        buffers,
        maps=_maps(problem, of_keys, 0, 1, 2, 3),
        parameters=(Buffer(4), d_key, d_value, *buffers.lists[:2], deltas, *sizes),
        staged=(of_keys.keys + of_keys.stages * of_keys.queries) * (features + values),
        biases=of_keys.stages,
        others_bytes=of_keys.stages * _STATISTICS_BYTES,
    )
    queries = _launch(
        problem,
        gpu,
        "backward_queries",
        buffers,
        maps=_maps(problem, of_queries, 0, 1, 2, 3),
        parameters=(
            Buffer(4),
            d_query,
            d_numbers[0] if has_numbers else d_query,
            *buffers.lists[2:],
            deltas,
            sizes[0],
        ),
        staged=(of_queries.queries + of_queries.stages * of_queries.keys) * (features + values),
        biases=of_queries.stages,
        others_bytes=of_queries.queries // ROWS * _DIFFERENCES_BYTES
        if problem.functions.by_difference
        else 0,
    )
    return plan_of("attention_gradient", problem, gpu, buffers, keys, queries)


def plan_tangent(
    problem: Attention, moving: tuple[bool, bool, bool], gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Plan the tangents of out and logsumexp, where ``moving`` operands have tangents.

    Operands are out, statistics and the tangents of those of query, key and value that have one,
    with a list of tiles of keys for tiles of queries.
    """
    if why := refusal(problem, gpu) or tangent_refusal(problem):
        return NoKernel(why)
    tiles, (features, values) = problem.tiles("tangent"), problem.padded
    buffers = buffers_of(problem, operands=5 + sum(moving), lists=2, results=2)
    of_tangents = itertools.count(5)
    # Maps of what has no tangent are not read.
    own = [next(of_tangents) if x else i for i, x in enumerate(moving)]
    of_query, of_key, of_value = moving
    stage = (1 + of_key) * features + ((of_query or of_key) + of_value) * values
    launch = _launch(
        problem,
        gpu,
        "tangent",
        buffers,
        maps=(*_maps(problem, tiles, 0, 1, 2), *_maps(problem, tiles, *own)),
        parameters=(
            *map(Buffer, (3, 4)),
            *buffers.results,
            *buffers.lists,
            Scalars.pack("i", problem.value_features),
        ),
        staged=tiles.queries * (1 + of_query) * features + tiles.stages * tiles.keys * stage,
        template=f"tilekern::Moving{{{flags(*moving)}}}, ",
    )
    return plan_of("attention_tangent", problem, gpu, buffers, launch)


def plan_bias_gradient(problem: Attention, bias: Bias, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the gradient of a bias, of ``bias.result_shape``.

    Operands are the gradient of out and statistics. In place of a list are the kinds of tiles.
    """
    if why := refusal(problem, gpu) or bias_refusal(problem, bias):
        return NoKernel(why)
    tiles, (features, values) = problem.tiles("bias_gradient"), problem.padded
    buffers = buffers_of(problem, operands=5, lists=1, results=1)
    shape = problem.batch, *bias.shape[:2], *bias.chunks(problem), deltas_of(problem)
    launch = _launch(
        problem,
        gpu,
        "bias_gradient",
        buffers,
        maps=_maps(problem, tiles, 0, 1, 2, 3),
        parameters=(Buffer(4), *buffers.results, *buffers.lists, Scalars.pack("5iq", *shape)),
        staged=tiles.stages * (tiles.queries + tiles.keys) * max(features, values),
        biases=1,
        template=f"{flags(bias.has_queries(problem))}, {CXX_TYPES[bias.result_dtype(problem)]}, ",
        works=bias.works(problem),
    )
    return plan_of("attention_bias_gradient", problem, gpu, buffers, launch)


def _launch(
    problem: Attention,
    gpu: Gpu,
    name: str,
    buffers: Buffers,
    *,
    maps: tuple[TensorMap, ...],
    parameters: tuple[Parameter, ...],
    staged: int,
    biases: int = 0,
    others_bytes: int = 0,
    template: str = "",
    works: int | None = None,
) -> Launch:
    """Return the launch of a kernel that has ``staged`` elements of tiles in shared memory.

    Beside them and their barriers there are ``others_bytes``.
    A kernel that stages tiles of a bias has ``biases`` of them. ``works`` are those of a persistent
    kernel; others have a CTA for each tile.
    """
    tiles = problem.tiles(name)
    if biases:
        maps = (*maps, _bias_map(problem, tiles, buffers.bias))
    if problem.bias is not None:
        staged += biases * tiles.queries * tiles.keys
    file = name.partition("_")[0] if name.startswith("backward") else name
    kernel = kernel_of(
        problem, "sm90", file, f"attention_{name}", f"{config_of(problem, tiles)}, {template}"
    )
    of_keys = name == "backward_keys"
    length, tile, heads = (
        (problem.keys, tiles.keys, problem.key_heads)
        if of_keys
        else (problem.queries, tiles.queries, problem.heads)
    )
    consumers = 2 if of_keys else tile // ROWS
    return Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=(math.ceil(length / tile), heads, problem.batch)
        if works is None
        else (min(works, gpu.available_sms), 1, 1),
        block=(_WARPGROUP * (1 + consumers), 1, 1),
        parameters=(
            *maps,
            *parameters,
            shape_of(problem, tiles, of_keys=of_keys, works=works or 0),
            *buffers.arrays,
        ),
        shared_memory_bytes=staged * ITEM_BYTES + others_bytes + _BARRIERS_BYTES,
    )


def _maps(problem: Attention, tiles: Tiles, *buffers: int) -> tuple[TensorMap, ...]:
    """Return those of buffers with a query, a key, a value, and a result if there are four."""
    of_queries = tiles.queries, problem.queries, problem.heads
    of_keys = tiles.keys, problem.keys, problem.key_heads
    forms = (
        (*of_queries, problem.features),
        (*of_keys, problem.features),
        (*of_keys, problem.value_features),
        (*of_queries, problem.value_features),
    )
    return tuple(_map(problem, x, *form) for x, form in zip(buffers, forms, strict=False))


def _bias_map(problem: Attention, tiles: Tiles, bias: Buffer) -> TensorMap:
    """Return the map of the bias that is staged; without one, any that is not read."""
    (found,) = _maps(problem, tiles, bias.index)
    if problem.bias is None:
        return found
    shape = problem.bias
    return dataclasses.replace(
        found,
        sizes=(*shape[::-1], 1),
        strides_bytes=tuple(ITEM_BYTES * math.prod(shape[i:]) for i in (3, 2, 1, 0)),
    )


def _map(
    problem: Attention, buffer: int, rows: int, length: int, heads: int, features: int
) -> TensorMap:
    row = features * ITEM_BYTES
    return TensorMap(
        buffer=buffer,
        dtype=_TENSOR_MAP_DTYPES[problem.dtype],
        sizes=(features, length, heads, problem.batch, 1),
        strides_bytes=(
            heads * row,
            row,
            length * heads * row,
            problem.batch * length * heads * row,
        ),
        box=(CHUNK, rows, 1, 1, 1),
        swizzle=128,
    )

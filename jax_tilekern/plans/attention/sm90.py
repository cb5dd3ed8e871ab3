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
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, Source, compile_kernels
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
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
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
    buffers = _buffers(problem, operands=3, lists=2, results=2 + problem.has_bases)
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
    return _plan("attention", problem, gpu, buffers, launch)


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
    buffers = _buffers(problem, operands=5, lists=4, results=3 + has_numbers)
    d_query, d_key, d_value, *d_numbers = buffers.results
    deltas = Scalars.int64(_deltas(problem))
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
    return _plan("attention_gradient", problem, gpu, buffers, keys, queries)


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
    buffers = _buffers(problem, operands=5 + sum(moving), lists=2, results=2)
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
        template=f"tilekern::Moving{{{_flags(*moving)}}}, ",
    )
    return _plan("attention_tangent", problem, gpu, buffers, launch)


def plan_bias_gradient(problem: Attention, bias: Bias, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the gradient of a bias, of ``bias.result_shape``.

    Operands are the gradient of out and statistics. In place of a list are the kinds of tiles.
    """
    if why := refusal(problem, gpu) or bias_refusal(problem, bias):
        return NoKernel(why)
    tiles, (features, values) = problem.tiles("bias_gradient"), problem.padded
    buffers = _buffers(problem, operands=5, lists=1, results=1)
    shape = problem.batch, *bias.shape[:2], *bias.chunks(problem), _deltas(problem)
    launch = _launch(
        problem,
        gpu,
        "bias_gradient",
        buffers,
        maps=_maps(problem, tiles, 0, 1, 2, 3),
        parameters=(Buffer(4), *buffers.results, *buffers.lists, Scalars.pack("5iq", *shape)),
        staged=tiles.stages * (tiles.queries + tiles.keys) * max(features, values),
        biases=1,
        template=f"{_flags(bias.has_queries(problem))}, {CXX_TYPES[bias.result_dtype(problem)]}, ",
        works=bias.works(problem),
    )
    return _plan("attention_bias_gradient", problem, gpu, buffers, launch)


class _Buffers(NamedTuple):
    """The buffers of a plan behind its first operands, in their order, and how all are aligned.

    A bias that is not staged is any buffer.
    """

    bias: Buffer
    lists: Sequence[Buffer]
    arrays: Sequence[Buffer]
    results: Sequence[Buffer]
    alignments: tuple[int, ...]


def _buffers(problem: Attention, *, operands: int, lists: int, results: int) -> _Buffers:
    """Return the buffers of a plan of so many; lists that kernels do not read are any buffer."""
    has_bias = problem.bias is not None
    counts = has_bias, lists if problem.listed else 0, len(problem.functions.pointers), results
    indices = itertools.count(operands)
    bias, of_lists, arrays, of_results = ([Buffer(next(indices)) for _ in range(n)] for n in counts)
    groups = zip((operands, *counts), (VECTOR_BYTES, VECTOR_BYTES, 4, 1, VECTOR_BYTES), strict=True)
    alignments = tuple(itertools.chain(*((alignment,) * n for n, alignment in groups)))
    (of_bias,) = bias or [Buffer(0)]
    return _Buffers(of_bias, of_lists or [Buffer(0)] * lists, arrays, of_results, alignments)


def _launch(
    problem: Attention,
    gpu: Gpu,
    name: str,
    buffers: _Buffers,
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
    own_biases = problem.bias or (1, 1, 1, 1)
    if problem.bias is not None:
        staged += biases * tiles.queries * tiles.keys
    config = f"{tiles.queries}, {tiles.keys}, {problem.padded[0]}, {problem.padded[1]}"
    flags = problem.listed is not None, problem.bias is not None, problem.has_bases
    config += f", {tiles.stages}, {_flags(*flags)}"
    types = "".join(f", {x}" for x in problem.functions.pointers)
    file = name.partition("_")[0] if name.startswith("backward") else name
    kernel = Kernel(
        Source(
            f'#include "attention/sm90/{file}.cuh"\n{problem.functions.text}',
            f"attention_{file}.cu",
        ),
        f"tilekern::attention_{name}<{CXX_TYPES[problem.dtype]}, "
        f"tilekern::AttentionConfig{{{config}}}, {template}tilekern::Functions{types}>",
    )
    of_queries = problem.queries, tiles.queries, problem.heads
    of_keys = problem.keys, tiles.keys, problem.key_heads
    own, others = (of_keys, of_queries) if name == "backward_keys" else (of_queries, of_keys)
    length, tile, heads = own
    consumers = 2 if name == "backward_keys" else tile // ROWS
    count = math.ceil(length / tile)
    batches, list_heads = problem.listed or (1, 1)
    shape = Scalars.pack(
        "11if",
        problem.queries,
        problem.keys,
        problem.heads,
        problem.heads // problem.key_heads,
        count,
        works or 0,
        math.ceil(others[0] / others[1]),
        0 if batches == 1 else list_heads * count,
        0 if list_heads == 1 else count,
        *(int(size > 1) for size in own_biases[:2]),
        problem.scale,
    )
    return Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=(count, heads, problem.batch)
        if works is None
        else (min(works, gpu.available_sms), 1, 1),
        block=(_WARPGROUP * (1 + consumers), 1, 1),
        parameters=(*maps, *parameters, shape, *buffers.arrays),
        shared_memory_bytes=staged * ITEM_BYTES + others_bytes + _BARRIERS_BYTES,
    )


def _plan(
    name: str, problem: Attention, gpu: Gpu, buffers: _Buffers, *launches: Launch
) -> LaunchPlan:
    spilled = sum(launch.entry.spill_bytes for launch in launches)
    kinds = [
        "a score function" if problem.functions.has_score else "",
        "tiles that the mask leaves" if problem.listed else "",
        f"{spilled} bytes spilled" if spilled else "",
    ]
    return LaunchPlan(
        name=f"{name} {problem.dtype}",
        gpu=gpu,
        launches=launches,
        alignments=buffers.alignments,
        reason=", ".join(["tiles on tensor cores", *filter(None, kinds)]),
    )


def _deltas(problem: Attention) -> int:
    """Return the position of the first statistic that is not of a sum of exponentials."""
    return (1 + problem.has_bases) * problem.rows


def _flags(*values: bool) -> str:
    return ", ".join(str(x).lower() for x in values)


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

"""What launch plans of attention share between architectures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax_tilekern.compilation.compiler import Kernel, Source
from jax_tilekern.plans.attention.problem import Attention, Tiles
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars


class Buffers(NamedTuple):
    """The buffers of a plan behind its first operands, in their order, and how all are aligned.

    A bias that is not staged is any buffer.
    """

    bias: Buffer
    lists: Sequence[Buffer]
    arrays: Sequence[Buffer]
    results: Sequence[Buffer]
    alignments: tuple[int, ...]


def buffers_of(problem: Attention, *, operands: int, lists: int, results: int) -> Buffers:
    """Return the buffers of a plan of so many; lists that kernels do not read are any buffer."""
    has_bias = problem.bias is not None
    counts = has_bias, lists if problem.listed else 0, len(problem.functions.pointers), results
    indices = itertools.count(operands)
    bias, of_lists, arrays, of_results = ([Buffer(next(indices)) for _ in range(n)] for n in counts)
    groups = zip((operands, *counts), (VECTOR_BYTES, VECTOR_BYTES, 4, 1, VECTOR_BYTES), strict=True)
    alignments = tuple(itertools.chain(*((alignment,) * n for n, alignment in groups)))
    (of_bias,) = bias or [Buffer(0)]
    return Buffers(of_bias, of_lists or [Buffer(0)] * lists, arrays, of_results, alignments)


def kernel_of(problem: Attention, folder: str, file: str, name: str, template: str = "") -> Kernel:
    """Return a kernel of a file of ``ffi/cuda/attention``, with the functions of a call.

    ``template`` has what comes before the functions among the arguments of the template.
    """
    types = "".join(f", {x}" for x in problem.functions.pointers)
    return Kernel(
        Source(
            f'#include "attention/{folder}/{file}.cuh"\n{problem.functions.text}',
            f"attention_{file}.cu",
        ),
        f"tilekern::{name}<{CXX_TYPES[problem.dtype]}, {template}tilekern::Functions{types}>",
    )


def config_of(problem: Attention, tiles: Tiles) -> str:
    """Return the ``AttentionConfig`` of a kernel."""
    rows = f"{tiles.queries}, {tiles.keys}, {problem.padded[0]}, {problem.padded[1]}"
    of_call = flags(problem.listed is not None, problem.bias is not None, problem.has_bases)
    return f"tilekern::AttentionConfig{{{rows}, {tiles.stages}, {of_call}}}"


def shape_of(problem: Attention, tiles: Tiles, *, of_keys: bool, works: int = 0) -> Scalars:
    """Return the ``AttentionShape`` of a kernel whose CTAs have tiles of keys, or of queries."""
    counts = (
        math.ceil(problem.queries / tiles.queries),
        math.ceil(problem.keys / tiles.keys),
    )
    count, listed = counts[::-1] if of_keys else counts
    batches, list_heads = problem.listed or (1, 1)
    return Scalars.pack(
        "11if",
        problem.queries,
        problem.keys,
        problem.heads,
        problem.heads // problem.key_heads,
        count,
        works,
        listed,
        0 if batches == 1 else list_heads * count,
        0 if list_heads == 1 else count,
        *(int(size > 1) for size in (problem.bias or (1, 1))[:2]),
        problem.scale,
    )


def plan_of(
    name: str, problem: Attention, gpu: Gpu, buffers: Buffers, *launches: Launch
) -> LaunchPlan:
    """Return the plan of a pass, whose kernels run one after the other."""
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


def deltas_of(problem: Attention) -> int:
    """Return the position of the first statistic that is not of a sum of exponentials."""
    return (1 + problem.has_bases) * problem.rows


def flags(*values: bool) -> str:
    """Return booleans of CUDA."""
    return ", ".join(str(x).lower() for x in values)

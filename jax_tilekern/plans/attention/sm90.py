"""Plans of ``attention/sm90``: sizes and functions of a call, and a Hopper GPU, to launch plans."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, Source, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16, F32
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import (
    MAX_GRID,
    Buffer,
    Launch,
    LaunchPlan,
    NoKernel,
    Parameter,
    Scalars,
    TensorMap,
)

_CHUNK = 64  # features of a row of 128 bytes
_ROWS = 64  # rows of a consumer warpgroup
_WARP_ROWS = 16
# The parts of a bias's gradient are in memory, of which the lengths take no product.
_MOST_CHUNKS = 16
_MOST_ROWS = 2**31 - 1
_ITEM_BYTES = 2
_BARRIERS_BYTES = 256
_TENSOR_MAP_DTYPES: dict[np.dtype[Any], Any] = {BF16: "bfloat16", F16: "float16"}
# Rows of statistics are padded to whole tiles of the kernel that reads them by tiles.
STATISTICS_ROWS = 64


@dataclass(frozen=True)
class ScoreText:
    """The score function and the mask of a call in CUDA.

    ``text`` defines ``Functions`` (attention/sm90/forward.cuh and backward.cuh), which is made of
    pointers to the arrays that the functions read. Their types are ``pointers``.
    """

    text: str
    pointers: tuple[str, ...]
    has_score: bool
    has_mask: bool
    numbers: int = 0  # numbers of a batch and head that gradients are by


NO_FUNCTIONS = ScoreText("", (), has_score=False, has_mask=False)


@dataclass(frozen=True)
class Tiles:
    """Rows of the tiles of a kernel, which the lists of its tiles have."""

    queries: int
    keys: int
    stages: int = 2


@dataclass(frozen=True)
class Attention:
    """A call: sizes of (batch, length, heads, features) arrays, and its functions."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    features: int
    value_features: int
    dtype: np.dtype[Any]
    scale: float
    functions: ScoreText = NO_FUNCTIONS
    # Lists of tiles, if there are any: the numbers of batches and heads that have their own.
    listed: tuple[int, int] | None = None

    @property
    def padded(self) -> tuple[int, int]:
        """Features of a key and of a value in a tile."""
        chunks = math.ceil(self.features / _CHUNK), math.ceil(self.value_features / _CHUNK)
        return _CHUNK * chunks[0], _CHUNK * chunks[1]

    @property
    def statistics(self) -> int:
        """Elements of an array of statistics."""
        rows = STATISTICS_ROWS * math.ceil(self.queries / STATISTICS_ROWS)
        return self.batch * self.heads * rows

    def forward_tiles(self) -> Tiles:
        wide = max(self.padded)
        return Tiles(queries=128, keys=64 if wide > 2 * _CHUNK else 128)

    def backward_tiles(self) -> tuple[Tiles, Tiles]:
        """Return those of the kernel of keys, and of that of queries."""
        # Reads of arrays take registers, of which 128 keys leave few.
        keys = 64 if self.functions.pointers else 128
        return Tiles(queries=64, keys=128), Tiles(queries=128, keys=keys)

    def numbers_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of gradients by numbers of the score: a part for 16 queries each."""
        tiles = self.backward_tiles()[1].queries
        parts = math.ceil(self.queries / tiles) * tiles // _WARP_ROWS
        return self.batch, self.heads, parts, self.functions.numbers

    def tangent_tiles(self) -> Tiles:
        return Tiles(queries=128, keys=64)

    def bias_tiles(self) -> Tiles:
        # Functions take registers beside three accumulators.
        has_functions = self.functions.has_score or self.functions.has_mask
        return Tiles(queries=128, keys=64 if has_functions else 128, stages=3)


@dataclass(frozen=True)
class Bias:
    """A bias whose gradient is computed: its shape, and the type of the result.

    A ``staged`` bias is added in the kernel, and otherwise the functions of the call read it.
    """

    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    staged: bool

    def has_queries(self, problem: Attention) -> bool:
        return self.shape[2] == problem.queries

    def chunks(self, problem: Attention) -> tuple[int, int]:
        """Return the number of chunks of tiles of queries, and of tiles of a chunk."""
        tiles = math.ceil(problem.queries / problem.bias_tiles().queries)
        size = 1 if self.has_queries(problem) else math.ceil(tiles / _MOST_CHUNKS)
        return math.ceil(tiles / size), size

    def works(self, problem: Attention) -> int:
        keys = math.ceil(problem.keys / problem.bias_tiles().keys)
        return math.prod(self.shape[:2]) * self.chunks(problem)[0] * keys

    def result_shape(self, problem: Attention) -> tuple[int, int, int, int]:
        """Return the shape of the result, which has parts of the queries if the bias lacks them."""
        parts = self.chunks(problem)[0] * problem.bias_tiles().queries // _WARP_ROWS
        rows = problem.queries if self.has_queries(problem) else parts
        return (*self.shape[:2], rows, problem.keys)

    def result_dtype(self, problem: Attention) -> np.dtype[Any]:
        """Return the type of the result: that of the bias, or that of sums."""
        return self.dtype if self.has_queries(problem) else F32


def refusal(problem: Attention, gpu: Gpu) -> str:
    """Return why no kernel covers a call, or nothing."""
    if gpu.compute_capability[0] != 9:
        return f"kernels of attention are for Hopper, and {gpu.name} has {gpu.arch}"
    if problem.dtype not in (BF16, F16):
        return f"kernels of attention take bfloat16 and float16, not {problem.dtype}"
    for features in (problem.features, problem.value_features):
        if features * _ITEM_BYTES % VECTOR_BYTES:
            return f"rows of {features} features are no multiple of {VECTOR_BYTES} bytes"
    most = max(problem.features, problem.value_features)
    if most > 4 * _CHUNK:
        return f"kernels of attention have up to {4 * _CHUNK} features, not {most}"
    if problem.heads > MAX_GRID[1] or problem.batch > MAX_GRID[2]:
        return f"a launch has at most {MAX_GRID[1]} heads and batches"
    rows = problem.batch * problem.heads * (max(problem.queries, problem.keys) + 2 * _ROWS)
    if rows > _MOST_ROWS:
        return f"kernels of attention have at most 2**31 rows of all heads, not {rows}"
    return ""


def derivative_refusal(problem: Attention) -> str:
    """Return why no kernel covers the derivatives of a call that has a kernel, or nothing."""
    if max(problem.padded) > 2 * _CHUNK:
        return f"kernels of derivatives of attention have up to {2 * _CHUNK} features"
    return ""


def bias_refusal(problem: Attention, bias: Bias) -> str:
    """Return why no kernel covers the gradient of the bias of a call with kernels, or nothing."""
    if bias.dtype not in (F32, BF16, F16):
        return f"kernels of gradients of a bias have no {bias.dtype}"
    if why := derivative_refusal(problem):
        return why
    if bias.shape[3] != problem.keys:
        # Sums over the keys are of derivatives that cancel but for the rounding of the result.
        return "kernels of gradients of a bias have no bias that lacks keys"
    if bias.works(problem) > _MOST_ROWS:
        return "a bias has more than 2**31 tiles"
    return ""


def plan_forward(problem: Attention, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan out and logsumexp of query, key, value, lists of tiles and arrays of functions."""
    if why := refusal(problem, gpu):
        return NoKernel(why)
    tiles = problem.forward_tiles()
    features, values = problem.padded
    lists = 2 if problem.listed else 0
    out = 3 + lists + len(problem.functions.pointers)
    launch = _launch(
        problem,
        gpu,
        "forward",
        tiles,
        maps=_maps(problem, tiles, 0, 1, 2),
        parameters=(
            Buffer(out),
            Buffer(out + 1),
            *_lists(3, lists),
            Scalars.pack("i", problem.value_features),
        ),
        arrays=range(3 + lists, out),
        shared=(tiles.queries * features + tiles.stages * tiles.keys * (features + values))
        * _ITEM_BYTES,
        works=math.ceil(problem.queries / tiles.queries) * problem.heads * problem.batch,
    )
    return _plan(problem, gpu, "attention", (launch,), (3, lists, 2))


def plan_backward(problem: Attention, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the gradients of query, key and value, and by numbers of the score if it has any.

    Operands are query, key, value, the gradient of out, statistics (``backward.cuh``), lists of
    tiles of queries for tiles of keys, lists of tiles of keys for tiles of queries, and arrays.
    """
    if why := refusal(problem, gpu) or derivative_refusal(problem):
        return NoKernel(why)
    by_keys, by_queries = problem.backward_tiles()
    features, values = problem.padded
    lists = 2 if problem.listed else 0
    first_array = 5 + 2 * lists
    out = first_array + len(problem.functions.pointers)
    deltas = Scalars.int64(problem.statistics)
    sizes = Scalars.pack("i", problem.features), Scalars.pack("i", problem.value_features)
    statistics_bytes = 1024
    has_numbers = problem.functions.numbers > 0
    keys = _launch(
        problem,
        gpu,
        "backward_keys",
        by_keys,
        of_keys=True,
        maps=_maps(problem, by_keys, 0, 1, 2, 3),
        parameters=(Buffer(4), Buffer(out + 1), Buffer(out + 2), *_lists(5, lists), deltas, *sizes),
        arrays=range(first_array, out),
        shared=by_keys.keys * (features + values) * _ITEM_BYTES
        + by_keys.stages * (by_keys.queries * (features + values) * _ITEM_BYTES + statistics_bytes),
    )
    queries = _launch(
        problem,
        gpu,
        "backward_queries",
        by_queries,
        maps=_maps(problem, by_queries, 0, 1, 2, 3),
        parameters=(
            Buffer(4),
            Buffer(out),
            Buffer(out + 3 if has_numbers else out),
            *_lists(5 + lists, lists),
            deltas,
            sizes[0],
        ),
        arrays=range(first_array, out),
        shared=(by_queries.queries + by_queries.stages * by_queries.keys)
        * (features + values)
        * _ITEM_BYTES,
    )
    results = 3 + has_numbers
    return _plan(problem, gpu, "attention_gradient", (keys, queries), (5, 2 * lists, results))


def plan_tangent(
    problem: Attention, moving: tuple[bool, bool, bool], gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Plan the tangents of out and logsumexp, where ``moving`` operands have tangents.

    Operands are query, key, value, out, statistics (``backward.cuh``), the tangents of those of
    query, key and value that have one, lists of tiles of keys, and arrays.
    """
    if why := refusal(problem, gpu) or derivative_refusal(problem):
        return NoKernel(why)
    tiles = problem.tangent_tiles()
    features, values = problem.padded
    lists = 2 if problem.listed else 0
    of_tangents = iter(range(5, 5 + sum(moving)))
    # Maps of what has no tangent are not read.
    own = [next(of_tangents) if x else i for i, x in enumerate(moving)]
    first_list = 5 + sum(moving)
    first_array = first_list + lists
    out = first_array + len(problem.functions.pointers)
    of_scores = moving[0] or moving[1]
    stage = (1 + moving[1]) * features + (of_scores + moving[2]) * values
    launch = _launch(
        problem,
        gpu,
        "tangent",
        tiles,
        maps=(*_maps(problem, tiles, 0, 1, 2), *_maps(problem, tiles, *own)),
        parameters=(
            *map(Buffer, (3, 4, out, out + 1)),
            *_lists(first_list, lists),
            Scalars.pack("i", problem.value_features),
        ),
        arrays=range(first_array, out),
        shared=(tiles.queries * (1 + moving[0]) * features + tiles.stages * tiles.keys * stage)
        * _ITEM_BYTES,
        template=f"tilekern::Moving{{{', '.join(map(_constant, moving))}}}, ",
    )
    return _plan(problem, gpu, "attention_tangent", (launch,), (5 + sum(moving), lists, 2))


def plan_bias_gradient(problem: Attention, bias: Bias, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the gradient of a bias.

    Operands are query, key, value, the gradient of out, statistics (``backward.cuh``), the bias,
    the kinds of tiles if there is a mask, and arrays. The result has ``bias.result_shape``.
    """
    if why := refusal(problem, gpu) or bias_refusal(problem, bias):
        return NoKernel(why)
    tiles = problem.bias_tiles()
    features, values = problem.padded
    kinds = 1 if problem.listed else 0
    out = 6 + kinds + len(problem.functions.pointers)
    maps = _maps(problem, tiles, 0, 1, 2, 3)
    of_bias = maps[0]  # not read
    if bias.staged:
        of_bias = dataclasses.replace(
            maps[0],
            buffer=5,
            sizes=(*bias.shape[::-1], 1),
            strides_bytes=tuple(_ITEM_BYTES * math.prod(bias.shape[i:]) for i in (3, 2, 1, 0)),
        )
    launch = _launch(
        problem,
        gpu,
        "bias_gradient",
        tiles,
        maps=(*maps, of_bias),
        parameters=(
            Buffer(4),
            Buffer(out),
            Buffer(6 if kinds else 0),
            Scalars.pack(
                "5iq", problem.batch, *bias.shape[:2], *bias.chunks(problem), problem.statistics
            ),
        ),
        arrays=range(6 + kinds, out),
        shared=_ITEM_BYTES
        * (
            bias.staged * tiles.queries * tiles.keys
            + tiles.stages * (tiles.queries + tiles.keys) * max(features, values)
        ),
        template="tilekern::BiasConfig{"
        f"{', '.join(map(_constant, (bias.staged, bias.has_queries(problem))))}}}, "
        f"{CXX_TYPES[bias.result_dtype(problem)]}, ",
        works=bias.works(problem),
    )
    return _plan(problem, gpu, "attention_bias_gradient", (launch,), (6, kinds, 1))


def _launch(
    problem: Attention,
    gpu: Gpu,
    name: str,
    tiles: Tiles,
    *,
    maps: tuple[TensorMap, ...],
    parameters: tuple[Parameter, ...],
    arrays: range,
    shared: int,
    of_keys: bool = False,
    template: str = "",
    works: int | None = None,
) -> Launch:
    features, values = problem.padded
    config = (tiles.queries, tiles.keys, features, values, tiles.stages)
    text = f"{', '.join(map(str, config))}, {_constant(problem.listed is not None)}"
    types = "".join(f", {x}" for x in problem.functions.pointers)
    file = "backward" if name.startswith("backward") else name
    kernel = Kernel(
        Source(
            f'#include "attention/sm90/{file}.cuh"\n{problem.functions.text}',
            f"attention_{file}.cu",
        ),
        f"tilekern::attention_{name}<{CXX_TYPES[problem.dtype]}, "
        f"tilekern::AttentionConfig{{{text}}}, {template}tilekern::Functions{types}>",
    )
    length, other = problem.queries, problem.keys
    tile, other_tile = tiles.queries, tiles.keys
    heads = problem.heads
    if of_keys:
        length, other, tile, other_tile = other, length, other_tile, tile
        heads = problem.key_heads
    count = math.ceil(length / tile)
    grid = count, heads, problem.batch
    batches, list_heads = problem.listed or (1, 1)
    shape = Scalars.pack(
        "9if",
        problem.queries,
        problem.keys,
        problem.heads,
        problem.heads // problem.key_heads,
        count,
        works or 0,
        math.ceil(other / other_tile),
        0 if batches == 1 else list_heads * count,
        0 if list_heads == 1 else count,
        problem.scale,
    )
    return Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=grid if works is None else (min(works, gpu.available_sms), 1, 1),
        block=(2 * tile + 128, 1, 1),
        parameters=(*maps, *parameters, shape, *map(Buffer, arrays)),
        shared_memory_bytes=shared + _BARRIERS_BYTES,
    )


def _plan(
    problem: Attention,
    gpu: Gpu,
    name: str,
    launches: tuple[Launch, ...],
    buffers: tuple[int, int, int],
) -> LaunchPlan:
    operands, lists, results = buffers
    pointers = problem.functions.pointers
    alignments = (VECTOR_BYTES,) * operands + (4,) * lists + (1,) * len(pointers)
    entries = [launch.entry for launch in launches]
    spilled = sum(entry.spill_bytes for entry in entries)
    kinds = [
        "a score function" if problem.functions.has_score else "",
        "tiles that the mask leaves" if problem.listed else "",
        f"{spilled} bytes spilled" if spilled else "",
    ]
    return LaunchPlan(
        name=f"{name} {problem.dtype}",
        gpu=gpu,
        launches=launches,
        alignments=(*alignments, *(VECTOR_BYTES,) * results),
        reason=", ".join(["tiles on tensor cores", *filter(None, kinds)]),
    )


def _constant(value: bool) -> str:
    return "true" if value else "false"


def _lists(first: int, count: int) -> tuple[Buffer, Buffer]:
    """Return counts and lists; kernels without them read neither."""
    return (Buffer(first), Buffer(first + 1)) if count else (Buffer(0), Buffer(0))


def _maps(
    problem: Attention, tiles: Tiles, query: int, key: int, value: int, out: int | None = None
) -> tuple[TensorMap, ...]:
    """Return those of buffers with a query, a key, a value, and a result."""
    of_queries = tiles.queries, problem.queries, problem.heads
    of_keys = tiles.keys, problem.keys, problem.key_heads
    found = (
        _map(problem, query, *of_queries, problem.features),
        _map(problem, key, *of_keys, problem.features),
        _map(problem, value, *of_keys, problem.value_features),
    )
    if out is None:
        return found
    return *found, _map(problem, out, *of_queries, problem.value_features)


def _map(
    problem: Attention, buffer: int, rows: int, length: int, heads: int, features: int
) -> TensorMap:
    row = features * _ITEM_BYTES
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
        box=(_CHUNK, rows, 1, 1, 1),
        swizzle=128,
    )

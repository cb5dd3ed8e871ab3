"""A call of attention as its plans and estimates have it: sizes, functions in CUDA, and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.plans.gemm.arithmetic import BF16, F16, F32, cuda_arithmetic
from jax_tilekern.plans.gpu import MIN_COMPUTE_CAPABILITY, VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import MAX_GRID

CHUNK = 64  # features of a row of 128 bytes
ITEM_BYTES = 2
# Rows of statistics are padded to whole tiles of the kernel that reads them by tiles.
STATISTICS_ROWS = 64
ROWS = 64  # rows of a consumer warpgroup
_WARP_ROWS = 16
# Rows of which the kernels of mma.sync stage 32 keys and values.
_MMA_ROW_BYTES = 512
# Arrays that a score reads are copied to shared memory, up to so many bytes of all. Beside the
# tiles of a bias there are as many left.
MOST_STAGED_BYTES = 2048
# The parts of a bias's gradient are in memory, of which the lengths take no product.
_MOST_CHUNKS = 16
_MOST_ROWS = 2**31 - 1
# Arithmetics of float32 for which kernels add three products of TF32.
_SPLIT = ("f32", "f32_emulated")


@dataclass(frozen=True)
class ScoreText:
    """The score function and the mask of a call in CUDA.

    ``text`` defines ``Functions`` (attention/sm90/forward.cuh and backward.cuh), which is made of
    pointers to the arrays that the functions read. Their types are ``pointers``. A score that
    ``is_bounded`` is so small that one number has the logarithm of a sum of exponentials.
    """

    text: str
    pointers: tuple[str, ...]
    has_score: bool
    has_mask: bool
    is_bounded: bool = False
    numbers: int = 0  # numbers of a batch and head that gradients are by
    by_difference: bool = False  # whether there is one of each difference of query and key, too


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
    # The name of the precision of the products: ``precision_name``.
    precision: str = "DEFAULT"
    # Whether the kernels are those of ``wgmma``. Others are of ``mma.sync``.
    by_wgmma: bool = True
    functions: ScoreText = NO_FUNCTIONS
    # Lists of tiles, if there are any: the numbers of batches and heads that have their own.
    listed: tuple[int, int] | None = None
    # The shape of a bias whose tiles the kernels stage in shared memory. Any other is an array that
    # the functions read.
    bias: tuple[int, int, int, int] | None = None

    @property
    def padded(self) -> tuple[int, int]:
        """Features of a key and of a value in a tile, whose rows are a multiple of 128 bytes."""
        chunk = CHUNK * ITEM_BYTES // self.dtype.itemsize
        chunks = math.ceil(self.features / chunk), math.ceil(self.value_features / chunk)
        return chunk * chunks[0], chunk * chunks[1]

    @property
    def arithmetic(self) -> Any:
        """The arithmetic of the products, of which kernels have that of ``is_split`` and others."""
        return cuda_arithmetic(self.dtype, self.dtype, self.dtype, self.precision)

    @property
    def is_split(self) -> bool:
        """Whether operands are two numbers of TF32 each, of which three products are added."""
        return self.arithmetic in _SPLIT

    @property
    def has_bases(self) -> bool:
        """Whether the logarithm of a row's sum of exponentials is two numbers, one a base.

        Products of queries and keys are numbers of a size for which one number is enough.
        """
        has_score = self.functions.has_score or self.bias is not None
        return has_score and not self.functions.is_bounded

    @property
    def shares_keys(self) -> bool:
        """Whether consumers share keys, whose gradients take more registers than one has."""
        return max(self.padded) > 2 * CHUNK

    @property
    def is_widest(self) -> bool:
        """Whether tiles of 64 keys and values leave little shared memory in a gradient."""
        return sum(self.padded) > 5 * CHUNK

    @property
    def rows(self) -> int:
        """Rows of all heads, each padded as those of statistics are."""
        rows = STATISTICS_ROWS * math.ceil(self.queries / STATISTICS_ROWS)
        return self.batch * self.heads * rows

    def tiles(self, kernel: str) -> Tiles:
        """Return the tiles of a kernel of ``sm90.py`` or ``mma.py``."""
        if not self.by_wgmma:
            return self._mma_tiles(kernel)
        if kernel == "forward":
            return Tiles(queries=128, keys=64 if max(self.padded) > 2 * CHUNK else 128)
        if kernel == "backward_keys":
            return Tiles(queries=64, keys=64 if self.shares_keys else 128)
        if kernel == "backward_queries":
            if self.is_widest:
                return Tiles(queries=128, keys=32)
            # Reads of arrays take registers, and a bias shared memory: 128 keys leave few.
            reads = bool(self.functions.pointers) or self.bias is not None
            return Tiles(queries=128, keys=64 if reads or self.shares_keys else 128)
        if kernel == "tangent":
            return Tiles(queries=128, keys=64)
        # Functions take registers beside three accumulators.
        has_functions = self.functions.has_score or self.functions.has_mask
        return Tiles(queries=128, keys=64 if has_functions else 128, stages=3)

    def _mma_tiles(self, kernel: str) -> Tiles:
        """Return tiles whose accumulators fit the registers of four warps, and two CTAs an SM."""
        most = max(self.padded)
        if kernel.startswith("backward"):
            others = 64 if most <= CHUNK and not self.functions.pointers else 32
            of_keys = kernel == "backward_keys"
            return Tiles(others if of_keys else 64, 64 if of_keys else others, stages=1)
        queries = 128 if most <= 2 * CHUNK and not self.is_split else 64
        if most <= CHUNK:
            return Tiles(queries, keys=32 if self.is_split else 64, stages=1)
        # Reads of arrays take registers, and so do parts of operands.
        has_few = self.is_split or bool(self.functions.pointers)
        is_wide = most * self.dtype.itemsize > _MMA_ROW_BYTES
        return Tiles(queries, keys=16 if has_few or is_wide else 32, stages=1)

    def numbers_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of gradients by numbers of the score: a part for 16 queries each.

        Those by differences of query and key are a part for 64 queries each, from the lowest
        difference on.
        """
        tiles = self.tiles("backward_queries").queries
        rows = math.ceil(self.queries / tiles) * tiles
        if self.functions.by_difference:
            keys = math.ceil(self.keys / ROWS) * ROWS
            return self.batch, self.heads, rows // ROWS, keys + ROWS
        return self.batch, self.heads, rows // _WARP_ROWS, self.functions.numbers


@dataclass(frozen=True)
class Bias:
    """A bias whose gradient is computed: its shape, and the type of the result."""

    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]

    def has_queries(self, problem: Attention) -> bool:
        return self.shape[2] == problem.queries

    def chunks(self, problem: Attention) -> tuple[int, int]:
        """Return the number of chunks of tiles of queries, and of tiles of a chunk."""
        tiles = math.ceil(problem.queries / problem.tiles("bias_gradient").queries)
        size = 1 if self.has_queries(problem) else math.ceil(tiles / _MOST_CHUNKS)
        return math.ceil(tiles / size), size

    def works(self, problem: Attention) -> int:
        keys = math.ceil(problem.keys / problem.tiles("bias_gradient").keys)
        return math.prod(self.shape[:2]) * self.chunks(problem)[0] * keys

    def result_shape(self, problem: Attention) -> tuple[int, int, int, int]:
        """Return the shape of the result, which has parts of the queries if the bias lacks them."""
        parts = self.chunks(problem)[0] * problem.tiles("bias_gradient").queries // _WARP_ROWS
        rows = problem.queries if self.has_queries(problem) else parts
        return (*self.shape[:2], rows, problem.keys)

    def result_dtype(self, problem: Attention) -> np.dtype[Any]:
        """Return the type of the result: that of the bias, or that of sums."""
        return self.dtype if self.has_queries(problem) else F32


def has_wgmma(dtype: np.dtype[Any], gpu: Gpu) -> bool:
    """Whether the kernels of a type are those of ``wgmma``, which multiplies 16-bit types."""
    return gpu.compute_capability[0] == 9 and dtype.itemsize == ITEM_BYTES


def refusal(problem: Attention, gpu: Gpu) -> str:
    """Return why no kernel covers a call, or nothing."""
    if gpu.compute_capability < MIN_COMPUTE_CAPABILITY:
        return f"kernels of attention need compute capability 8.0, and {gpu.name} has {gpu.arch}"
    if problem.dtype not in (F32, BF16, F16):
        return f"kernels of attention take float32, bfloat16 and float16, not {problem.dtype}"
    if problem.by_wgmma and not has_wgmma(problem.dtype, gpu):
        return f"these kernels of attention are for Hopper, and {gpu.name} has {gpu.arch}"
    if problem.dtype == F32 and problem.arithmetic not in ("tf32", *_SPLIT):
        return f"kernels of attention have no float32 of precision {problem.precision}"
    for features in (problem.features, problem.value_features):
        if features * problem.dtype.itemsize % VECTOR_BYTES:
            return f"rows of {features} features are no multiple of {VECTOR_BYTES} bytes"
    most = max(problem.features, problem.value_features)
    if most > 4 * CHUNK:
        return f"kernels of attention have up to {4 * CHUNK} features, not {most}"
    if problem.heads > MAX_GRID[1] or problem.batch > MAX_GRID[2]:
        return f"a launch has at most {MAX_GRID[1]} heads and batches"
    rows = problem.batch * problem.heads * (max(problem.queries, problem.keys) + 2 * ROWS)
    if rows > _MOST_ROWS:
        return f"kernels of attention have at most 2**31 rows of all heads, not {rows}"
    return ""


def gradient_refusal(problem: Attention) -> str:
    """Return why no kernel covers the gradient of a call that has a kernel, or nothing."""
    if problem.by_wgmma:
        return ""
    if problem.is_split:
        return f"kernels of gradients of attention have no float32 of precision {problem.precision}"
    if max(problem.padded) > 2 * CHUNK:
        return f"kernels of gradients of attention by mma.sync have up to {2 * CHUNK} features"
    return ""


def tangent_refusal(problem: Attention) -> str:
    """Return why no kernel covers the tangents of a call that has a kernel, or nothing."""
    if not problem.by_wgmma:
        return "kernels of tangents of attention are for 16-bit types on Hopper"
    if max(problem.padded) > 2 * CHUNK:
        return f"kernels of tangents of attention have up to {2 * CHUNK} features"
    return ""


def bias_refusal(problem: Attention, bias: Bias) -> str:
    """Return why no kernel covers the gradient of the bias of a call with kernels, or nothing."""
    if not problem.by_wgmma:
        return "kernels of gradients of a bias are for 16-bit types on Hopper"
    if bias.dtype not in (F32, BF16, F16):
        return f"kernels of gradients of a bias have no {bias.dtype}"
    if max(problem.padded) > 2 * CHUNK:
        return f"kernels of gradients of a bias have up to {2 * CHUNK} features"
    if bias.shape[3] != problem.keys:
        # Sums over the keys are of derivatives that cancel but for the rounding of the result.
        return "kernels of gradients of a bias have no bias that lacks keys"
    if bias.works(problem) > _MOST_ROWS:
        return "a bias has more than 2**31 tiles"
    return ""


@dataclass(frozen=True)
class Pass:
    """A value of attention or a gradient, as numbers.

    Attributes
    ----------
    sizes
        The call.
    is_gradient
        Whether it is the gradient.
    share
        Of the tiles of scores that the mask leaves; 1 where arrays decide.
    has_mask, has_window, has_score, has_function
        Whether queries see some of the keys alone, those of a window, and whether scores are more
        than products, and than products and a bias.
    arrays
        How many arrays the scores and the mask read.
    of_bias, of_arrays
        Whether a kernel computes the gradient of a bias, and of how many other arrays gradients are
        wanted.
    """

    sizes: Attention
    is_gradient: bool
    share: float = 1.0
    has_mask: bool = False
    has_window: bool = False
    has_score: bool = False
    has_function: bool = False
    arrays: int = 0
    of_bias: bool = False
    of_arrays: int = 0

    @property
    def scores(self) -> float:
        """The number of scores of all tiles that the mask leaves."""
        sizes = self.sizes
        return self.share * sizes.batch * sizes.heads * sizes.queries * sizes.keys

    @property
    def operations(self) -> float:
        """The fewest multiply-adds: two products of a value, and five of a gradient."""
        return self.scores * self.features((3, 2) if self.is_gradient else (1, 1))

    @property
    def bytes(self) -> float:
        """The bytes of operands and results."""
        sizes = self.sizes
        rows = sizes.batch * sizes.queries * sizes.heads
        keys = sizes.batch * sizes.keys * sizes.key_heads
        passes = 2 if self.is_gradient else 1
        both = sizes.features + sizes.value_features
        biases = self.arrays * sizes.heads * sizes.queries * sizes.keys
        return sizes.dtype.itemsize * passes * float((rows + keys) * both + biases)

    def features(self, products: tuple[int, int]) -> int:
        """Return the multiply-adds of a score by so many products of keys and of values."""
        of_keys, of_values = products
        return of_keys * self.sizes.features + of_values * self.sizes.value_features

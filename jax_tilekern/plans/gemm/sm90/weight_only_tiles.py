"""How the CTAs of a GPU divide a product with weights of 4 or 8 bits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jax_tilekern.plans.gemm.sm90.weight_only import (
    CHUNK,
    GROUPS,
    ROW_BYTES,
    WeightOnlyProduct,
)
from jax_tilekern.plans.gpu import RESERVED_SHARED_BYTES, WARP, Gpu

TOKENS = (8, 16, 32, 64, 128)
_CONSUMER_ROWS = 64
_MAX_STAGES = 12
# Measured on an H200: more stages make products slower, by one matrix and of ragged rows.
_STAGES, _RAGGED_STAGES = 4, 3
_BARRIERS_BYTES = 2 * 8 * _MAX_STAGES
# A part of k has so many k-tiles at least, so that its partial sums are few beside its operands.
_SPLIT_K_TILES = 4


@dataclass(frozen=True)
class Tile:
    """Sizes of a CTA's tile, and how many CTAs an SM is to hold."""

    tokens: int
    consumers: int
    cooperative: bool
    stages: int
    ctas: int

    @property
    def rows(self) -> int:
        return _CONSUMER_ROWS * (self.consumers if self.cooperative else 1)

    @property
    def threads(self) -> int:
        """Those of consumers, and of a warp or, for its registers, a warpgroup that loads."""
        return 128 * self.consumers + (128 if self.tokens > 32 else WARP)

    @property
    def result_bytes(self) -> int:
        """Results of consumers that the first one adds to its own."""
        if self.cooperative:
            return 0
        return 4 * _CONSUMER_ROWS * self.tokens * (self.consumers - 1)

    def stage_bytes(self, problem: WeightOnlyProduct) -> int:
        """Shared memory of a k-tile."""
        return (self.rows + problem.block_k // CHUNK * self.tokens) * ROW_BYTES

    def other_bytes(self, problem: WeightOnlyProduct) -> int:
        """Shared memory beside stages."""
        return self.result_bytes + _BARRIERS_BYTES + problem.spans_bytes


def tile_of(problem: WeightOnlyProduct, gpu: Gpu) -> Tile:
    """Return tiles of all rows of ``x``, as far as accumulators have registers.

    A tile of few rows has two consumers along k and leaves registers for another CTA, so that loads
    and conversions overlap. Of many rows, two consumers share the tile in shared memory. One of few
    ragged rows has one consumer and leaves registers for more CTAs.
    """
    # Scales and zero points of groups of 32 take registers, too.
    many_zeros = problem.zero_dtype is not None and problem.group == GROUPS[0]
    possible = TOKENS[:-2] if many_zeros else TOKENS
    tokens = next((x for x in possible if x >= problem.rows_of_matrix), possible[-1])
    if problem.ragged and tokens <= TOKENS[1]:
        # A tile has few k-tiles, and CTAs side by side hide where it begins and ends.
        smallest = tokens == TOKENS[0] and problem.zero_dtype is None
        tile = Tile(tokens, 1, cooperative=False, stages=1, ctas=4 if smallest else 3)
        return _with_stages(problem, tile, gpu)
    # So do zero points beside another CTA of an SM.
    few = tokens <= TOKENS[1 if problem.zero_dtype is None else 0]
    tile = Tile(
        tokens,
        consumers=2,
        cooperative=not few,
        stages=1,
        ctas=2 if few else 1,
    )
    return _with_stages(problem, tile, gpu)


def _with_stages(problem: WeightOnlyProduct, tile: Tile, gpu: Gpu) -> Tile:
    """Return a tile with the stages that shared memory has room for."""
    room = (gpu.shared_memory_bytes + RESERVED_SHARED_BYTES) // tile.ctas - RESERVED_SHARED_BYTES
    room -= tile.other_bytes(problem)
    most = _RAGGED_STAGES if problem.ragged else _STAGES
    stages = min(room // tile.stage_bytes(problem), most)
    # Consumers that alternate k-tiles have stages of their own.
    along_k = 1 if tile.cooperative else tile.consumers
    return dataclasses.replace(tile, stages=stages - stages % along_k)


def split_k(problem: WeightOnlyProduct, tiles: int, tile: Tile, gpu: Gpu) -> tuple[int, int]:
    """Return parts of k, and k-tiles of each: as many CTAs as a GPU holds, if there are fewer."""
    if problem.ragged:
        return 1, problem.k_tiles
    slots = gpu.available_sms * tile.ctas
    most = max(1, problem.k_tiles // _SPLIT_K_TILES)
    split_k_tiles = math.ceil(problem.k_tiles / min(most, max(1, slots // tiles)))
    return math.ceil(problem.k_tiles / split_k_tiles), split_k_tiles

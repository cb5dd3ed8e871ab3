"""Predicted times of kernels of products with weights of 4 or 8 bits, and which is the fastest."""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.sm90.weight_only import WeightOnlyProduct
from jax_tilekern.plans.gemm.sm90.weight_only_few_rows import FewRows, few_rows, microseconds
from jax_tilekern.plans.gemm.sm90.weight_only_tiles import TOKENS, split_k, tile_of
from jax_tilekern.plans.gpu import Gpu

# Fitted to times on an H200 with arguments beyond L2: millions of weights that a microsecond
# multiplies, by bits and rows of x in a tile; microseconds of launches, and of one that adds parts
# of k or applies a function.
_WEIGHTS_IN_A_MICROSECOND = {
    4: dict(zip(TOKENS, (5.8, 5.2, 3.5, 2.75, 2.1), strict=True)),
    8: dict(zip(TOKENS, (3.9, 3.6, 3.25, 2.8, 1.85), strict=True)),
}
_LAUNCH, NEXT_LAUNCH = 4.1, 2.0


def fastest(problem: WeightOnlyProduct, gpu: Gpu) -> tuple[FewRows | None, float]:
    """Return the sizes of the kernel of few rows, if that is the fastest, and its microseconds.

    ``refusal`` has been asked.
    """
    by_tiles = _of_tiles(problem, gpu)
    found = few_rows(problem, gpu)
    if found is None or (own := microseconds(problem, found, gpu)) >= by_tiles:
        return None, by_tiles
    return found, own


def _of_tiles(problem: WeightOnlyProduct, gpu: Gpu) -> float:
    tile = tile_of(problem, gpu)
    token_tiles = math.ceil(problem.m / tile.tokens) * problem.batch
    if problem.ragged:
        # Each matrix that has rows has a tile that is not full.
        token_tiles = problem.m // tile.tokens + min(problem.batch, problem.m)
    row_tiles = math.ceil(problem.n / tile.rows) * token_tiles
    weights = token_tiles * problem.columns * problem.k / 1e6
    launches = _LAUNCH + NEXT_LAUNCH * (split_k(problem, row_tiles, tile, gpu)[0] > 1)
    return launches + weights / _WEIGHTS_IN_A_MICROSECOND[problem.bits][tile.tokens]

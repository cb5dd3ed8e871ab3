"""Whether a kernel multiplies by weights of 4 or 8 bits, or XLA by dequantised ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.arithmetic import F32
from jax_tilekern.plans.gemm.sm90.weight_only import WeightOnlyProduct
from jax_tilekern.plans.gemm.sm90.weight_only_launches import plan_weight_only
from jax_tilekern.plans.gemm.sm90.weight_only_tiles import TOKENS, split_k, tile_of
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan
from jax_tilekern.plans.policy.choice import PolicyChoice, choose
from jax_tilekern.plans.policy.workload import weight_workload

# Fitted to times on an H200 with arguments beyond L2: millions of weights that a microsecond
# multiplies, by bits and rows of x in a tile; microseconds of launches, and of one that adds parts
# of k or applies a function.
_WEIGHTS_IN_A_MICROSECOND = {
    4: dict(zip(TOKENS, (5.1, 4.3, 3.5, 2.75, 2.1), strict=True)),
    8: dict(zip(TOKENS, (4.2, 3.7, 3.25, 2.8, 1.85), strict=True)),
}
_LAUNCH, _NEXT_LAUNCH = 4.1, 2.0
# The same of XLA: millions of weights that it dequantises and that a product of few rows reads, and
# of multiply-adds; microseconds of launches, of which small products have one.
_DEQUANTISED, _READ, _MULTIPLIED, _LAUNCHES = 0.82, 2.1, 330.0, 3.7
# A product of one row with a few million weights is a sum of XLA's, which dequantises them.
_IN_A_SUM, _SUMMED, _SUM = 6.3, 1.75, 1.45
_WRITTEN_BYTES = 4e6  # that a microsecond reads or writes


@dataclass(frozen=True)
class WeightOnlyCandidate(CostedCandidate):
    """The kernel of a product, and its cost."""

    problem: WeightOnlyProduct
    cycles: float

    @property
    def key(self) -> str:
        return "weight_only"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        found = plan_weight_only(self.problem, gpu)
        assert isinstance(found, LaunchPlan), found
        return found


def choose_weight_only(
    problem: WeightOnlyProduct, gpu: Gpu, *, has_function: bool
) -> PolicyChoice[WeightOnlyCandidate]:
    """Choose the kernel, or the product of dequantised weights. ``refusal`` has been asked.

    A function of the elements that the kernel does not apply comes after it, and is part of XLA's
    side.
    """
    tile = tile_of(problem, gpu)
    matrix = problem.columns * problem.k / 1e6
    weights = problem.batch * matrix
    token_tiles = math.ceil(problem.m / tile.tokens) * problem.batch
    if problem.ragged:
        # Each matrix that has rows has a tile that is not full.
        token_tiles = problem.m // tile.tokens + min(problem.batch, problem.m)
    row_tiles = math.ceil(problem.n / tile.rows) * token_tiles
    ours = _LAUNCH + token_tiles * matrix / _WEIGHTS_IN_A_MICROSECOND[problem.bits][tile.tokens]
    ours += _NEXT_LAUNCH * (split_k(problem, row_tiles, tile, gpu)[0] > 1)
    if has_function:
        elements = problem.multiply_adds / problem.k
        ours += _NEXT_LAUNCH + 2 * F32.itemsize * elements / _WRITTEN_BYTES
    if problem.m == problem.batch == 1 and weights <= _IN_A_SUM:
        xla = _SUM + weights / _SUMMED
    else:
        xla = _LAUNCHES + weights / _DEQUANTISED
        xla += max(weights / _READ, problem.multiply_adds / 1e6 / _MULTIPLIED)
    candidate = WeightOnlyCandidate(problem, ours * gpu.rates.cycles_per_microsecond)
    weight_bytes = problem.batch * problem.n * problem.k * problem.bits / 8
    workload = weight_workload(problem.multiply_adds, weight_bytes, problem.dtype, xla)
    return choose(workload, [candidate], gpu)

"""Whether a kernel multiplies by weights of 4 or 8 bits, or XLA by dequantised ones."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.arithmetic import F32
from jax_tilekern.plans.gemm.sm90.weight_only import WeightOnlyProduct
from jax_tilekern.plans.gemm.sm90.weight_only_cost import NEXT_LAUNCH, fastest
from jax_tilekern.plans.gemm.sm90.weight_only_launches import plan_weight_only
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan
from jax_tilekern.plans.policy.choice import PolicyChoice, choose
from jax_tilekern.plans.policy.workload import weight_workload

# Fitted to times on an H200 with arguments beyond L2: millions of weights that a microsecond of XLA
# dequantises and that a product of few rows reads, and of multiply-adds; microseconds of launches,
# of which small products have one.
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
    _, ours = fastest(problem, gpu)
    weights = problem.batch * problem.columns * problem.k / 1e6
    if has_function:
        elements = problem.multiply_adds / problem.k
        ours += NEXT_LAUNCH + 2 * F32.itemsize * elements / _WRITTEN_BYTES
    if problem.m == problem.batch == 1 and weights <= _IN_A_SUM:
        xla = _SUM + weights / _SUMMED
    else:
        xla = _LAUNCHES + weights / _DEQUANTISED
        xla += max(weights / _READ, problem.multiply_adds / 1e6 / _MULTIPLIED)
    candidate = WeightOnlyCandidate(problem, ours * gpu.rates.cycles_per_microsecond)
    weight_bytes = problem.batch * problem.n * problem.k * problem.bits / 8
    workload = weight_workload(problem.multiply_adds, weight_bytes, problem.dtype, xla)
    return choose(workload, [candidate], gpu)

"""Ways to compute an operation, as planners offer them, and the choice among those of a product."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel

if TYPE_CHECKING:
    from jax_tilekern.plans.gemm.problem import Product

_C = TypeVar("_C", bound="CostedCandidate")


class Candidate(ABC):
    """One way to compute an operation, not compiled yet."""

    @property
    @abstractmethod
    def key(self) -> str:
        """A short name, unique among the candidates of a problem and stable between versions."""

    @abstractmethod
    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""


class Costed:
    """What a cost model ranks."""

    cycles: float  # The estimated cost, in cycles of the SM clock.
    numbers: tuple[float, ...] = ()  # What predictions of its time depend on besides.


class CostedCandidate(Candidate, Costed):
    """A candidate that a cost model ranks."""

    @property
    def kind(self) -> str:
        """A name that kernels share if they use registers alike."""
        return type(self).__name__

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread, beside which an epilogue has its registers."""
        return 0


def with_cycles(candidate: _C, cycles: float) -> _C:
    """Return the candidate with another estimate."""
    changed: Any = candidate
    result: _C = dataclasses.replace(changed, cycles=cycles)
    return result


class Family(NamedTuple):
    """Kernels of one design."""

    arithmetics: Collection[str]  # those that it computes in
    # The candidates for a product in one of them, or why there is none.
    candidates: Callable[[Product, Gpu], Sequence[CostedCandidate] | NoKernel]


def ranked_candidates(
    families: Sequence[Family], product: Product, gpu: Gpu
) -> list[CostedCandidate] | NoKernel:
    """Return the ways to compute a product, best first by the cost model.

    Each family decides by itself what it takes. If none takes the product, the reason is that of
    the last family that computes in its arithmetic, so the most widely usable family comes last.
    """
    answers = [
        family.candidates(product, gpu)
        for family in families
        if product.arithmetic in family.arithmetics
    ]
    refusal = NoKernel(f"no kernel computes in {product.arithmetic}")
    found: list[CostedCandidate] = []
    for answer in answers:
        if isinstance(answer, NoKernel):
            refusal = answer
        else:
            found.extend(answer)
    # sorted() keeps the order of equals.
    return sorted(found, key=lambda candidate: candidate.cycles) if found else refusal


# A kernel of wgmma that spills more bytes a thread is not chosen. Of other kernels, for which no
# speed of spilled registers was measured, none that spills is.
_FEW_SPILLED_BYTES = 256
# The part of a kernel's time that a spilled byte takes on Hopper, an estimate: exponentials of a
# cross-entropy took 1.6 ms with 148 bytes in tiles of 128x256, and 1.8 ms with none in 128x128.
_SPILLED_BYTE = 1 / 5000
# Serialized MMAs took 1.8 times as long in the gradient of a cross-entropy on an H100.
_SERIALIZED = 1.8


def fused_plan(
    candidates: Sequence[CostedCandidate], gpu: Gpu, limit: float = math.inf
) -> LaunchPlan | NoKernel:
    """Return the plan of a product's best candidate whose registers hold its epilogue.

    Candidates come best first. None of more cycles than ``limit`` is taken.
    """
    spilled: dict[str, int] = {}
    plans: list[tuple[float, LaunchPlan]] = []
    for candidate in candidates:
        if candidate.cycles >= min((cycles for cycles, _ in plans), default=limit):
            break
        # Where a kernel spills, so do others of its kind with as many accumulators, and a
        # compilation takes seconds.
        if candidate.accumulators >= spilled.get(candidate.kind, math.inf):
            continue
        plan = candidate.plan(gpu)
        entries = [launch.entry for launch in plan.launches]
        bytes_ = max(entry.spill_bytes for entry in entries)
        if bytes_ > 0:
            spilled[candidate.kind] = candidate.accumulators
        is_wgmma = any("wgmma" in entry.name for entry in entries)
        if bytes_ > (_FEW_SPILLED_BYTES if is_wgmma else 0):
            continue
        slower = 1 + bytes_ * _SPILLED_BYTE
        if any(entry.serialized for entry in entries):
            slower *= _SERIALIZED
        plans.append((slower * candidate.cycles, plan))
    plans = [found for found in plans if found[0] <= limit]
    if not plans:
        if limit < math.inf:
            return NoKernel("kernels whose registers hold the epilogue are predicted to be slower")
        return NoKernel("the epilogue takes more registers than there are beside the accumulators")
    return min(plans, key=lambda found: found[0])[1]

"""The launches of a reduction.

A pass computes it in one launch, or writes partial sums to a workspace, which a smaller reduction
adds up. So the order of additions is always the same, without atomic operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, LaunchPlan
from jax_tilekern.plans.reduction.column_sums import column_passes
from jax_tilekern.plans.reduction.problem import Pass, Reduction
from jax_tilekern.plans.reduction.row_sums import RowPass, row_passes

_MAX_CTAS = 2**31 - 1
# The number of candidates that are kept.
_MAX_CANDIDATES = 8


@dataclass(frozen=True)
class ReductionCandidate(CostedCandidate):
    """The launches of a reduction; each after the first reads the output of the one before.

    Attributes
    ----------
    passes
        In order.
    cycles
        The estimated cost.
    name
        The operation's name in ``explain``.
    swapped
        Whether the call's second operand is ``lhs``.
    """

    passes: tuple[Pass, ...]
    cycles: float
    name: str = "reduction"
    swapped: bool = False

    @property
    def key(self) -> str:
        """The kernel, its threads and its splits."""
        first = self.passes[0]
        return first.key + (f" in {first.splits} splits" if first.splits > 1 else "")

    @property
    def reason(self) -> str:
        """The choices, in words for ``explain``."""
        first = self.passes[0]
        text = f"{first.key}, {first.vector_bytes}-byte loads, {first.blocks} CTAs"
        return text + (f", {len(self.passes)} launches" if len(self.passes) > 1 else "")

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        first, *rest = self.passes
        last = self.passes[-1].reduction
        compiled = compile_kernels(*dict.fromkeys(p.kernel for p in self.passes), arch=gpu.arch)
        count = 1 if first.reduction.rhs_strides is None else 2
        operands = [Buffer(i) for i in range(count)]
        if self.swapped:
            operands.reverse()
        # Workspaces follow the result, the last of the buffers.
        partial_sums = [Buffer(count + 1 + i) for i in range(len(rest))]
        sources = [operands, *([buffer] for buffer in partial_sums)]
        alignment = max(first.vector_bytes, first.reduction.dtype.itemsize)
        return LaunchPlan(
            name=self.name,
            gpu=gpu,
            launches=tuple(
                step.launch(compiled, *source, target)
                for step, source, target in zip(
                    self.passes, sources, [*partial_sums, Buffer(count)], strict=True
                )
            ),
            alignments=(*(alignment,) * count, last.out_dtype.itemsize),
            workspace_bytes=tuple(later.reduction.bytes for later in rest),
            reason=self.reason,
        )


def reduction_passes(reduction: Reduction, gpu: Gpu) -> list[ReductionCandidate]:
    """Return the ways to compute a reduction, best first by the cost model.

    Either ``k`` or the outputs must have unit stride in ``lhs``, and ``k`` in ``rhs`` in the former
    case.
    """
    found = (
        split_pass(whole, splits, gpu)
        for whole in (*row_passes(reduction), *column_passes(reduction))
        for splits in whole.split_counts(gpu)
    )
    return best_first(found)[:_MAX_CANDIDATES]


def best_first(found: Iterable[ReductionCandidate | None]) -> list[ReductionCandidate]:
    """Sort what was found by its cost."""
    return sorted((c for c in found if c), key=lambda c: c.cycles)


def split_pass(whole: Pass, splits: int, gpu: Gpu) -> ReductionCandidate | None:
    """Split the ``k`` of a pass, and add up the partial sums; ``None`` if there is no way."""
    if whole.blocks * splits > _MAX_CTAS:
        return None
    if splits == 1:
        return ReductionCandidate((whole,), gpu.rates.launch_cycles + whole.cycles(gpu))
    first, second = whole.reduction.partial(splits, side_by_side=isinstance(whole, RowPass))
    step = dataclasses.replace(
        whole, reduction=first, splits=splits, split_stride=second.lhs_strides[-1]
    )
    rest = reduction_passes(second, gpu)
    if not rest:
        return None
    further = gpu.rates.further_launch_cycles
    return ReductionCandidate((step, *rest[0].passes), step.cycles(gpu) + further + rest[0].cycles)

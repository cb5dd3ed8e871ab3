"""The launches of a reduction.

A pass computes it in one launch, or writes partial sums to a workspace, which a smaller reduction
adds up. So the order of additions is always the same, without atomic operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, compile_kernels
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch
from jax_tilekern.plans.reduction.column_sums import column_passes
from jax_tilekern.plans.reduction.problem import Pass, Reduction
from jax_tilekern.plans.reduction.row_sums import RowPass, row_passes

_MAX_CTAS = 2**31 - 1
# The number of candidates that are kept.
_MAX_CANDIDATES = 8


@dataclass(frozen=True)
class Passes:
    """The launches of a reduction; each after the first reads the output of the one before.

    Attributes
    ----------
    passes
        In order.
    cycles
        The estimated cost.
    """

    passes: tuple[Pass, ...]
    cycles: float

    @property
    def key(self) -> str:
        """Short, and unique among those of a reduction."""
        first = self.passes[0]
        return first.key + (f" in {first.splits} splits" if first.splits > 1 else "")

    @property
    def reason(self) -> str:
        """The choices, in words for ``explain``."""
        first = self.passes[0]
        text = f"{first.key}, {first.vector_bytes}-byte loads, {first.blocks} CTAs"
        return text + (f", {len(self.passes)} launches" if len(self.passes) > 1 else "")

    @property
    def workspace_bytes(self) -> tuple[int, ...]:
        """Sizes of the partial sums that each pass writes for the next."""
        return tuple(later.reduction.bytes for later in self.passes[1:])

    @property
    def operand_alignment(self) -> int:
        """Bytes that the operands' addresses are to be multiples of."""
        first = self.passes[0]
        return max(first.vector_bytes, first.reduction.dtype.itemsize)

    def compile(self, gpu: Gpu) -> Compiled:
        """Compile the kernels.

        Raises
        ------
        NvrtcNotFound
            If there is no NVRTC to compile the kernels with.
        """
        return compile_kernels(*dict.fromkeys(p.kernel for p in self.passes), arch=gpu.arch)

    def launches(
        self, compiled: Compiled, operands: tuple[Buffer, ...], out: Buffer
    ) -> tuple[Launch, ...]:
        """Return the launches. Workspaces follow ``out``, the last of the buffers."""
        between = [Buffer(out.index + 1 + i) for i in range(len(self.passes) - 1)]
        sources = [operands, *((buffer,) for buffer in between)]
        return tuple(
            step.launch(compiled, *source, target)
            for step, source, target in zip(self.passes, sources, [*between, out], strict=True)
        )


def reduction_passes(reduction: Reduction, gpu: Gpu) -> list[Passes]:
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


def best_first(found: Iterable[Passes | None]) -> list[Passes]:
    """Sort what was found by its cost."""
    return sorted((passes for passes in found if passes), key=lambda passes: passes.cycles)


def split_pass(whole: Pass, splits: int, gpu: Gpu) -> Passes | None:
    """Split the ``k`` of a pass, and add up the partial sums; ``None`` if there is no way."""
    if whole.blocks * splits > _MAX_CTAS:
        return None
    if splits == 1:
        return Passes((whole,), gpu.rates.launch_cycles + whole.cycles(gpu))
    first, second = whole.reduction.partial(splits, side_by_side=isinstance(whole, RowPass))
    step = dataclasses.replace(
        whole, reduction=first, splits=splits, split_stride=second.lhs_strides[-1]
    )
    rest = reduction_passes(second, gpu)
    if not rest:
        return None
    further = gpu.rates.further_launch_cycles
    return Passes((step, *rest[0].passes), step.cycles(gpu) + further + rest[0].cycles)

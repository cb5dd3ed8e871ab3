"""The launches that make a reduction.

A pass takes it in one launch, or leaves partial sums in a workspace that a further, smaller
reduction adds up; so every sum is made in the same order every time, without atomic operations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, compile_kernels
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch
from jax_tilekern.plans.reduction.column_sums import column_passes
from jax_tilekern.plans.reduction.problem import Pass, Reduction
from jax_tilekern.plans.reduction.row_sums import RowPass, row_passes

_MOST_BLOCKS = 2**31 - 1
# What is left of the candidates.
_MOST_CANDIDATES = 8


@dataclass(frozen=True)
class Passes:
    """Launches that make a reduction, each but the first from what the one before has left.

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
        """What is done, in words for ``explain``."""
        first = self.passes[0]
        text = f"{first.key}, {first.vector_bytes}-byte loads, {first.blocks} blocks"
        return text + (f", {len(self.passes)} launches" if len(self.passes) > 1 else "")

    @property
    def workspace_bytes(self) -> tuple[int, ...]:
        """Sizes of the partial sums that each pass leaves to the next."""
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
    """Return the ways to make a reduction, best first by the cost model; none if there is none.

    Either ``k`` or the lines must have unit stride, and ``rhs`` too where ``k`` has it.
    """
    found: list[Passes] = []
    for whole in (*row_passes(reduction), *column_passes(reduction)):
        for splits in whole.split_counts(gpu):
            passes = _split(whole, splits, gpu)
            if passes is not None:
                found.append(passes)
    return sorted(found, key=lambda passes: passes.cycles)[:_MOST_CANDIDATES]


def _split(whole: Pass, splits: int, gpu: Gpu) -> Passes | None:
    if whole.blocks * splits > _MOST_BLOCKS:
        return None
    reduction = whole.reduction
    if splits == 1 and not reduction.outer:
        return Passes((whole,), gpu.rates.launch_cycles + whole.cycles(gpu))
    rows = isinstance(whole, RowPass)
    first, second = reduction.partial(splits, side_by_side=rows)
    step = dataclasses.replace(
        whole, reduction=first, splits=splits, split_stride=second.lhs_strides[-1]
    )
    rest = reduction_passes(second, gpu)
    if not rest:
        return None
    further = gpu.rates.further_launch_cycles
    return Passes((step, *rest[0].passes), step.cycles(gpu) + further + rest[0].cycles)

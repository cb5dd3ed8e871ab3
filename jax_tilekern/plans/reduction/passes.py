"""The launches of a reduction: one, or a second one that adds up the partial sums of chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import MAX_INT32, Buffer, LaunchPlan
from jax_tilekern.plans.reduction.problem import Reduction

# With fewer CTAs than SMs, k is divided among this many for each SM, if that leaves every thread
# loads enough and the bytes are worth a second launch. Many bytes are worth it for an even load.
_CTAS_PER_SM, _EVEN_CTAS_PER_SM = 8, 4
_MIN_LOADS, _MIN_BYTES, _MANY_BYTES = 4, 1 << 16, 1 << 27


@dataclass(frozen=True)
class ReductionCandidate(CostedCandidate):
    """The way to compute a reduction, not compiled yet."""

    passes: tuple[Reduction, ...]  # the launch, or two
    cycles: float  # of the launches and of memory
    name: str  # in ``explain``
    swapped: bool = False  # whether the call's second operand is ``lhs``

    @property
    def key(self) -> str:
        """Whether loads are along rows or columns."""
        return f"reduction of {'columns' if self.passes[0].columns else 'rows'}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        first, *rest = self.passes
        compiled = compile_kernels(*dict.fromkeys(p.kernel for p in self.passes), arch=gpu.arch)
        count = 1 if first.rhs_strides is None else 2
        result, workspace = Buffer(count), Buffer(count + 1)
        # A sum does not read its second parameter.
        lhs, rhs = Buffer(0), Buffer(count - 1)
        if self.swapped:
            lhs, rhs = rhs, lhs
        launches = [first.launch(compiled, lhs, rhs, workspace if rest else result)]
        launches += [step.launch(compiled, workspace, workspace, result) for step in rest]
        load_bytes = first.vector * first.dtype.itemsize
        return LaunchPlan(
            name=self.name,
            gpu=gpu,
            launches=tuple(launches),
            alignments=(*(load_bytes,) * count, self.passes[-1].out_dtype.itemsize),
            workspace_bytes=tuple(step.bytes for step in rest),
            reason=f"{self.key}, {load_bytes}-byte loads, {first.ctas} CTAs"
            + (", 2 launches" if rest else ""),
        )


def reduction_candidate(
    whole: Reduction, gpu: Gpu, name: str, *, swapped: bool = False
) -> ReductionCandidate | None:
    """Return the way to compute a reduction; ``None`` if its loads would be scattered."""
    if whole.columns and whole.k > 1 and whole.outputs > 1 and whole.lhs_strides[-2] != 1:
        return None
    passes: tuple[Reduction, ...] = (whole,)
    # Loads of fewer bytes than these take as long. For columns, the recorded times say so.
    narrow = 1 if whole.columns else max(1, 4 / (whole.vector * whole.dtype.itemsize))
    cycles = gpu.rates.launch_cycles + narrow * whole.bytes / gpu.rates.memory_bandwidth
    chunks = min(_CTAS_PER_SM * gpu.sm_count // whole.ctas, whole.k // (whole.k_step * _MIN_LOADS))
    few = gpu.sm_count * (_EVEN_CTAS_PER_SM if whole.bytes >= _MANY_BYTES else 1)
    if whole.ctas < few and whole.bytes >= _MIN_BYTES and chunks > 1:
        # Chunks are whole steps, so fewer may do.
        chunk_k = math.ceil(math.ceil(whole.k / whole.k_step) / chunks) * whole.k_step
        passes = whole.partial(math.ceil(whole.k / chunk_k))
        cycles += gpu.rates.next_launch_cycles
    first = passes[0]
    if max(first.slots, first.chunk_k, first.ctas) > MAX_INT32:
        return None
    return ReductionCandidate(passes, cycles, name, swapped)

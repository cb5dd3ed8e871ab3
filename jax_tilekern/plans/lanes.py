"""The launch plan of a function that each thread, or each CTA, evaluates for one lane.

The device code is ``lanes.cuh`` and ``lane_groups.cuh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, Source, compile_kernels
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.lane_cost import LaneWork
from jax_tilekern.plans.launch import (
    NOT_PREDICTED,
    Buffer,
    Launch,
    LaunchPlan,
    NoKernel,
    PredictedUs,
)
from jax_tilekern.plans.policy import current_policy

_THREADS = (128, 64, 32)
# Lanes of a CTA that copies their rows to shared memory, and its threads, all of which copy.
LANES_WITH_ROWS, THREADS_WITH_ROWS = 32, 128
# Fewer threads a CTA spread few lanes over more SMs.
_CTAS_PER_SM = 2
# Predicted times that are about equal have at most this ratio.
_EQUAL = 1.02


# Threads that may evaluate a lane together, among which the plan chooses; ``threads=`` may ask for
# others.
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class LaneKernel:
    """The text of a kernel of lanes."""

    function: str  # the C++ template, whose argument is the number of threads of a CTA
    text: str
    lanes: int
    alignments: tuple[int, ...]  # of the addresses of operands and results
    orders: tuple[tuple[int, ...], ...]  # as those of a launch plan
    workspace_bytes: int  # Size of the arrays that are too long for a thread's own memory.
    # By the threads that evaluate a lane, in order: one, or those of a group, which is a CTA.
    work: tuple[tuple[int, LaneWork], ...]
    shared_bytes: int = 0  # of a group, or of LANES_WITH_ROWS lanes

    def kernel(self, threads: int) -> Kernel:
        source = Source(self.text, f"{self.function}.cu")
        return Kernel(source, f"tilekern::{self.function}<{threads}>")


def plan_lanes(
    alone: LaneKernel, group: LaneKernel | None, asked: int | None, gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Plan a kernel, unless ``vmap`` is predicted to be faster.

    ``asked`` is the number of threads of a lane that the caller asks for.
    """
    ((_, work),) = alone.work
    kernels = [alone] if group is None else [alone, group]
    if asked is None:
        times = {
            threads: (x.kernel_us(alone.lanes, gpu, threads, kernel.shared_bytes), kernel)
            for kernel in kernels
            for threads, x in kernel.work
        }
        # Where times are equal, fewer threads wait less for each other.
        fastest = min(us for us, _ in times.values())
        threads = min(n for n, (us, _) in times.items() if us <= _EQUAL * fastest)
        ours, kernel = times[threads]
        xla = work.xla_us(gpu)
        # Loops of unknown length take as many steps on both sides: their times are no predictions.
        told = NOT_PREDICTED if work.xla_conditions else PredictedUs(ours, xla)
        if xla < ours and current_policy() != "kernels":
            of_element = "a thread" if threads == 1 else f"a group of {threads} threads"
            why = f"vmap is predicted to be faster than {of_element} for each element"
            if work.accesses and threads == 1:
                why += "; a thread reads arrays of more than 64 elements from memory, one by one"
            return NoKernel(why, told)
    else:
        threads, kernel, told = asked, kernels[-1], NOT_PREDICTED
    return _launched(kernel, threads, gpu, told)


def _launched(kernel: LaneKernel, threads: int, gpu: Gpu, told: PredictedUs) -> LaunchPlan:
    lanes, of_cta, lanes_of_cta = kernel.lanes, threads, 1
    if threads == 1 and kernel.shared_bytes:
        of_cta, lanes_of_cta = THREADS_WITH_ROWS, LANES_WITH_ROWS
    elif threads == 1:
        wanted = _CTAS_PER_SM * gpu.sm_count
        of_cta = lanes_of_cta = next((x for x in _THREADS if lanes >= wanted * x), _THREADS[-1])
    ctas = math.ceil(lanes / lanes_of_cta)
    compiled = kernel.kernel(of_cta)
    entry = compile_kernels(compiled, arch=gpu.arch).entry(compiled.name)
    launch = Launch(
        entry=entry,
        grid=(ctas, 1, 1),
        block=(of_cta, 1, 1),
        parameters=tuple(map(Buffer, range(len(kernel.alignments) + 1))),
        shared_memory_bytes=kernel.shared_bytes,
    )
    each = f"a group of {threads} threads each"
    if threads == 1:
        each = f"a thread each, in {ctas} CTAs of {of_cta} threads"
        if lanes_of_cta < of_cta:
            each += f", which copy the rows of {lanes_of_cta} elements"
    memory = {"workspace": kernel.workspace_bytes, "shared memory": kernel.shared_bytes}
    return LaunchPlan(
        name=f"{kernel.function}<{of_cta}>",
        gpu=gpu,
        launches=(launch,),
        alignments=kernel.alignments,
        orders=kernel.orders,
        workspace_bytes=(max(1, kernel.workspace_bytes),),
        predicted_us=told,
        reason=(
            f"{lanes} elements, {each}; {entry.registers} registers, {entry.spill_bytes} bytes "
            f"spilled, {entry.stack_bytes} bytes of stack"
            + "".join(f", {size} bytes of {what}" for what, size in memory.items() if size)
        ),
    )

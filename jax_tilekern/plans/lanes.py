"""The launch plan of a function that each thread evaluates for one lane (``lanes.cuh``)."""

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
# Fewer threads a CTA spread few lanes over more SMs.
_CTAS_PER_SM = 2


@dataclass(frozen=True)
class LaneKernel:
    """The text of a kernel of lanes."""

    function: str  # the C++ template, whose argument is the number of threads of a CTA
    text: str
    lanes: int
    alignments: tuple[int, ...]  # of the addresses of operands and results
    workspace_bytes: int  # Size of the arrays that are too long for a thread's own memory.
    work: LaneWork

    def kernel(self, threads: int) -> Kernel:
        source = Source(self.text, f"{self.function}.cu")
        return Kernel(source, f"tilekern::{self.function}<{threads}>")


def plan_lanes(lanes: LaneKernel, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan a kernel, unless ``vmap`` is predicted to be faster."""
    work = lanes.work
    ours, xla = work.kernel_us(lanes.lanes, gpu), work.xla_us(gpu)
    # Loops of unknown length take as many steps on both sides: their times are no predictions.
    told = NOT_PREDICTED if work.xla_conditions else PredictedUs(ours, xla)
    if xla < ours and current_policy() != "kernels":
        why = "vmap is predicted to be faster"
        if work.accesses:
            why += "; a thread reads arrays of more than 64 elements from memory, one by one"
        return NoKernel(why, told)
    wanted = _CTAS_PER_SM * gpu.sm_count
    threads = next((x for x in _THREADS if lanes.lanes >= wanted * x), _THREADS[-1])
    kernel = lanes.kernel(threads)
    entry = compile_kernels(kernel, arch=gpu.arch).entry(kernel.name)
    buffers = len(lanes.alignments)
    ctas = math.ceil(lanes.lanes / threads)
    workspace = max(1, lanes.workspace_bytes)
    launch = Launch(
        entry=entry,
        grid=(ctas, 1, 1),
        block=(threads, 1, 1),
        parameters=tuple(map(Buffer, range(buffers + 1))),
    )
    return LaunchPlan(
        name=f"{lanes.function}<{threads}>",
        gpu=gpu,
        launches=(launch,),
        alignments=lanes.alignments,
        workspace_bytes=(workspace,),
        predicted_us=told,
        reason=(
            f"{lanes.lanes} lanes in {ctas} CTAs of {threads} threads; {entry.registers} "
            f"registers, {entry.spill_bytes} bytes spilled, {entry.stack_bytes} bytes of stack"
            + (f", {lanes.workspace_bytes} bytes of workspace" if lanes.workspace_bytes else "")
        ),
    )

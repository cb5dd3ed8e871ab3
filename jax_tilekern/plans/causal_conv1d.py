"""Plans of ``causal_conv1d.cuh``: a convolution along time, or its gradient, to a launch plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.compilation.cubin import Entry
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16, F32
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.policy.setting import current_policy

CONVOLVED_DTYPES = (BF16, F16, F32)
WIDTHS = range(2, 9)
_THREADS = 128
# Adjacent channels of a thread, up to this width and above. Registers limit them: a gradient has
# weights, inputs, slopes and sums of each.
_CHANNELS, _NARROW, _CHANNELS_OF_WIDE = 4, 4, 2
# Threads for each SM, several times those that it holds at a time, so that the last ones are few;
# and the steps that they walk. Each chunk reads ``width - 1`` inputs of the chunk before.
_THREADS_PER_SM, _THREADS_PER_SM_OF_GRADIENT = 4096, 2048
_FEWEST_STEPS, _MOST_STEPS = 8, 128
_MAX_LENGTH = 2**30
# Columns and rows of a CTA that adds up parts.
_PART_COLUMNS, _PART_ROWS = 32, 8


@dataclass(frozen=True)
class CausalConv:
    """Sequences of row-major shape ``(batch, length, channels)`` and filters of ``width`` taps."""

    batch: int
    length: int
    channels: int
    width: int
    dtype: np.dtype[Any]
    activation: str | None

    @property
    def vector(self) -> int:
        """Adjacent channels of a thread."""
        most = _CHANNELS if self.width <= _NARROW else _CHANNELS_OF_WIDE
        return math.gcd(min(most, VECTOR_BYTES // self.dtype.itemsize), self.channels)

    @property
    def columns(self) -> int:
        """Threads of a CTA along the channels, a power of two."""
        needed = math.ceil(self.channels / self.vector)
        return int(min(_THREADS, 1 << (needed - 1).bit_length()))

    def kernel(self, name: str) -> Kernel:
        activation = "kSilu" if self.activation == "silu" else "kNone"
        arguments = (
            f"{CXX_TYPES[self.dtype]}, {self.width}, tilekern::Activation::{activation}, "
            f"{self.vector}, {self.columns}"
        )
        return Kernel("causal_conv1d.cuh", f"tilekern::{name}<{arguments}>")


@dataclass(frozen=True)
class _Walk:
    """How threads share the sequences out."""

    problem: CausalConv
    gpu: Gpu
    threads_per_sm: int

    @property
    def steps(self) -> int:
        """Steps of time of a thread."""
        problem = self.problem
        vectors = problem.batch * problem.length * math.ceil(problem.channels / problem.vector)
        steps = vectors // (self.gpu.sm_count * self.threads_per_sm)
        steps = _FEWEST_STEPS * math.ceil(steps / _FEWEST_STEPS)
        return min(_MOST_STEPS, max(_FEWEST_STEPS, steps))

    @property
    def chunks(self) -> int:
        """Threads along a sequence."""
        return math.ceil(self.problem.length / self.steps)

    @property
    def channel_ctas(self) -> int:
        return math.ceil(self.problem.channels / (self.problem.columns * self.problem.vector))

    @property
    def chunk_ctas(self) -> int:
        return math.ceil(self.chunks / (_THREADS // self.problem.columns))

    @property
    def ctas(self) -> int:
        return self.problem.batch * self.chunk_ctas * self.channel_ctas

    @property
    def refusal(self) -> NoKernel | None:
        if self.problem.length < _FEWEST_STEPS and current_policy() != "kernels":
            return NoKernel("XLA fuses a few steps with what surrounds them")
        if max(self.problem.length, self.problem.channels) > _MAX_LENGTH:
            return NoKernel(f"kernels convolve at most {_MAX_LENGTH} steps and channels")
        if self.ctas > MAX_GRID[0]:
            return NoKernel(f"a launch has at most {MAX_GRID[0]} CTAs")
        return None

    def launch(self, entry: Entry, buffers: Sequence[int]) -> Launch:
        problem = self.problem
        shape = Scalars.pack(
            "q6i", problem.batch, problem.length, problem.channels, self.chunks, self.steps,
            self.chunk_ctas, self.channel_ctas,
        )  # fmt: skip
        return Launch(
            entry=entry,
            grid=(self.ctas, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(*map(Buffer, buffers), shape),
        )

    def plan(self, name: str, launches: Sequence[Launch], buffers: int, parts: int) -> LaunchPlan:
        problem = self.problem
        return LaunchPlan(
            name=f"{name} {problem.dtype}",
            gpu=self.gpu,
            launches=tuple(launches),
            alignments=(problem.vector * problem.dtype.itemsize,) * buffers,
            workspace_bytes=(parts * F32.itemsize,) if parts else (),
            reason=f"{self.chunks} chunks of {self.steps} steps, {problem.vector} channels each",
        )


def plan_causal_conv1d(problem: CausalConv, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the convolution of inputs, a state, weights and a bias."""
    walk = _Walk(problem, gpu, _THREADS_PER_SM)
    if walk.refusal:
        return walk.refusal
    kernel = problem.kernel("causal_conv1d")
    entry = compile_kernels(kernel, arch=gpu.arch).entry(kernel.name)
    return walk.plan("causal_conv1d", [walk.launch(entry, range(5))], 5, 0)


def plan_causal_conv1d_gradient(problem: CausalConv, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the cotangents of these four, from them and the cotangent of the result."""
    walk = _Walk(problem, gpu, _THREADS_PER_SM_OF_GRADIENT)
    if walk.refusal:
        return walk.refusal
    kernel = problem.kernel("causal_conv1d_gradient")
    add = Kernel("causal_conv1d.cuh", "tilekern::add_causal_conv1d_parts")
    compiled = compile_kernels(kernel, add, arch=gpu.arch)
    d_weights, d_bias, parts = 7, 8, 9
    count, columns = problem.batch * walk.chunks, (problem.width + 1) * problem.channels
    adds = Launch(
        entry=compiled.entry(add.name),
        grid=(math.ceil(columns / _PART_COLUMNS), 1, 1),
        block=(_PART_COLUMNS * _PART_ROWS, 1, 1),
        parameters=(
            *map(Buffer, (parts, d_weights, d_bias)),
            *(Scalars.pack("q", n) for n in (count, problem.width * problem.channels, columns)),
        ),
    )
    launches = walk.launch(compiled.entry(kernel.name), [*range(7), parts]), adds
    return walk.plan("causal_conv1d_gradient", launches, 9, count * columns)

"""One way to compute a transpose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars
from jax_tilekern.plans.transpose.shape import VECTOR_BYTES

THREADS = 256


@dataclass(frozen=True)
class TransposeCandidate(Candidate):
    """One way to compute a transpose, in one launch; not compiled yet.

    Attributes
    ----------
    kernel
        What the compiler compiles.
    form
        What is moved: rows, or tiles of a size.
    reason
        What the kernel does, in words for ``explain``.
    count
        Vectors of rows, or tiles, which the kernel numbers.
    counts_per_block
        How many of them a CTA takes.
    layout, values
        The kernel's last parameter, as ``Scalars.pack`` takes it.
    shared_memory_bytes
        Of a CTA.
    """

    kernel: Kernel
    form: str
    reason: str
    count: int
    counts_per_block: int
    layout: str
    values: tuple[int, ...]
    shared_memory_bytes: int = 0

    @property
    def key(self) -> str:
        """The form."""
        return self.form

    @property
    def name(self) -> str:
        """The kernel's name in ``explain``."""
        return self.kernel.text.file.removesuffix(".cu")

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it.

        Raises
        ------
        NvrtcNotFound
            If there is no NVRTC to compile the kernel with.
        """
        compiled = compile_kernels(self.kernel, arch=gpu.arch)
        launch = Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(math.ceil(self.count / self.counts_per_block), 1, 1),
            block=(THREADS, 1, 1),
            parameters=(Buffer(0), Buffer(1), Scalars.pack(self.layout, *self.values)),
            shared_memory_bytes=self.shared_memory_bytes,
        )
        return LaunchPlan(
            name=self.name,
            gpu=gpu,
            launches=(launch,),
            alignments=(VECTOR_BYTES, VECTOR_BYTES),
            reason=self.reason,
        )

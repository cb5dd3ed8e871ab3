"""One way to compute a transpose."""

from __future__ import annotations

from abc import abstractmethod

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Launch, LaunchPlan
from jax_tilekern.plans.transpose.shape import VECTOR_BYTES


class TransposeCandidate(Candidate):
    """One way to compute a transpose, in one launch; not compiled yet."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """What the compiler compiles."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """What the kernel does, in words for ``explain``."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Vectors of rows, or tiles, which the kernel numbers."""

    @abstractmethod
    def launch(self, compiled: Compiled) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to."""

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
        return LaunchPlan(
            name=self.name,
            gpu=gpu,
            launches=(self.launch(compiled),),
            alignments=(VECTOR_BYTES, VECTOR_BYTES),
            reason=self.reason,
        )

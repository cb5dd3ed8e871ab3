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
        """What the compiler is asked for."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """What it does, for ``explain``."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Blocks of its grid, or tiles where blocks walk over them."""

    @abstractmethod
    def launch(self, compiled: Compiled, gpu: Gpu) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to."""

    @property
    def name(self) -> str:
        """The kernel, for ``explain``."""
        return self.kernel.file.removesuffix(".cuh")

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
            launches=(self.launch(compiled, gpu),),
            alignments=(VECTOR_BYTES, VECTOR_BYTES),
            reason=self.reason,
        )

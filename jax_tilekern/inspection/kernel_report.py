"""A kernel's use of a GPU's resources, and the code that the compiler generated for it."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_to_ptx
from jax_tilekern.compilation.disassembly import disassemble
from jax_tilekern.plans.cuda_kernel import KernelCall, KernelPlan
from jax_tilekern.plans.launch import Dim3
from jax_tilekern.plans.occupancy import Occupancy


@dataclass(frozen=True)
class KernelReport:
    """A compiled kernel, as :meth:`CudaKernel.report` returns it; prints as a table.

    Attributes
    ----------
    call
        The call, as the user made it.
    plan
        How it is launched.
    """

    call: KernelCall
    plan: KernelPlan

    @property
    def arch(self) -> str:
        """The architecture it was compiled for."""
        return self.plan.gpu.arch

    @property
    def grid(self) -> Dim3:
        """CTAs of the grid, in each dimension."""
        return self.plan.launch.grid

    @property
    def block(self) -> Dim3:
        """Threads per CTA, in each dimension."""
        return self.plan.launch.block

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.plan.launch.entry.registers

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers that a thread spills to local memory."""
        return self.plan.launch.entry.spill_bytes

    @property
    def stack_bytes(self) -> int:
        """Bytes of local memory of a thread: spilled registers, and arrays not in registers."""
        return self.plan.launch.entry.stack_bytes

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory per CTA in bytes, static and dynamic."""
        return self.plan.launch.entry.shared_memory_bytes + self.plan.launch.shared_memory_bytes

    @property
    def occupancy(self) -> Occupancy | None:
        """CTAs that an SM holds at a time, or ``None`` for a GPU that is not known."""
        return self.plan.occupancy

    def ptx(self) -> str:
        """Return the PTX that ptxas assembled."""
        return compile_to_ptx(self.call.kernel, arch=self.arch)

    def sass(self) -> str:
        """Return the SASS as text.

        Raises
        ------
        FileNotFoundError
            If ``nvdisasm`` is not installed; the message has the command that installs it.
        """
        return disassemble(self.plan.launch.entry.cubin)

    def __str__(self) -> str:
        """Return one line for each fact."""
        held = self.occupancy
        rows = {
            "kernel": self.call.name,
            "compiled for": f"{self.plan.gpu.name} ({self.arch})",
            "grid, block": f"{self.grid}, {self.block}",
            "registers": f"{self.registers} per thread, {self.spill_bytes} bytes spilled, "
            f"{self.stack_bytes} bytes of stack",
            "shared memory": f"{self.shared_memory_bytes} bytes per block",
            "occupancy": (
                f"{held.blocks} blocks per SM, {held.fraction:.0%} of its warps, "
                f"limited by {held.limit}"
                if held
                else "not known for this GPU"
            ),
        }
        return "\n".join(f"{name:14}{value}" for name, value in rows.items())

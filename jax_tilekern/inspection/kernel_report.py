"""What a kernel takes of a GPU, and the code that the compiler made of it."""

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
        What was asked for.
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
        """Blocks of the grid."""
        return self.plan.launch.grid

    @property
    def block(self) -> Dim3:
        """Threads of a block."""
        return self.plan.launch.block

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self.plan.launch.entry.registers

    @property
    def spill_bytes(self) -> int:
        """Bytes that a thread stores and loads for want of registers."""
        return self.plan.launch.entry.spill_bytes

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.plan.launch.entry.shared_memory_bytes + self.plan.launch.shared_memory_bytes

    @property
    def occupancy(self) -> Occupancy | None:
        """What a multiprocessor holds of it, or ``None`` for a GPU that is not known."""
        return self.plan.occupancy

    def ptx(self) -> str:
        """Return the PTX that the assembler got."""
        return compile_to_ptx(self.call.kernel, arch=self.arch)

    def sass(self) -> str:
        """Return the machine code in words.

        Raises
        ------
        FileNotFoundError
            If ``nvdisasm`` is not installed; the message has the command that mends it.
        """
        return disassemble(self.plan.launch.entry.cubin)

    def __str__(self) -> str:
        """Return one line for each fact."""
        held = self.occupancy
        rows = {
            "kernel": self.call.name,
            "compiled for": f"{self.plan.gpu.name} ({self.arch})",
            "grid, block": f"{self.grid}, {self.block}",
            "registers": f"{self.registers} a thread, {self.spill_bytes} bytes spilled",
            "shared memory": f"{self.shared_memory_bytes} bytes a block",
            "occupancy": (
                f"{held.blocks} blocks a multiprocessor, {held.fraction:.0%} of its warps, limited "
                f"by {held.limit}"
                if held
                else "not known for this GPU"
            ),
        }
        return "\n".join(f"{name:14}{value}" for name, value in rows.items())

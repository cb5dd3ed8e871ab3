"""
The compiled part of jax_tilekern: FFI handlers and queries of the CUDA driver.
"""

from collections.abc import Sequence
from typing import Any


class CudaDevice:
    """A GPU as the driver describes it."""

    @property
    def name(self) -> str: ...

    @property
    def compute_capability(self) -> tuple[int, int]: ...

    @property
    def sm_count(self) -> int: ...

    @property
    def shared_memory_bytes(self) -> int:
        """The most that a block can have, static and dynamic."""

    @property
    def l2_bytes(self) -> int: ...

def registrations() -> dict[str, dict[str, Any]]:
    """By platform and target, what jax.ffi.register_ffi_target takes."""

def type_registrations() -> dict[str, dict[str, Any]]:
    """
    By platform and name, what jax.ffi.register_ffi_type takes, before any target.
    """

def cuda_devices() -> list[CudaDevice] | str:
    """
    The GPUs that this process may use, or why there is none. Makes no context.
    """

def cuda_driver_version() -> tuple[int, int] | str:
    """
    The newest CUDA version that the driver supports, or why there is no driver.
    """

def why_no_peer_access() -> str:
    """
    Why not every GPU of this process can access the memory of every other, or nothing.
    """

def cpu_matmul_kernel(lhs: str, rhs: str, out: str, *, sizes: Sequence[int], lhs_strides: Sequence[int], rhs_strides: Sequence[int], out_strides: Sequence[int]) -> str:
    """
    The kernel of a CPU product, from its types and the custom call's attributes.
    """

def cpu_instruction_set() -> str:
    """The instruction set that CPU kernels use."""

def cpu_instruction_sets() -> list[str]:
    """The instruction sets that this CPU has kernels for, from low to high."""

def set_cpu_instruction_set(name: str) -> None:
    """Make CPU kernels use another instruction set; for tests."""

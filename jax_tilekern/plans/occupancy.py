"""How many blocks of a kernel a multiprocessor holds at a time.

Limits are those of NVIDIA's CUDA Programming Guide, "Technical Specifications per Compute
Capability".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Launch

_WARP = 32
_REGISTERS = 65536
# Registers are given to a warp in units, and warps live in four partitions.
_REGISTER_UNIT = 256
_PARTITIONS = 4
# Of each block, for the system.
_RESERVED_SHARED_MEMORY = 1024
# By compute capability: threads, blocks, and bytes of shared memory of a multiprocessor.
_LIMITS = {
    (7, 5): (1024, 16, 64 << 10),
    (8, 0): (2048, 32, 164 << 10),
    (8, 6): (1536, 16, 100 << 10),
    (8, 7): (1536, 16, 164 << 10),
    (8, 9): (1536, 24, 100 << 10),
    (9, 0): (2048, 32, 228 << 10),
    (10, 0): (2048, 32, 228 << 10),
    (10, 3): (2048, 32, 228 << 10),
    (11, 0): (1536, 24, 228 << 10),
    (12, 0): (1536, 24, 100 << 10),
    (12, 1): (1536, 24, 100 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """What a multiprocessor holds of a kernel.

    Attributes
    ----------
    blocks
        Blocks at a time.
    fraction
        Their warps, of those that it could hold.
    limit
        What keeps it from holding more: ``"threads"``, ``"blocks"``, ``"registers"`` or ``"shared
        memory"``.
    """

    blocks: int
    fraction: float
    limit: str


def occupancy(launch: Launch, gpu: Gpu) -> Occupancy | None:
    """Return what a multiprocessor holds of a launch, or ``None`` for a GPU that is not known."""
    limits = _LIMITS.get(gpu.compute_capability)
    if limits is None:
        return None
    threads, blocks, shared_memory = limits
    warps = -(-math.prod(launch.block) // _WARP)
    registers = -(-launch.entry.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    warps_by_registers = _REGISTERS // _PARTITIONS // max(registers, 1) * _PARTITIONS
    shared = launch.entry.shared_memory_bytes + launch.shared_memory_bytes
    unit = 256
    if gpu.compute_capability >= (8, 0):
        shared += _RESERVED_SHARED_MEMORY
        unit = 128
    shared = -(-shared // unit) * unit
    most = {
        "threads": threads // _WARP // warps,
        "blocks": blocks,
        "registers": warps_by_registers // warps,
        "shared memory": shared_memory // max(shared, 1),
    }
    limit = min(most, key=lambda what: most[what])
    return Occupancy(most[limit], most[limit] * warps * _WARP / threads, limit)

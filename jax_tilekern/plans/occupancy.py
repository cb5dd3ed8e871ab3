"""How many CTAs of a kernel an SM holds at a time.

The limits are those of NVIDIA's CUDA Programming Guide, "Technical Specifications per Compute
Capability".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.plans.gpu import RESERVED_SHARED_BYTES, SM_REGISTERS, WARP, Gpu
from jax_tilekern.plans.launch import Launch

# A warp gets registers in units, and warps belong to four partitions.
_REGISTER_UNIT = 256
_PARTITIONS = 4
# By compute capability: threads, CTAs, and bytes of shared memory of an SM.
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
    """How many CTAs of a kernel an SM holds.

    Attributes
    ----------
    blocks
        CTAs at a time.
    fraction
        Their share of the warps that an SM can hold.
    limit
        The resource that limits them: ``"threads"``, ``"blocks"``, ``"registers"`` or ``"shared
        memory"``.
    """

    blocks: int
    fraction: float
    limit: str


def occupancy(launch: Launch, gpu: Gpu) -> Occupancy | None:
    """Return how many CTAs an SM holds, or ``None`` for a GPU that is not known."""
    limits = _LIMITS.get(gpu.compute_capability)
    if limits is None:
        return None
    threads, blocks, shared_memory = limits
    warps = -(-math.prod(launch.block) // WARP)
    registers = -(-launch.entry.registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    warps_by_registers = SM_REGISTERS // _PARTITIONS // max(registers, 1) * _PARTITIONS
    shared = launch.entry.shared_memory_bytes + launch.shared_memory_bytes
    unit = 256
    if gpu.compute_capability >= (8, 0):
        shared += RESERVED_SHARED_BYTES
        unit = 128
    shared = -(-shared // unit) * unit
    limits_of = {
        "threads": threads // WARP // warps,
        "blocks": blocks,
        "registers": warps_by_registers // warps,
        "shared memory": shared_memory // max(shared, 1),
    }
    limit = min(limits_of, key=lambda what: limits_of[what])
    return Occupancy(limits_of[limit], limits_of[limit] * warps * WARP / threads, limit)

"""The launch and the memory of ``gemm/sm90/dynamic_tile_scheduler.cuh``."""

from __future__ import annotations

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.launch import Buffer, Launch

# The workspace that counts the tiles which clusters have claimed.
CLAIMED_BYTES = 4
# Shared memory of the ring that broadcasts work tiles to a CTA's threads (WorkTileRing), and of its
# alignment.
RING_BYTES = 16 + 4 * (64 + 2 * 8) + 8
CLEAR_CLAIMED = Kernel("gemm/sm90/dynamic_tile_scheduler.cuh", "tilekern::clear_claimed_tiles")


def clear_claimed(compiled: Compiled, claimed: Buffer) -> Launch:
    """Return the launch that comes before the kernel: no tile has been claimed."""
    return Launch(
        entry=compiled.entry(CLEAR_CLAIMED.name),
        grid=(1, 1, 1),
        block=(1, 1, 1),
        parameters=(claimed,),
    )

"""Copies between the host and a device, through page-locked memory and in chunks.

XLA copies pageable memory to a GPU in two steps that do not overlap: one thread fills a page-locked
buffer, and then the GPU reads it. Here a chunk is first put into ``pinned_host`` memory, which XLA
does on a thread of its own for each chunk, and then copied to the device at the bus's rate.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

# About 16 chunks are filled at a time. The cost of dispatch is small at these sizes.
_LARGEST_CHUNK = 64 << 20
_SMALLEST_CHUNK = 1 << 20


class _Chunk(NamedTuple):
    """Rows of a matrix on their way to a device."""

    shape: tuple[int, ...]
    start: int
    rows: Array
    is_last: bool


def to_device(
    parts: Iterable[np.ndarray[Any, Any]], device: jax.Device, ahead_bytes: int
) -> Iterator[Array | None]:
    """Copy matrices to a device; yield each when it is there, and ``None`` after other chunks.

    Chunks are copied up to ``ahead_bytes`` before they are needed, and a program on the device
    writes each to its place. XLA starts a copy after the programs that were dispatched before it,
    which may use its memory, so a copy overlaps with a product only if it was dispatched first.
    """
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    there = SingleDeviceSharding(device)
    coming: collections.deque[_Chunk] = collections.deque()
    coming_bytes = 0
    array: Array | None = None

    def arrive() -> Array | None:
        nonlocal array, coming_bytes
        shape, start, rows, is_last = coming.popleft()
        coming_bytes -= rows.nbytes
        # Page-locked memory would otherwise have no bound.
        jax.block_until_ready(rows)
        if array is None:
            array = jnp.empty(shape, rows.dtype, device=device)
        array = _placed(array, rows, start)
        if not is_last:
            return None
        whole, array = array, None
        return whole

    for part in parts:
        size = _chunk_rows(part, ahead_bytes)
        for start in range(0, len(part), size):
            rows = part[start : start + size]
            # Two further chunks are being written to their places.
            while coming and coming_bytes + 3 * rows.nbytes > ahead_bytes:
                yield arrive()
            copy = jax.device_put(jax.device_put(rows, host), there)
            coming.append(_Chunk(part.shape, start, copy, start + size >= len(part)))
            coming_bytes += rows.nbytes
            # The queue has the only reference, so that the memory is free again after its use.
            del copy
    while coming:
        yield arrive()


def to_host(array: Array, device: jax.Device) -> Array:
    """Copy to page-locked memory, where NumPy reads it without another copy."""
    result: Array = jax.device_put(array, SingleDeviceSharding(device, memory_kind="pinned_host"))
    return result


def _chunk_rows(part: np.ndarray[Any, Any], ahead_bytes: int) -> int:
    largest = min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, ahead_bytes // 16), ahead_bytes)
    return max(1, largest // (part.nbytes // len(part)))


@functools.partial(jax.jit, donate_argnums=0)
def _placed(array: Array, rows: Array, start: Any) -> Array:
    return lax.dynamic_update_slice(array, rows, (start, 0))

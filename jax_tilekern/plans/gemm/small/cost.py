"""The cost model of ``gemm/small/small_matmul.cuh``.

Its constants were fitted to 3204 tiles of 627 random products on an H100 (``docs/tuning-log.md``).
"""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.small.config import SmallInstance
from jax_tilekern.plans.gemm.small.rows import Rows, k_step, lane_bytes
from jax_tilekern.plans.gpu import RESERVED_SHARED_BYTES, SM_REGISTERS, Gpu

# Cycles of a launch of which one warp computes nothing.
_LAUNCH_CYCLES = 3600
# The part of the time of reading and writing each array once that adds to the rest, and the cycles
# of an SM for a byte that its CTAs copy to shared memory.
_MEMORY, _COPIED_BYTE = 0.35, 0.017
# Cycles of an SM for an instruction of a warp: a load from shared memory, one that prepares
# operands, one that multiplies, a store to shared memory, and those that copy a vector.
_LOAD, _PREPARATION, _MULTIPLICATION, _STORE, _COPY = 0.2, 0.55, 0.13, 2.1, 7.9
# Cycles that a warp waits: for a load, for the copy of a vector, for the other warps that share its
# part of the tile, and for a chunk of k.
_LOAD_LATENCY, _COPY_LATENCY, _REDUCTION_LATENCY, _CHUNK_LATENCY = 1.9, 103.0, 93.0, 106.0
# These times overlap little: they are added up in the norm of this power.
_OVERLAP = 1.05
# The largest numbers of threads and of CTAs of an SM.
_THREADS, _CTAS = 2048, 32
# Registers of a thread beside accumulators and operands.
_OTHER_REGISTERS = 28


def small_cycles(instance: SmallInstance, gpu: Gpu) -> float:
    """Estimate the cycles of a launch."""
    product, tile = instance.product, instance.tile
    k = product.geometry.k
    chunks = math.ceil(k / instance.chunk_k)
    steps = math.ceil(min(k, instance.chunk_k) / k_step(product) / tile.warps_k) * chunks
    loads, preparations = _instructions_of_a_step(instance)
    results = 4 * tile.fragments_m * tile.fragments_n
    copies = chunks * (_copies(instance.lhs) + _copies(instance.rhs)) + _copies(instance.out)
    partial = 0 if instance.out.aligned or instance.out.flat else _rows_of_a_thread(instance.out)

    instructions = (
        steps * (_LOAD * loads + _PREPARATION * preparations + _MULTIPLICATION * _mmas(instance))
        + _STORE * results / tile.warps_k
        + _COPY * (copies + partial)
    )
    latency = steps * _LOAD_LATENCY * (2 + loads) + _COPY_LATENCY * (copies + 2 * partial)
    latency += _CHUNK_LATENCY * (chunks - 1)
    if tile.warps_k > 1:
        latency += _REDUCTION_LATENCY * (1 + results * (tile.warps_k - 1) / 16)
    per_sm = math.ceil(instance.ctas / gpu.available_sms)
    copied = chunks * (_vectors(instance.lhs) + _vectors(instance.rhs)) * 16
    times = (
        _MEMORY * product.memory_cycles(gpu),
        _COPIED_BYTE * copied * instance.ctas / gpu.available_sms,
        per_sm * tile.warps * instructions,
        math.ceil(per_sm / _resident_ctas(instance, gpu)) * latency,
    )
    return float(_LAUNCH_CYCLES + sum(time**_OVERLAP for time in times) ** (1 / _OVERLAP))


def _lines(instance: SmallInstance) -> tuple[int, int]:
    """Return the rows and the columns of a lane."""
    tile = instance.tile
    columns = 2 if instance.product.arithmetic == "f32" else 1
    return 2 * tile.fragments_m, columns * tile.fragments_n


def _mmas(instance: SmallInstance) -> int:
    """Return the instructions of a step that multiply."""
    fragments = instance.tile.fragments_m * instance.tile.fragments_n
    each = {"f32": 16, "f64": 4}.get(instance.product.arithmetic, 2 if instance.widen else 1)
    return each * fragments


def _instructions_of_a_step(instance: SmallInstance) -> tuple[float, float]:
    """Return a lane's loads in a step, and the instructions that prepare what it loaded."""
    product = instance.product
    words = lane_bytes(product) // 4
    loads = preparations = 0.0
    for rows, lines, dtype in zip(
        (instance.lhs, instance.rhs), _lines(instance), product.dtypes[:2], strict=True
    ):
        if not rows.k_major:
            elements = 4 * words // dtype.itemsize
            loads_of_one, packing = _instructions_across_k(rows, lines, dtype.itemsize)
            loads += loads_of_one * elements
            preparations += packing * elements
        elif rows.load_bytes < 4:
            loads += lines * (words + 1)
            preparations += lines * words
        else:
            loads += lines * 4 * words / rows.load_bytes
        if product.arithmetic == "tf32":
            preparations += lines * 2
        if instance.widen:
            preparations += lines * 4
    return loads, preparations


def _instructions_across_k(rows: Rows, lines: int, itemsize: int) -> tuple[float, float]:
    """Return the loads of a lane's lines at one ``k``, and the instructions that pack them."""
    # Each k has an address of its own where rows start at different distances from vectors.
    packing = 0.0 if rows.uniform else 1.0
    if itemsize >= 4:
        return float(lines), packing
    # Four unaligned bytes are shifted out of two words. Each k has its own address of these words.
    shifted = rows.load_bytes == 1
    at_once = 4 if shifted else rows.load_bytes // itemsize
    loads = 0.0
    while lines:
        while lines < at_once:
            at_once //= 4 if shifted else 2
        words = 2 if shifted and at_once == 4 else 1
        loads += words
        # A word of two elements takes one permutation. One of four takes another, and two that it
        # shares with the line beside it.
        packing += at_once / 2 if itemsize == 2 else (max(at_once, 2) + at_once) / 4
        packing += 2 * (words - 1)
        lines -= at_once
    return loads, packing


def _vectors(rows: Rows) -> float:
    """Return the vectors of 16 bytes that hold a tile's rows."""
    if rows.flat:
        return ((rows.count - 1) * rows.stride + rows.row_bytes) / 16
    return float(rows.count * rows.vectors)


def _rows_of_a_thread(rows: Rows) -> int:
    return math.ceil(rows.count * rows.threads_per_row / rows.threads)


def _copies(rows: Rows) -> int:
    """Return the vectors that a thread copies."""
    if rows.flat:
        return math.ceil(_vectors(rows) / rows.threads)
    return _rows_of_a_thread(rows) * math.ceil(rows.vectors / rows.threads_per_row)


def _resident_ctas(instance: SmallInstance, gpu: Gpu) -> int:
    """Estimate how many CTAs an SM holds at a time."""
    tile = instance.tile
    words = lane_bytes(instance.product) // 4
    accumulators = 4 * tile.fragments_m * tile.fragments_n
    if instance.product.arithmetic == "f64":
        accumulators *= 2
    registers = min(_OTHER_REGISTERS + accumulators + sum(_lines(instance)) * words, 255)
    shared = instance.shared_memory_bytes + RESERVED_SHARED_BYTES
    limits = (
        _THREADS // tile.threads,
        _CTAS,
        (gpu.shared_memory_bytes + RESERVED_SHARED_BYTES) // shared,
        SM_REGISTERS // (tile.threads * registers),
    )
    return max(1, min(limits))

"""Products by blocks: reading, copies in both directions, products and writing overlap."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.products.matmul import matmul as device_matmul
from jax_tilekern.out_of_core import traced
from jax_tilekern.out_of_core.blocks import Place, Plan, WholeProduct, choose_plan

# The part of the free memory to use; other programs and fragmentation need the rest.
_FREE_SHARE, _HOST_SHARE = 0.8, 0.25
# Chunks of what the device receives while a product runs. A thread copies each, because one thread
# is slower than the bus.
_CHUNKS = 16


def plan(
    a: Any, b: Any, *, memory_limit: int | None = None, precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Plan:  # fmt: skip
    """Return the blocks of a product by :func:`matmul`, and the bytes it would read.

    Parameters are those of :func:`matmul`.
    """
    problem = _problem(a, b, precision, preferred_element_type)
    return choose_plan(problem, _free_bytes() if memory_limit is None else memory_limit)


def matmul(
    a: Any, b: Any, *, out: Any = None, memory_limit: int | None = None,
    precision: lax.PrecisionLike = None, preferred_element_type: DTypeLike | None = None,
) -> Any:  # fmt: skip
    """Product of two matrices that may exceed the memory of a device, or of the host.

    The first device of JAX's default backend computes the blocks of :func:`plan`, while the next
    ones are read and copied there, and results copied back. Products of blocks are added in the
    order of ``k``, in float32 for 16-bit and 8-bit floats, and rounded to the result's type once.
    So the same call gives the same bits, and integers are exact modulo their type.

    Inside ``jit`` operands are arrays of JAX, in host memory (``memory_kind="pinned_host"``) or on
    the one device. Blocks span all of ``k`` there, and reverse-mode derivatives of any order are
    such products too.

    Parameters
    ----------
    a, b
        Matrices of shapes ``(m, k)`` and ``(k, n)``: arrays of NumPy or JAX, ``numpy.memmap``, or
        anything with ``shape``, ``dtype`` and slices, such as an array of zarr or h5py.
    out
        The destination, of shape ``(m, n)`` and the result's type, and assignable by slices; by
        default a new NumPy array.
    memory_limit
        Bytes to use on the device; by default most of the free memory, and required inside
        ``jit``.
    precision, preferred_element_type
        As of :func:`jax_tilekern.matmul`.

    Returns
    -------
    numpy.ndarray
        The result, which is ``out`` if it was given. Inside ``jit`` a :class:`jax.Array` in host
        memory.

    Raises
    ------
    ValueError
        If operands are not matrices of shapes that fit, ``memory_limit`` is too small or missing
        inside ``jit``, or ``out`` is given there.
    TypeError
        If an operand or ``out`` is not an array of a type that fits, or of JAX inside ``jit``.
    """
    problem = _problem(a, b, precision, preferred_element_type)
    if any(isinstance(x, jax.core.Tracer) for x in (a, b)):
        if out is not None:
            raise ValueError("out is for calls outside of jit")
        return traced.matmul(a, b, problem, memory_limit, precision)
    shape = problem.m, problem.n
    out = np.empty(shape, problem.out) if out is None else out
    if tuple(out.shape) != shape or np.dtype(out.dtype) != problem.out:
        raise (ValueError if tuple(out.shape) != shape else TypeError)(
            f"out is {out.dtype} of shape {tuple(out.shape)}, but the product is {problem.out} of "
            f"shape {shape}; preferred_element_type chooses the type"
        )
    if 0 in (*shape, problem.k):
        out[:] = 0
        return out
    found = choose_plan(problem, _free_bytes() if memory_limit is None else memory_limit)
    with ThreadPoolExecutor(_CHUNKS) as threads:
        _compute({"lhs": a, "rhs": b}, out, found, precision, threads)
    return out


def _compute(
    operands: Mapping[str, Any],
    out: Any,
    plan: Plan,
    precision: lax.PrecisionLike,
    threads: ThreadPoolExecutor,
) -> None:
    problem, device = plan.problem, jax.local_devices()[0]
    chunks = _chunks(operands, plan, device, threads)
    held: dict[str, Array] = {}
    total: Array | None = None
    written: list[Future[None]] = []
    # A device without asynchronous copies would otherwise be given every product at once.
    ended: Array | None = None
    for place, reads, is_last in plan.steps():
        for name, part in reads.items():
            held.pop(name, None)
            shape = tuple(x.stop - x.start for x in part)
            held[name] = jnp.empty(shape, getattr(problem, name), device=device)
            start = 0
            while start < shape[0]:
                # Page-locked memory would otherwise have no bound.
                rows = jax.block_until_ready(next(chunks).result())
                held[name] = _placed(held[name], rows, start)
                start += len(rows)
                del rows
        before = ended
        total, ended = _added(total, held["lhs"], held["rhs"], precision, problem.sums)
        if is_last:
            # NumPy reads page-locked memory without another copy.
            there = SingleDeviceSharding(device, memory_kind="pinned_host")
            result = jax.device_put(total.astype(problem.out), there)
            total = None
            if written:
                written.pop().result()
            written.append(threads.submit(_write, out, place, result, threads))
            del result
        jax.block_until_ready(before)
    written.pop().result()


def _chunks(
    operands: Mapping[str, Any], plan: Plan, device: jax.Device, threads: ThreadPoolExecutor
) -> Iterator[Future[Array]]:
    """Yield rows of the blocks that are read, when the next ones are on their way.

    XLA starts a copy after the programs that were dispatched before it, which may use its memory,
    so a copy overlaps with a product only if it was dispatched first.
    """
    coming: collections.deque[Future[Array]] = collections.deque()
    x64 = jax.config.x64_enabled
    for _, reads, _ in plan.steps():
        for name, (rows, columns) in reads.items():
            dtype = getattr(plan.problem, name)
            row_bytes = (columns.stop - columns.start) * dtype.itemsize
            count = max(1, plan.ahead_bytes // _CHUNKS // row_bytes)
            for start in range(rows.start, rows.stop, count):
                part = slice(start, min(start + count, rows.stop)), columns
                coming.append(threads.submit(_read, operands[name], part, dtype, device, x64))
                # Two further chunks are being written to their places.
                if len(coming) > _CHUNKS - 3:
                    yield coming.popleft()
    yield from coming


def _read(source: Any, part: Place, dtype: np.dtype[Any], device: jax.Device, x64: bool) -> Array:
    """Copy part of an operand to a device through page-locked memory.

    XLA copies other memory to a GPU in two steps that do not overlap: one thread fills a
    page-locked buffer, and then the GPU reads it. Here each chunk is copied by a thread of XLA's.
    """
    # The setting is the calling thread's.
    with jax.enable_x64(x64):
        rows = np.asarray(source[part], dtype)
        there = jax.device_put(rows, SingleDeviceSharding(device, memory_kind="pinned_host"))
        result: Array = jax.device_put(there, SingleDeviceSharding(device))
    return result


def _write(out: Any, place: Place, result: Array, threads: ThreadPoolExecutor) -> None:
    block = np.asarray(result)
    if isinstance(out, np.ndarray):
        parts = (np.array_split(x, _CHUNKS) for x in (out[place], block))
        list(threads.map(np.copyto, *parts))
    else:
        out[place] = block


@functools.partial(jax.jit, donate_argnums=0)
def _placed(array: Array, rows: Array, start: Any) -> Array:
    return lax.dynamic_update_slice(array, rows, (start, 0))


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _added(
    total: Array | None, lhs: Array, rhs: Array, precision: lax.PrecisionLike, sums: np.dtype[Any]
) -> tuple[Array, Array]:
    """Add a product to the accumulators; return them, and a mark of the end."""
    product = device_matmul(lhs, rhs, precision=precision, preferred_element_type=sums)
    total = product if total is None else total + product
    return total, total[0, 0]


def _problem(
    a: Any, b: Any, precision: lax.PrecisionLike, preferred: DTypeLike | None
) -> WholeProduct:
    for name, operand in (("a", a), ("b", b)):
        if not hasattr(operand, "shape") or not hasattr(operand, "dtype"):
            raise TypeError(f"{name} is {type(operand).__name__}, which has no shape and dtype")
        if len(operand.shape) != 2:
            raise ValueError(f"{name} has shape {tuple(operand.shape)}, which is not a matrix")
    (m, k), (depth, n) = (tuple(map(int, x.shape)) for x in (a, b))
    if k != depth:
        raise ValueError(f"contracted dimensions differ: a has shape {(m, k)}, b {(depth, n)}")
    # A device may represent float64 as float32.
    lhs, rhs = (jax.dtypes.canonicalize_dtype(np.dtype(x.dtype)) for x in (a, b))
    product = functools.partial(
        device_matmul, precision=precision, preferred_element_type=preferred
    )
    out = jax.eval_shape(product, *(jax.ShapeDtypeStruct((1, 1), x) for x in (lhs, rhs))).dtype
    return WholeProduct(m, n, k, lhs, rhs, out, wide_dtype(out))


def _free_bytes() -> int:
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(_FREE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    return int(_HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

"""Products by blocks: reading, copies in both directions, products and writing overlap."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jax_tilekern.ops.matmul import matmul as device_matmul
from jax_tilekern.out_of_core import traced
from jax_tilekern.out_of_core.blocks import Place, Plan, WholeProduct, choose_plan
from jax_tilekern.tuning.wall_time import wall_seconds

# The part of the free memory to use; other programs and fragmentation need the rest.
_FREE_SHARE, _HOST_SHARE = 0.8, 0.25
# Chunks of what a device receives while a product runs. A thread copies each, because one thread is
# slower than the bus.
_CHUNKS = 16
_MEASURED_BYTES = 256 << 20


class Progress(NamedTuple):
    """Blocks of the result, the operands' bytes that devices have, seconds, and the plan."""

    done: int
    total: int
    read_bytes: int
    seconds: float
    plan: Plan


def plan(
    a: Any, b: Any, *, memory_limit: int | None = None, precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Plan:  # fmt: skip
    """Return the blocks of a product by :func:`matmul`, the bytes it would read, and the time.

    Parameters are those of :func:`matmul`. The rates of the device are measured once per type,
    which takes about a second.
    """
    problem = _problem(a, b, precision, preferred_element_type)
    found = _plan(problem, memory_limit)
    operations, bytes_in, bytes_out = _rates(problem.lhs, problem.rhs, problem.sums, precision)
    # The devices share the bus.
    of_bus = max(found.read_bytes / bytes_in, found.write_bytes / bytes_out)
    seconds = max(found.operations / operations / found.devices, of_bus)
    return dataclasses.replace(found, seconds=seconds)


def matmul(
    a: Any, b: Any, *, out: Any = None, memory_limit: int | None = None,
    precision: lax.PrecisionLike = None, preferred_element_type: DTypeLike | None = None,
    progress: Callable[[Progress], None] | bool | None = None,
) -> Any:  # fmt: skip
    """Product of two matrices that may exceed the memory of a device, or of the host.

    The local devices of JAX's default backend compute the blocks of :func:`plan`, while the next
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
        default a new NumPy array. The space of a ``numpy.memmap`` is allocated before the start.
    memory_limit
        Bytes to use on each device; by default most of the free memory, and required inside
        ``jit``.
    precision, preferred_element_type
        As of :func:`jax_tilekern.matmul`.
    progress
        ``True`` prints the plan and the number of completed blocks. A function is called with a
        :class:`Progress` before the first block of the result and after each, from one thread at a
        time.

    Returns
    -------
    numpy.ndarray
        The result, which is ``out`` if it was given. Inside ``jit`` a :class:`jax.Array` in host
        memory.

    Raises
    ------
    ValueError
        If operands are not matrices of shapes that fit, ``memory_limit`` is too small or missing
        inside ``jit``, or ``out`` or ``progress`` is given there.
    TypeError
        If an operand or ``out`` is not an array of a type that fits, or of JAX inside ``jit``.
    OSError
        If there is no space for the result.

    Examples
    --------
    >>> import numpy as np
    >>> from jax_tilekern import out_of_core
    >>> a, b = np.ones((300, 200), np.float32), np.ones((200, 400), np.float32)
    >>> out_of_core.matmul(a, b, memory_limit=1_000_000)[:2, 0]
    array([200., 200.], dtype=float32)
    """
    problem = _problem(a, b, precision, preferred_element_type)
    if any(isinstance(x, jax.core.Tracer) for x in (a, b)):
        if out is not None or progress:
            raise ValueError("out and progress are for calls outside of jit")
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
    found = _plan(problem, memory_limit)
    if isinstance(out, np.memmap) and out.filename and hasattr(os, "posix_fallocate"):
        # A page without space on the disk would kill the process.
        with open(out.filename, "rb+") as file:
            os.posix_fallocate(file.fileno(), out.offset, out.nbytes)
    if progress is True:
        print(found, file=sys.stderr)
        progress = _print
    _Run(a, b, out, found, precision, progress or None).run()
    return out


def _print(x: Progress) -> None:
    end = "\n" if x.done == x.total else ""
    text = f"\r{x.done} of {x.total} blocks, {x.seconds:.0f} s"
    print(text, end=end, file=sys.stderr, flush=True)


@dataclasses.dataclass
class _Run:
    """A product, and what its devices and threads share."""

    a: Any
    b: Any
    out: Any
    plan: Plan
    precision: lax.PrecisionLike
    progress: Callable[[Progress], None] | None

    def run(self) -> None:
        """Compute the result."""
        self.lock, self.start = threading.Lock(), time.perf_counter()
        self.done = self.read_bytes = 0
        self.x64 = jax.config.x64_enabled
        self._report()
        devices = jax.local_devices()[: self.plan.devices]
        with ThreadPoolExecutor(_CHUNKS * len(devices)) as self.threads:
            # No call waits for a product, so that every device has one.
            turns = itertools.zip_longest(*map(self._on_device, range(len(devices)), devices))
            collections.deque(turns, maxlen=0)

    def _on_device(self, number: int, device: jax.Device) -> Iterator[None]:
        """Compute a device's blocks; yield whenever another device may get its turn."""
        problem, chunks = self.plan.problem, self._chunks(number, device)
        held: dict[str, Array] = {}
        total: Array | None = None
        written: list[Future[None]] = []
        # A device without asynchronous copies would otherwise be given every product at once.
        marks: list[Array] = []
        for step in self.plan.steps(number):
            for name, part in step.reads.items():
                held.pop(name, None)
                shape = tuple(x.stop - x.start for x in part)
                held[name] = jnp.empty(shape, problem.types[name], device=device)
                start = 0
                while start < shape[0]:
                    # Page-locked memory would otherwise have no bound.
                    rows = jax.block_until_ready(next(chunks).result())
                    held[name] = _placed(held[name], rows, start)
                    start += len(rows)
                    self.read_bytes += rows.nbytes
                    del rows
                    yield
            total, mark = _added(total, held["a"], held["b"], self.precision, problem.sums)
            marks.append(mark)
            if step.is_last:
                result = _to_host(_rounded(total, problem.out), device)
                total = None
                if written:
                    written.pop().result()
                written.append(self.threads.submit(self._write, step.place, result))
                del result
            if len(marks) > 1:
                jax.block_until_ready(marks.pop(0))
            yield
        written.pop().result()

    def _chunks(self, number: int, device: jax.Device) -> Iterator[Future[Array]]:
        """Yield rows of the blocks that a device reads, when the next ones are on their way.

        XLA starts a copy after the programs that were dispatched before it, which may use its
        memory, so a copy overlaps with a product only if it was dispatched first.
        """
        coming: collections.deque[Future[Array]] = collections.deque()
        for step in self.plan.steps(number):
            for name, (rows, columns) in step.reads.items():
                row_bytes = (columns.stop - columns.start) * self.plan.problem.types[name].itemsize
                count = max(1, self.plan.ahead_bytes // _CHUNKS // row_bytes)
                for start in range(rows.start, rows.stop, count):
                    part = slice(start, min(start + count, rows.stop)), columns
                    coming.append(self.threads.submit(self._read, name, part, device))
                    # Two further chunks are being written to their places.
                    if len(coming) > _CHUNKS - 3:
                        yield coming.popleft()
        while coming:
            yield coming.popleft()

    def _read(self, name: str, part: Place, device: jax.Device) -> Array:
        source = self.a if name == "a" else self.b
        rows = np.asarray(source[part], self.plan.problem.types[name])
        # A setting of the calling thread.
        with jax.enable_x64(self.x64):
            return _to_device(rows, device)

    def _write(self, place: Place, result: Array) -> None:
        """Store a block of the result and report progress."""
        block = np.asarray(result)
        with self.lock:
            if isinstance(self.out, np.ndarray):
                parts = (np.array_split(x, _CHUNKS) for x in (self.out[place], block))
                list(self.threads.map(np.copyto, *parts))
            else:
                self.out[place] = block
            self.done += 1
            self._report()

    def _report(self) -> None:
        if self.progress is not None:
            rows, columns, _ = self.plan.grid
            seconds = time.perf_counter() - self.start
            self.progress(Progress(self.done, rows * columns, self.read_bytes, seconds, self.plan))


def _to_host(x: Any, device: jax.Device) -> Array:
    """Copy to page-locked memory, where NumPy reads it without another copy."""
    result: Array = jax.device_put(x, SingleDeviceSharding(device, memory_kind="pinned_host"))
    return result


def _to_device(x: np.ndarray[Any, Any], device: jax.Device) -> Array:
    """Copy to a device through page-locked memory.

    XLA copies other memory to a GPU in two steps that do not overlap: one thread fills a
    page-locked buffer, and then the GPU reads it. Here each chunk is copied by a thread of XLA's.
    """
    result: Array = jax.device_put(_to_host(x, device), SingleDeviceSharding(device))
    return result


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


@functools.partial(jax.jit, static_argnums=1)
def _rounded(total: Array, dtype: np.dtype[Any]) -> Array:
    return total.astype(dtype)


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
    narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    return WholeProduct(m, n, k, lhs, rhs, out, np.dtype(np.float32) if narrow else out)


def _plan(problem: WholeProduct, limit: int | None) -> Plan:
    devices = jax.local_devices()
    limit = min(map(_free_bytes, devices)) if limit is None else limit
    return choose_plan(problem, limit, len(devices))


def _free_bytes(device: jax.Device) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(_FREE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_HOST_SHARE * host / jax.local_device_count())


@functools.lru_cache(maxsize=64)
def _rates(
    lhs: np.dtype[Any], rhs: np.dtype[Any], sums: np.dtype[Any], precision: lax.PrecisionLike
) -> tuple[float, ...]:
    """Measure operations, and bytes to and from the first device, per second."""
    device = jax.local_devices()[0]
    size = 4096 if device.platform == "gpu" else 512
    x, y = (jnp.zeros((size, size), dtype, device=device) for dtype in (lhs, rhs))
    # Pages that were never written would all be one page, which stays in the caches.
    parts = np.array_split(np.ones(_MEASURED_BYTES, np.uint8), _CHUNKS)
    there = [_to_device(part, device) for part in parts]
    runs: list[tuple[int, Callable[[], Any]]] = [
        (2 * size**3, lambda: _added(None, x, y, precision, sums)),
        (_MEASURED_BYTES, lambda: [_to_device(part, device) for part in parts]),
        (_MEASURED_BYTES, lambda: [_to_host(part, device) for part in there]),
    ]
    return tuple(work / min(wall_seconds(run) for _ in range(3)) for work, run in runs)

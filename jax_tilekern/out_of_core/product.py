"""Products by blocks: copies in both directions overlap with products."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jax_tilekern.ops.matmul import matmul as device_matmul
from jax_tilekern.out_of_core import traced
from jax_tilekern.out_of_core.journal import Journal, identity
from jax_tilekern.out_of_core.plan import Block, BlockProduct, Plan, Tile, WholeProduct, choose_plan
from jax_tilekern.out_of_core.transfer import to_device, to_host
from jax_tilekern.tuning.wall_time import wall_seconds

# The part of the free memory to use; other programs and fragmentation need the rest.
_FREE_SHARE = 0.8
_HOST_SHARE = 0.25
# Blocks of operands that threads read before they are copied.
_READ_AHEAD = 2
# One thread copies or converts this much at a time.
_COPIED_BYTES = 16 << 20
_MOST_COPIERS = 16
# The sizes of the measurements of a device's rates.
_MEASURED_BYTES = 256 << 20
_MEASURED_SIZE = {"gpu": 4096, "cpu": 512}


class Progress(NamedTuple):
    """The progress of a product.

    Attributes
    ----------
    done, total
        Blocks of the result.
    read_bytes
        Bytes of operands that were copied to devices.
    seconds
        Seconds since the start.
    plan
        The plan of the product.
    """

    done: int
    total: int
    read_bytes: int
    seconds: float
    plan: Plan


def plan(
    a: Any,
    b: Any,
    *,
    memory_limit: int | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Plan:
    """Return the blocks of a product by :func:`matmul`, the bytes it would read, and the time.

    Parameters are those of :func:`matmul`. The rates of the device are measured once per type,
    which takes about a second.
    """
    problem = _problem(a, b, precision, preferred_element_type)
    found = _plan(problem, memory_limit)
    operations, bytes_in, bytes_out = _rates(problem.lhs, problem.rhs, problem.sums, precision)
    seconds = max(
        found.operations / operations / found.devices,
        # The devices share the bus.
        found.read_bytes / bytes_in,
        found.write_bytes / bytes_out,
    )
    return dataclasses.replace(found, seconds=seconds)


def matmul(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    memory_limit: int | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    progress: Callable[[Progress], None] | bool | None = None,
) -> Any:
    """Product of two matrices that may exceed the memory of a device, or of the host.

    The local devices of JAX's default backend compute blocks of the result. Blocks of the operands
    are read and copied there, and results copied back, while products run. :func:`plan` returns the
    blocks. Their products are added in the order of ``k``, in float32 for 16-bit and 8-bit floats,
    and are rounded to the result's type once. So the same call gives the same bits, even if it was
    interrupted, and integers are exact modulo their type.

    Inside ``jit`` operands are arrays of JAX, in host memory (``memory_kind="pinned_host"``) or on
    the device. The result is in host memory. Blocks span all of ``k`` there, and reverse-mode
    derivatives of any order are such products too. There is one device, and neither ``out`` nor
    ``progress``.

    Parameters
    ----------
    a
        Matrix of shape ``(m, k)``: an array of NumPy or JAX, a ``numpy.memmap``, or anything with
        ``shape``, ``dtype`` and slices that NumPy takes, such as an array of zarr or h5py.
    b
        Matrix of shape ``(k, n)``.
    out
        The destination, of shape ``(m, n)`` and the result's type, and assignable by slices. With a
        ``numpy.memmap``, a call with the same arguments resumes an interrupted product. Until it is
        complete, the file ``<out>.unfinished.json`` exists beside it. By default it is a new NumPy
        array.
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
        If an operand is not a matrix, shapes do not fit, ``memory_limit`` is too small or missing
        inside ``jit``, or a file has an unfinished product of other operands.
    TypeError
        If an operand or ``out`` is not an array of a type that fits, or an operand inside ``jit``
        is not an array of JAX.
    OSError
        If there is no space for the result.

    Examples
    --------
    >>> import numpy as np
    >>> from jax_tilekern import out_of_core
    >>> a, b = np.ones((300, 200), np.float32), np.ones((200, 400), np.float32)
    >>> out_of_core.matmul(a, b, memory_limit=1_000_000)[:2, :2]
    array([[200., 200.],
           [200., 200.]], dtype=float32)
    """
    problem = _problem(a, b, precision, preferred_element_type)
    if any(isinstance(x, jax.core.Tracer) for x in (a, b)):
        if out is not None or progress:
            raise ValueError("out and progress are for calls outside of jit")
        return traced.matmul(a, b, problem, precision=precision, memory_limit=memory_limit)
    shape = problem.m, problem.n
    if out is None:
        out = np.empty(shape, problem.out)
    elif tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, but the product has {shape}")
    elif np.dtype(out.dtype) != problem.out:
        raise TypeError(
            f"out is {out.dtype}, but the product is {problem.out}; preferred_element_type chooses"
        )
    if 0 in (*shape, problem.k):
        out[:] = 0
        return out
    found = _plan(problem, memory_limit)
    if progress is True:
        print(found, file=sys.stderr)
        progress = _print
    journal = None
    if isinstance(out, np.memmap) and out.filename is not None:
        # Not the number of devices, so that a resumed product may have others.
        blocks = found.rows, found.columns, found.depth
        journal = Journal(out, found, identity((a, b), blocks, problem, precision))
    _Run(a, b, out, found, precision, journal, progress or None).run()
    if journal is not None:
        journal.close()
    return out


def _print(progress: Progress) -> None:
    done = progress.done == progress.total
    print(
        f"\r{progress.done} of {progress.total} blocks, {progress.seconds:.0f} s",
        end="\n" if done else "",
        file=sys.stderr,
        flush=True,
    )


@dataclasses.dataclass
class _Run:
    """A product, and what its devices and threads share."""

    a: Any
    b: Any
    out: Any
    plan: Plan
    precision: lax.PrecisionLike
    journal: Journal | None
    progress: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        self.done = set(self.journal.done if self.journal else ())
        self.lock = threading.Lock()
        self.read_bytes = 0
        self.start = time.perf_counter()

    def run(self) -> None:
        """Compute the blocks that are not done."""
        devices = self.plan.devices
        self._report()
        with (
            ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_COPIERS)) as self.copiers,
            # A device's reads ahead, another read, and a write.
            ThreadPoolExecutor((_READ_AHEAD + 2) * devices) as self.threads,
        ):
            # Only this thread calls JAX, because settings may be thread-local. No call waits for a
            # product.
            running = [
                self._on_device(
                    self.plan.steps([x for x in self.plan.tiles_of(i) if x not in self.done]),
                    device,
                )
                for i, device in enumerate(jax.local_devices()[:devices])
            ]
            ended = object()
            while running:
                running = [product for product in running if next(product, ended) is not ended]

    def _on_device(self, steps: Sequence[BlockProduct], device: jax.Device) -> Iterator[None]:
        """Compute some steps; yield whenever another device may get its turn."""
        problem = self.plan.problem
        first, further, rounded = _programs(self.precision, problem.sums, problem.out)
        arriving = to_device(self._parts(steps), device, self.plan.ahead_bytes)
        held: dict[str, Array] = {}
        sums: Array | None = None
        written: Future[None] | None = None
        # A device without asynchronous copies would otherwise be given every product at once.
        marks: list[Array] = []
        for step in steps:
            for block in step.reads:
                held.pop(block.operand, None)
                while (arrived := next(arriving)) is None:
                    yield
                held[block.operand] = arrived
                del arrived
            operands = held["lhs"], held["rhs"]
            sums, mark = first(*operands) if sums is None else further(sums, *operands)
            del operands
            marks.append(mark)
            if step.depth == self.plan.grid[2] - 1:
                result = to_host(rounded(sums), device)
                sums = None
                if written is not None:
                    written.result()
                written = self.threads.submit(self._write, step.tile, result)
                del result
            if len(marks) > 1:
                jax.block_until_ready(marks.pop(0))
            yield
        if written is not None:
            written.result()

    def _parts(self, steps: Sequence[BlockProduct]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the blocks that the steps read; other threads read the next."""
        coming: collections.deque[Future[np.ndarray[Any, Any]]] = collections.deque()
        for block in (block for step in steps for block in step.reads):
            coming.append(self.threads.submit(self._read, block))
            if len(coming) > _READ_AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def _read(self, block: Block) -> np.ndarray[Any, Any]:
        problem = self.plan.problem
        is_lhs = block.operand == "lhs"
        source, dtype = (self.a, problem.lhs) if is_lhs else (self.b, problem.rhs)
        part: np.ndarray[Any, Any] = np.asarray(source[self.plan.part(block)])
        if part.dtype != dtype:
            found, part = part, np.empty(part.shape, dtype)
            self._copy(part, found)
        with self.lock:
            self.read_bytes += part.nbytes
        return part

    def _write(self, tile: Tile, result: Array) -> None:
        """Store a block of the result, record it in the journal, and report progress."""
        block = np.asarray(result)
        place = self.plan.place(tile)
        with self.lock:
            if isinstance(self.out, np.ndarray):
                self._copy(self.out[place], block)
            else:
                self.out[place] = block
            if self.journal is not None:
                self.journal.add(tile)
            self.done.add(tile)
            self._report()

    def _report(self) -> None:
        if self.progress is not None:
            rows, columns, _ = self.plan.grid
            seconds = time.perf_counter() - self.start
            done = len(self.done)
            self.progress(Progress(done, rows * columns, self.read_bytes, seconds, self.plan))

    def _copy(self, to: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        """Copy or convert on several threads, because one is slower than the bus."""
        rows = -(-len(source) * _COPIED_BYTES // max(source.nbytes, 1))
        parts = [slice(i, i + rows) for i in range(0, len(source), rows)]
        copied = self.copiers.map(lambda x: np.copyto(to[x], source[x], casting="unsafe"), parts)
        collections.deque(copied, maxlen=0)


@functools.lru_cache(maxsize=64)
def _programs(
    precision: lax.PrecisionLike, sums: np.dtype[Any], out: np.dtype[Any]
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[Array], Array]]:
    """Return the functions that start and continue accumulation, and the one that rounds.

    The first two also return a mark of their end.
    """

    def product(lhs: Array, rhs: Array) -> Array:
        return device_matmul(lhs, rhs, precision=precision, preferred_element_type=sums)

    @jax.jit
    def first(lhs: Array, rhs: Array) -> tuple[Array, Array]:
        total = product(lhs, rhs)
        return total, total[0, 0]

    @functools.partial(jax.jit, donate_argnums=0)
    def further(total: Array, lhs: Array, rhs: Array) -> tuple[Array, Array]:
        total = total + product(lhs, rhs)
        return total, total[0, 0]

    return first, further, jax.jit(lambda total: total.astype(out))


# Checks and measurements.


def _problem(
    a: Any, b: Any, precision: lax.PrecisionLike, preferred: DTypeLike | None
) -> WholeProduct:
    for name, operand in (("a", a), ("b", b)):
        if not hasattr(operand, "shape") or not hasattr(operand, "dtype"):
            raise TypeError(f"{name} is {type(operand).__name__}, which has no shape and dtype")
        if len(operand.shape) != 2:
            raise ValueError(f"{name} has shape {tuple(operand.shape)}, which is not a matrix")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"contracted dimensions differ: a has shape {tuple(a.shape)}, b {tuple(b.shape)}"
        )
    # A device may represent float64 as float32.
    lhs, rhs = (jax.dtypes.canonicalize_dtype(np.dtype(x.dtype)) for x in (a, b))

    def result(preferred: Any) -> np.dtype[Any]:
        product = functools.partial(
            device_matmul, precision=precision, preferred_element_type=preferred
        )
        operands = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (lhs, rhs))
        dtype: np.dtype[Any] = np.dtype(jax.eval_shape(product, *operands).dtype)
        return dtype

    out = result(preferred)
    narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    m, n, k = map(int, (a.shape[0], b.shape[1], a.shape[1]))
    return WholeProduct(m, n, k, lhs, rhs, out, result(jnp.float32) if narrow else out)


def _plan(problem: WholeProduct, memory_limit: int | None) -> Plan:
    devices = jax.local_devices()
    limit = memory_limit if memory_limit is not None else min(map(_free_bytes, devices))
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
) -> tuple[float, float, float]:
    """Measure operations, and bytes to and from the first device, per second."""
    device = jax.local_devices()[0]
    size = _MEASURED_SIZE.get(device.platform, _MEASURED_SIZE["cpu"])
    x, y = (jax.device_put(np.zeros((size, size), dtype), device) for dtype in (lhs, rhs))
    first, *_ = _programs(precision, sums, sums)
    # Pages that were never written would all be one page, which stays in the caches.
    host = np.ones((_MEASURED_BYTES >> 12, 1 << 12), np.uint8)

    def copied() -> Array:
        return next(x for x in to_device([host], device, host.nbytes) if x is not None)

    there = copied()

    def seconds(run: Callable[[], Any]) -> float:
        return min(wall_seconds(run) for _ in range(3))

    return (
        2 * size**3 / seconds(lambda: first(x, y)),
        host.nbytes / seconds(copied),
        host.nbytes / seconds(lambda: to_host(there, device)),
    )

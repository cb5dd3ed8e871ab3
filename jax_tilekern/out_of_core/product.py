"""Products by blocks: copies in both directions overlap with products."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jax_tilekern.ops.matmul import matmul as device_matmul
from jax_tilekern.out_of_core import traced
from jax_tilekern.out_of_core.journal import Journal, identity
from jax_tilekern.out_of_core.plan import Block, Plan, Sizes, Tile, blocks, choose_plan
from jax_tilekern.out_of_core.progress import Progress
from jax_tilekern.out_of_core.transfer import Arrived, to_device, to_host

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


@dataclasses.dataclass(frozen=True)
class _Types:
    lhs: np.dtype[Any]
    rhs: np.dtype[Any]
    sums: np.dtype[Any]
    out: np.dtype[Any]


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
    types = _types(a, b, precision, preferred_element_type)
    found = _plan(a, b, types, memory_limit)
    operations, bytes_in, bytes_out = _rates(types, precision)
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
        ``True`` shows a bar and prints the plan. A function is called with a :class:`Progress`
        before the first block of the result and after each, from one thread at a time.

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
    types = _types(a, b, precision, preferred_element_type)
    if traced.is_traced(a, b):
        return _traced(a, b, types, precision, memory_limit, out, progress)
    shape = a.shape[0], b.shape[1]
    if out is None:
        out = np.empty(shape, types.out)
    elif tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, but the product has {shape}")
    elif np.dtype(out.dtype) != types.out:
        raise TypeError(
            f"out is {out.dtype}, but the product is {types.out}; preferred_element_type chooses"
        )
    if 0 in shape or a.shape[1] == 0:
        out[:] = 0
        return out
    found = _plan(a, b, types, memory_limit)
    if progress is True:
        from jax_tilekern.out_of_core.bar import Bar

        with Bar(plan(a, b, memory_limit=memory_limit, precision=precision,
                      preferred_element_type=preferred_element_type)) as bar:  # fmt: skip
            return _run(a, b, out, found, types, precision, bar)
    return _run(a, b, out, found, types, precision, progress or None)


def _traced(
    a: Any,
    b: Any,
    types: _Types,
    precision: lax.PrecisionLike,
    memory_limit: int | None,
    out: Any,
    progress: Any,
) -> Array:
    if out is not None or progress:
        raise ValueError("out and progress are for calls outside of jit")
    if memory_limit is None:
        raise ValueError(
            "inside jit a call needs a memory_limit: the memory that will be free when the program "
            "runs is not known"
        )
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, Array):
            raise TypeError(
                f"{name} is {type(operand).__name__}, which inside jit would become a constant of "
                "the program: pass a JAX array"
            )
    a, b = (jnp.asarray(x, dtype) for x, dtype in ((a, types.lhs), (b, types.rhs)))
    return traced.matmul(
        a, b, precision=precision, sums=types.sums, out=types.out, memory_limit=memory_limit
    )


def _run(
    a: Any,
    b: Any,
    out: Any,
    plan: Plan,
    types: _Types,
    precision: lax.PrecisionLike,
    progress: Callable[[Progress], None] | None,
) -> Any:
    journal = None
    if isinstance(out, np.memmap) and out.filename is not None:
        extents = (plan.rows, plan.columns, plan.depth)
        known = identity((a, b), extents, types, precision)
        journal = Journal(out, known, functools.partial(_place, plan))
    threads = min(os.cpu_count() or 1, _MOST_COPIERS)
    with (
        ThreadPoolExecutor(threads, "jax_tilekern_copier") as copiers,
        ThreadPoolExecutor(2 * plan.devices, "jax_tilekern_reader") as readers,
        ThreadPoolExecutor(plan.devices, "jax_tilekern_writer") as writers,
    ):
        ledger = _Ledger(out, plan, journal, progress, copiers)
        # Only this thread calls JAX, because settings may be thread-local. No call waits for a
        # product.
        running = [
            _DeviceProduct(
                a, b, plan, types, precision, device, ledger, copiers, readers, writers
            ).run([tile for tile in plan.tiles_of(i) if tile not in ledger.done])
            for i, device in enumerate(jax.local_devices()[: plan.devices])
        ]
        ended = object()
        while running:
            running = [product for product in running if next(product, ended) is not ended]
    if journal is not None:
        journal.close()
    return out


class _Ledger:
    """The progress of all devices."""

    def __init__(
        self,
        out: Any,
        plan: Plan,
        journal: Journal | None,
        progress: Callable[[Progress], None] | None,
        copiers: ThreadPoolExecutor,
    ) -> None:
        self.done = set(journal.done) if journal else set[Tile]()
        self._out, self._plan, self._journal, self._progress = out, plan, journal, progress
        self._copiers = copiers
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._start = time.perf_counter()
        self._report()

    def add_read(self, size: int) -> None:
        with self._lock:
            self._read_bytes += size

    def write(self, tile: Tile, result: Array) -> None:
        """Store a block of the result, record it in the journal, and report progress."""
        block = np.asarray(result)
        place = _place(self._plan, tile)
        with self._lock:
            if isinstance(self._out, np.ndarray):
                _copy(self._out[place], block, self._copiers)
            else:
                self._out[place] = block
            if self._journal is not None:
                self._journal.add(tile)
            self.done.add(tile)
            self._report()

    def _report(self) -> None:
        if self._progress is not None:
            seconds = time.perf_counter() - self._start
            total = len(self._plan.tiles)
            self._progress(Progress(len(self.done), total, self._read_bytes, seconds, self._plan))


@dataclasses.dataclass
class _DeviceProduct:
    """The blocks of one device."""

    a: Any
    b: Any
    plan: Plan
    types: _Types
    precision: lax.PrecisionLike
    device: jax.Device
    ledger: _Ledger
    copiers: ThreadPoolExecutor
    readers: ThreadPoolExecutor
    writers: ThreadPoolExecutor

    def run(self, tiles: list[Tile]) -> Iterator[None]:
        """Compute some blocks of the result; yield whenever another device may get its turn."""
        first, further = _steps(self.precision, self.types.sums)
        round_to_out = _rounding(self.types.out)
        steps = self.plan.steps(tiles)
        arriving = to_device(self._parts(steps), self.device, self.plan.ahead_bytes)
        held: dict[str, Arrived] = {}
        sums: Array | None = None
        written: Future[None] | None = None
        # A device without asynchronous copies would otherwise be given every product at once.
        marks: list[Array] = []
        for tile, depth in steps:
            for block in blocks(tile, depth):
                if block.operand in held and held[block.operand].block == block:
                    continue
                held.pop(block.operand, None)
                while (arrived := next(arriving)) is None:
                    yield
                held[block.operand] = arrived
                del arrived
            lhs, rhs = held["lhs"].array, held["rhs"].array
            sums, mark = first(lhs, rhs) if sums is None else further(sums, lhs, rhs)
            del lhs, rhs
            marks.append(mark)
            if depth == self.plan.depths(tile)[-1]:
                result = to_host(round_to_out(sums), self.device)
                sums = None
                if written is not None:
                    written.result()
                written = self.writers.submit(self.ledger.write, tile, result)
                del result
            if len(marks) > 1:
                jax.block_until_ready(marks.pop(0))
            yield
        if written is not None:
            written.result()

    def _parts(
        self, steps: Sequence[tuple[Tile, int]]
    ) -> Iterator[tuple[Block, np.ndarray[Any, Any]]]:
        """Yield the blocks that the steps need and do not have; other threads read the next."""
        coming: collections.deque[tuple[Block, Future[np.ndarray[Any, Any]]]] = collections.deque()
        for block in self.plan.reads(steps):
            coming.append((block, self.readers.submit(self._read, block)))
            if len(coming) > _READ_AHEAD:
                yield self._counted(*coming.popleft())
        while coming:
            yield self._counted(*coming.popleft())

    def _counted(
        self, block: Block, part: Future[np.ndarray[Any, Any]]
    ) -> tuple[Block, np.ndarray[Any, Any]]:
        host = part.result()
        self.ledger.add_read(host.nbytes)
        return block, host

    def _read(self, block: Block) -> np.ndarray[Any, Any]:
        depth = _slice(block.depth, self.plan.depth)
        if block.operand == "lhs":
            return self._of_type(self.a[_slice(block.outer, self.plan.rows), depth], self.types.lhs)
        return self._of_type(self.b[depth, _slice(block.outer, self.plan.columns)], self.types.rhs)

    def _of_type(self, found: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        part: np.ndarray[Any, Any] = np.asarray(found)
        if part.dtype == dtype:
            return part
        converted = np.empty(part.shape, dtype)
        _copy(converted, part, self.copiers)
        return converted


def _copy(
    to: np.ndarray[Any, Any], source: np.ndarray[Any, Any], copiers: ThreadPoolExecutor
) -> None:
    """Copy or convert on several threads, because one is slower than the bus."""
    rows = -(-len(source) * _COPIED_BYTES // max(source.nbytes, 1))
    chunks = [slice(i, i + rows) for i in range(0, len(source), rows)]
    list(copiers.map(lambda chunk: np.copyto(to[chunk], source[chunk], casting="unsafe"), chunks))


@functools.lru_cache(maxsize=64)
def _steps(
    precision: lax.PrecisionLike, sums: np.dtype[Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that start and continue accumulation, each with a mark of its end."""

    def product(lhs: Array, rhs: Array) -> Array:
        return device_matmul(lhs, rhs, precision=precision, preferred_element_type=sums)

    @jax.jit
    def first(lhs: Array, rhs: Array) -> tuple[Array, Array]:
        total = product(lhs, rhs)
        return total, total[0, 0]

    @functools.partial(jax.jit, donate_argnums=0)
    def further(sums: Array, lhs: Array, rhs: Array) -> tuple[Array, Array]:
        total = sums + product(lhs, rhs)
        return total, total[0, 0]

    return first, further


@functools.lru_cache(maxsize=64)
def _rounding(out: np.dtype[Any]) -> Callable[[Array], Array]:
    return jax.jit(lambda sums: sums.astype(out))


def _place(plan: Plan, tile: Tile) -> tuple[slice, slice]:
    return _slice(tile.row, plan.rows), _slice(tile.column, plan.columns)


def _slice(index: int, block: int) -> slice:
    return slice(index * block, (index + 1) * block)


# Checks and measurements.


def _types(a: Any, b: Any, precision: lax.PrecisionLike, preferred: DTypeLike | None) -> _Types:
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
    types = [jax.dtypes.canonicalize_dtype(np.dtype(x.dtype)) for x in (a, b)]
    rows = [jax.ShapeDtypeStruct((1, 1), dtype) for dtype in types]

    def result(preferred: Any) -> np.dtype[Any]:
        product = functools.partial(
            device_matmul, precision=precision, preferred_element_type=preferred
        )
        dtype: np.dtype[Any] = np.dtype(jax.eval_shape(product, *rows).dtype)
        return dtype

    out = result(preferred)
    narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    return _Types(types[0], types[1], result(jnp.float32) if narrow else out, out)


def _plan(a: Any, b: Any, types: _Types, memory_limit: int | None) -> Plan:
    (m, k), n = a.shape, b.shape[1]
    itemsizes = (t.itemsize for t in (types.lhs, types.rhs, types.out, types.sums))
    devices = jax.local_devices()
    limit = memory_limit if memory_limit is not None else min(map(_free_bytes, devices))
    return choose_plan(Sizes(*map(int, (m, n, k)), *itemsizes), limit, len(devices))


def _free_bytes(device: jax.Device) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(_FREE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_HOST_SHARE * host / jax.local_device_count())


@functools.lru_cache(maxsize=64)
def _rates(types: _Types, precision: lax.PrecisionLike) -> tuple[float, float, float]:
    """Measure operations, and bytes to and from the first device, per second."""
    device = jax.local_devices()[0]
    size = _MEASURED_SIZE.get(device.platform, _MEASURED_SIZE["cpu"])
    lhs, rhs = (
        jax.device_put(np.zeros((size, size), dtype), device) for dtype in (types.lhs, types.rhs)
    )
    first, _ = _steps(precision, types.sums)
    # Pages that were never written would all be one page, which stays in the caches.
    host = np.ones((_MEASURED_BYTES >> 12, 1 << 12), np.uint8)

    def copied() -> Array:
        parts = [(Block("lhs", 0, 0), host)]
        return next(filter(None, to_device(parts, device, host.nbytes))).array

    there = copied()
    return (
        2 * size**3 / _seconds(lambda: first(lhs, rhs)),
        host.nbytes / _seconds(copied),
        host.nbytes / _seconds(lambda: to_host(there, device)),
    )


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)

"""A launch plan: everything about a kernel launch as one value, executed by the C++ handler.

A plan is checked when it is made, and errors state the numbers. ``ffi/cuda_launch.cc`` checks what
depends on the addresses and sizes of buffers when it executes a plan.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jax_tilekern.compilation.cubin import Entry
    from jax_tilekern.plans.gpu import Gpu

_MAX_BLOCK = (1024, 1024, 64)
_MAX_BLOCK_THREADS = 1024
MAX_INT32 = 2**31 - 1
MAX_GRID = (MAX_INT32, 65535, 65535)
# Clusters of more than 8 CTAs are not portable between GPUs of one architecture.
_MAX_CLUSTER_BLOCKS = 8
_TENSOR_MAP_BYTES = 128
# XLA aligns temporary buffers to this many bytes.
WORKSPACE_ALIGNMENT = 128

Dim3 = tuple[int, int, int]


class PredictedUs(NamedTuple):
    """Predicted microseconds of a call; ``None`` where there is no prediction."""

    ours: float | None = None  # the library's best kernel
    xla: float | None = None  # XLA's own operation

    def in_parentheses(self) -> str:
        """Return both times in words, or nothing."""
        if self.ours is None or self.xla is None:
            return ""
        return f" (predicted {self.ours:.4g} us, XLA {self.xla:.4g} us)"


NOT_PREDICTED = PredictedUs()


class PlanError(ValueError):
    """A launch that no GPU, or not the one that it is for, can execute; the message says why."""


@dataclass(frozen=True)
class Buffer:
    """A pointer parameter: the address of a buffer, plus an offset."""

    index: int  # over operands, then results, then workspaces
    offset_bytes: int = 0  # added to the buffer's address
    # Added for each step along the launch's ``repeats``; empty for a buffer that stays.
    steps_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.index < 0 or self.offset_bytes < 0 or min(self.steps_bytes, default=0) < 0:
            raise PlanError(f"{self}: index, offset and steps must not be negative")

    @property
    def parameter_bytes(self) -> int:
        return 8

    def attributes(self) -> dict[str, Any]:
        return {
            "buffer": self.index,
            "offset_bytes": self.offset_bytes,
            **_unless_empty("steps_bytes", self.steps_bytes),
        }


@dataclass(frozen=True)
class Scalars:
    """A parameter passed by value: a number or a struct, as the bytes the kernel sees."""

    data: bytes  # in the layout, with the padding, of the C++ type

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            raise TypeError(f"Scalars take bytes, not {type(self.data).__name__}")
        if not self.data:
            raise PlanError("Scalars of no bytes: a kernel parameter has at least one")

    @classmethod
    def pack(cls, layout: str, *values: float) -> Scalars:
        """Return a parameter packed with C's alignment by :mod:`struct`.

        ``layout`` is a format of :func:`struct.pack`, for example ``"i"``, ``"f"`` or ``"3q2i"``,
        with a number for each member. As in C, members are aligned, and the end is padded to the
        widest member's alignment.
        """
        widest = max((code for code in layout if code.isalpha()), key=struct.calcsize, default="b")
        return cls(struct.pack(f"@{layout}0{widest}", *values))

    @classmethod
    def int64(cls, *values: int) -> Scalars:
        """Return a parameter that is one ``long long`` or a struct of them."""
        return cls.pack(f"{len(values)}q", *values)

    @property
    def parameter_bytes(self) -> int:
        return len(self.data)

    def attributes(self) -> dict[str, Any]:
        return {"bytes": np.frombuffer(self.data, np.uint8)}


# Addresses and strides of a tensor map are multiples of this.
TMA_STRIDE_BYTES = 16

TensorMapDtype = Literal[
    "uint8", "uint16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "bfloat16", "tfloat32",
]  # fmt: skip

# The driver's CUtensorMapDataType, and bytes per element.
_TENSOR_MAP_DTYPES: dict[str, tuple[int, int]] = {
    "uint8": (0, 1), "uint16": (1, 2), "uint32": (2, 4), "int32": (3, 4), "uint64": (4, 8),
    "int64": (5, 8), "float16": (6, 2), "float32": (7, 4), "float64": (8, 8), "bfloat16": (9, 2),
    "tfloat32": (11, 4),
}  # fmt: skip
# By bytes: the driver's CUtensorMapSwizzle, CUtensorMapInterleave, CUtensorMapL2promotion.
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_INTERLEAVES = {0: 0, 16: 1, 32: 2}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_OOB_FILLS = {"zeros": 0, "nan": 1}


@dataclass(frozen=True)
class TensorMap:
    """A by-value ``CUtensorMap`` parameter, encoded for the buffer's address when executed.

    The rules are those of the driver's ``cuTensorMapEncodeTiled``; dimensions run innermost first.

    Attributes
    ----------
    buffer
        Which buffer, counted over operands, then results, then workspaces.
    dtype
        Element type. 8-bit floats are ``"uint8"``; ``"tfloat32"`` rounds float32 on its way.
    sizes
        Elements in each dimension, at most five dimensions.
    strides_bytes
        Bytes between elements of each dimension but the first; multiples of 16.
    box
        Elements of the tile in each dimension, at most 256 each.
    swizzle
        Bytes of the shared-memory swizzle: 0, 32, 64 or 128.
    element_strides
        Step between the elements taken in each dimension; empty for 1 everywhere.
    interleave
        0, 16 or 32 bytes.
    l2_promotion
        Bytes fetched into L2 at a time: 0, 64, 128 or 256.
    oob_fill
        What elements out of bounds read as: ``"zeros"``, or ``"nan"`` for float types.
    steps_bytes
        Added to the buffer's address for each step along the launch's ``repeats``, multiples of 16;
        empty for a buffer that stays.
    offset_bytes
        Added to the buffer's address, a multiple of 16.
    """

    buffer: int
    dtype: TensorMapDtype
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Literal[0, 32, 64, 128] = 0
    element_strides: tuple[int, ...] = ()
    interleave: Literal[0, 16, 32] = 0
    l2_promotion: Literal[0, 64, 128, 256] = 256
    oob_fill: Literal["zeros", "nan"] = "zeros"
    steps_bytes: tuple[int, ...] = ()
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        rank = len(self.sizes)
        _require(self.buffer >= 0, f"buffer {self.buffer} is negative")
        _require(1 <= rank <= 5, f"a tensor map has 1 to 5 dimensions, not {rank}: {self.sizes}")
        _require(
            len(self.strides_bytes) == rank - 1 and len(self.box) == rank,
            f"{rank} sizes take {rank - 1} strides and a box of {rank}, "
            f"not {len(self.strides_bytes)} and {len(self.box)}",
        )
        _require(
            len(self.element_strides) in (0, rank),
            f"{rank} sizes take {rank} element strides or none, not {self.element_strides}",
        )
        for what, value, choices in (
            ("dtype", self.dtype, _TENSOR_MAP_DTYPES),
            ("swizzle", self.swizzle, _SWIZZLES),
            ("interleave", self.interleave, _INTERLEAVES),
            ("l2_promotion", self.l2_promotion, _L2_PROMOTIONS),
            ("oob_fill", self.oob_fill, _OOB_FILLS),
        ):
            _require(
                value in choices, f"{what} {value!r} is none of {', '.join(map(str, choices))}"
            )
        _require(
            all(1 <= size <= 2**32 for size in self.sizes),
            f"sizes are 1 to 2**32 elements each, not {self.sizes}",
        )
        stride_unit = max(self.interleave, TMA_STRIDE_BYTES)
        _require(
            all(0 <= s < 2**40 and s % stride_unit == 0 for s in self.strides_bytes),
            f"strides are multiples of {stride_unit} bytes below 2**40, not {self.strides_bytes}",
        )
        _require(
            all(step >= 0 and step % TMA_STRIDE_BYTES == 0 for step in self.steps_bytes),
            f"steps are multiples of 16 bytes, not {self.steps_bytes}",
        )
        _require(
            self.offset_bytes >= 0 and self.offset_bytes % TMA_STRIDE_BYTES == 0,
            f"an offset is a multiple of 16 bytes, not {self.offset_bytes}",
        )
        _require(
            all(1 <= extent <= 256 for extent in self.box),
            f"a box has 1 to 256 elements in each dimension, not {self.box}",
        )
        _require(
            all(1 <= step <= 8 for step in self.element_strides),
            f"element strides are 1 to 8, not {self.element_strides}",
        )
        _require(
            self.interleave == 0 or rank >= 3, f"interleave takes 3 dimensions or more, not {rank}"
        )
        row = self.box[0] * self.element_bytes
        if self.interleave == 0:
            _require(row % 16 == 0, f"a box row is a multiple of 16 bytes, not {row}")
            _require(
                self.swizzle == 0 or row <= self.swizzle,
                f"a box row of {row} bytes exceeds the swizzle of {self.swizzle}",
            )
        elif self.interleave == 32:
            _require(self.swizzle == 32, f"interleave 32 takes swizzle 32, not {self.swizzle}")
        _require(
            self.oob_fill == "zeros" or "float" in self.dtype,
            f"oob_fill 'nan' takes a float type, not {self.dtype}",
        )

    @property
    def element_bytes(self) -> int:
        """Bytes per element."""
        return _TENSOR_MAP_DTYPES[self.dtype][1]

    @property
    def extent_bytes(self) -> int:
        """Bytes from the buffer's address to the end of the last element."""
        steps = zip(self.sizes[1:], self.strides_bytes, strict=True)
        return self.sizes[0] * self.element_bytes + sum((n - 1) * stride for n, stride in steps)

    @property
    def parameter_bytes(self) -> int:
        """Size of the kernel's parameter."""
        return _TENSOR_MAP_BYTES

    def attributes(self) -> dict[str, Any]:
        """Return what the handler reads: the driver's enumerations and arrays."""
        return {
            "buffer": self.buffer,
            "offset_bytes": self.offset_bytes,
            "dtype": _TENSOR_MAP_DTYPES[self.dtype][0],
            "sizes": np.array(self.sizes, np.int64),
            "box": np.array(self.box, np.int64),
            "element_strides": np.array(self.element_strides or (1,) * len(self.box), np.int64),
            "swizzle": _SWIZZLES[self.swizzle],
            "interleave": _INTERLEAVES[self.interleave],
            "l2_promotion": _L2_PROMOTIONS[self.l2_promotion],
            "oob_fill": _OOB_FILLS[self.oob_fill],
            "extent_bytes": self.extent_bytes,
            **_unless_empty("strides_bytes", self.strides_bytes),
            **_unless_empty("steps_bytes", self.steps_bytes),
        }


Parameter = Buffer | Scalars | TensorMap


def check_launch_shape(what: str, *, grid: Dim3, block: Dim3, cluster: Dim3) -> None:
    """Check a launch against what holds for every GPU; ``what`` begins the errors."""
    for name, dim in (("grid", grid), ("block", block), ("cluster", cluster)):
        _require(len(dim) == 3, f"{what}: {name} {dim} must have 3 dimensions")
        _require(min(dim) >= 1, f"{what}: {name} {dim} has a dimension below 1")
    for name, dim, limits in (("grid", grid, MAX_GRID), ("block", block, _MAX_BLOCK)):
        _require(
            all(n <= limit for n, limit in zip(dim, limits, strict=True)),
            f"{what}: {name} {dim} exceeds {limits}",
        )
    threads = math.prod(block)
    _require(
        threads <= _MAX_BLOCK_THREADS,
        f"{what}: block {block} has {threads} threads, more than {_MAX_BLOCK_THREADS}",
    )
    _require(
        all(n % c == 0 for n, c in zip(grid, cluster, strict=True)),
        f"{what}: grid {grid} is not a multiple of cluster {cluster}",
    )
    blocks = math.prod(cluster)
    _require(
        blocks <= _MAX_CLUSTER_BLOCKS,
        f"{what}: cluster {cluster} has {blocks} blocks, more than {_MAX_CLUSTER_BLOCKS}",
    )


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    entry: Entry  # compiled.entry(kernel.name)
    grid: Dim3  # CTAs in x, y, z
    block: Dim3  # threads of a CTA in x, y, z
    parameters: tuple[Parameter, ...]
    shared_memory_bytes: int = 0  # dynamic, of a CTA
    cluster: Dim3 = (1, 1, 1)  # CTAs of a cluster in x, y, z; divides grid
    # The launch is repeated over these dimensions, with buffers shifted by their steps.
    repeats: tuple[int, ...] = ()
    # It may begin before the plan's launch before it has ended (programmatic dependent launch),
    # which is on the same stream. Its kernel calls ``wait_for_prerequisites()`` of ``ptx.cuh``.
    overlaps: bool = False
    # It runs on a second stream, after all launches before it, and beside those after it until one
    # that joins. SMs that become free are given to the second stream first. The end of a plan
    # joins, too.
    branches: bool = False
    joins: bool = False  # It begins after the launches that branched.

    def __post_init__(self) -> None:
        check_launch_shape(
            f"launch of {self.entry.name}", grid=self.grid, block=self.block, cluster=self.cluster
        )
        threads = math.prod(self.block)
        self._require(
            threads <= self.entry.max_threads,
            f"block {self.block} has {threads} threads, more than {self.entry.max_threads}",
        )
        self._require(
            self.shared_memory_bytes >= 0,
            f"shared memory of {self.shared_memory_bytes} bytes is negative",
        )
        self._require(
            all(size >= 1 for size in self.repeats), f"repeats {self.repeats} have one below 1"
        )
        self._require(not (self.overlaps and self.repeats), "a launch that repeats cannot overlap")
        self._require(not (self.branches and self.joins), "a launch that branches cannot join")
        self._require(not (self.overlaps and self.joins), "a launch that joins cannot overlap")
        for parameter in self.parameters:
            steps = () if isinstance(parameter, Scalars) else parameter.steps_bytes
            self._require(
                len(steps) in (0, len(self.repeats)),
                f"steps {steps} do not match repeats {self.repeats}",
            )
        given = tuple(parameter.parameter_bytes for parameter in self.parameters)
        self._require(
            given == self.entry.parameter_bytes,
            f"parameters of {given} bytes, but the kernel takes {self.entry.parameter_bytes}",
        )

    def placed(self, buffers: Sequence[Buffer]) -> Launch:
        """Return the launch in a plan that has these buffers, or parts of them, for its own."""

        def moved(parameter: Parameter) -> Parameter:
            if isinstance(parameter, Scalars):
                return parameter
            if isinstance(parameter, Buffer):
                to = buffers[parameter.index]
                offset = parameter.offset_bytes + to.offset_bytes
                return replace(parameter, index=to.index, offset_bytes=offset)
            to = buffers[parameter.buffer]
            offset = parameter.offset_bytes + to.offset_bytes
            return replace(parameter, buffer=to.index, offset_bytes=offset)

        return replace(self, parameters=tuple(map(moved, self.parameters)))

    def _require(self, holds: bool, complaint: str) -> None:
        _require(holds, f"launch of {self.entry.name}: {complaint}")

    def attributes(self) -> dict[str, Any]:
        """Return what the handler reads, but for the cubin's number in its plan."""
        return {
            "entry": self.entry.symbol,
            "grid": np.array(self.grid, np.int64),
            "block": np.array(self.block, np.int64),
            "cluster": np.array(self.cluster, np.int64),
            "shared_memory_bytes": self.shared_memory_bytes,
            "parameters": _numbered(p.attributes() for p in self.parameters),
            **_unless_empty("repeats", self.repeats),
            **{name: 1 for name in ("overlaps", "branches", "joins") if getattr(self, name)},
        }


def overlapping(gpu: Gpu, *launches: Launch) -> tuple[Launch, ...]:
    """Return launches of which each but the first overlaps with the one before it, on Hopper."""
    if gpu.compute_capability < (9, 0):
        return launches
    first, *others = launches
    return (first, *(dataclasses.replace(launch, overlaps=True) for launch in others))


@dataclass(frozen=True)
class Exchange:
    """The data that devices along a mesh axis send each other while they run a plan.

    The plan multiplies a part of a matrix. In a *gather* a device has a shard of the matrix, which
    it sends to the others, and multiplies all shards. In a *scatter* it has all rows, and sends
    each of the others its term of the rows of the result that the other owns.
    """

    scatters: bool
    axis: str  # its name, for errors
    # The number of devices along the axis, and the distance between two neighbours' numbers.
    size: int
    stride: int
    # The number of rows of each part of a device's rows. Parts are sent one after the other.
    rows: tuple[int, ...]
    # Buffers: the matrix, the number of the device, the result, and what comes from the other
    # devices. A scatter computes terms for the others in ``send``.
    lhs: int
    device: int
    out: int
    receive: int
    send: int
    # Where the launches of each part end, among those of the plan: of a gather, those that multiply
    # a part; of a scatter, those that compute a term for another device, of each part, and then
    # those that compute a part of the device's own rows.
    ends: tuple[int, ...]
    keeps: bool = False  # whether a gather completes receive by the device's own shard
    # A buffer that has a further term of all rows of a scatter, if there is one.
    addend: int | None = None

    def attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        for name, x in vars(self).items():
            if isinstance(x, tuple):
                attributes[name] = np.array(x, np.int64)
            elif x is not None:
                attributes[name] = int(x) if isinstance(x, bool) else x
        return attributes


@dataclass(frozen=True)
class LaunchPlan:
    """The launches of one custom call, in order, over its operands, results and workspaces."""

    name: str  # in errors, in the HLO and in explain
    gpu: Gpu
    launches: tuple[Launch, ...]
    # The minimum alignment in bytes of each operand, then of each result. A call with another
    # number of buffers, or with a buffer that is less aligned, is an error.
    alignments: tuple[int, ...]
    # The dimensions of each operand, then of each result, from the outermost one in memory to the
    # innermost one; empty if all are row-major.
    orders: tuple[tuple[int, ...], ...] = ()
    # Sizes of extra outputs that XLA allocates, uninitialised and aligned to
    # ``WORKSPACE_ALIGNMENT``. Their buffer indices follow those of the results.
    workspace_bytes: tuple[int, ...] = ()
    # The choices that were made, for ``explain``, such as ``"128x256x64, 3 stages, 512 tiles on 132
    # SMs"``.
    reason: str = ""
    exchange: Exchange | None = None  # what devices send each other meanwhile
    predicted_us: PredictedUs = NOT_PREDICTED  # where the policy chose it over XLA

    def __post_init__(self) -> None:
        self._require(bool(self.launches), "a plan has at least one launch")
        for alignment in self.alignments:
            self._require(
                alignment >= 1 and alignment & (alignment - 1) == 0,
                f"alignment {alignment} is not a power of two",
            )
        for size in self.workspace_bytes:
            self._require(size >= 1, f"a workspace has at least one byte, not {size}")
        self._require(not self.launches[0].overlaps, "the first launch has none to overlap with")
        for before, launch in itertools.pairwise(self.launches):
            self._require(
                not launch.overlaps or launch.branches == before.branches,
                f"{launch.entry.name} overlaps with a launch on another stream",
            )
        for launch in self.launches:
            self._check_launch(launch)

    def _require(self, holds: bool, complaint: str) -> None:
        _require(holds, f"plan {self.name}: {complaint}")

    def _check_launch(self, launch: Launch) -> None:
        entry = launch.entry
        if not isinstance(entry.cubin, bytes):
            raise TypeError(f"cubin of {entry.name} is {type(entry.cubin).__name__}, not bytes")
        self._require(entry.cubin[:4] == b"\x7fELF", f"cubin of {entry.name} is not an ELF image")
        self._require(
            launch.cluster == (1, 1, 1) or self.gpu.compute_capability >= (9, 0),
            f"{entry.name} has cluster {launch.cluster}, which {self.gpu.arch} lacks",
        )
        self._require(
            not launch.overlaps or self.gpu.compute_capability >= (9, 0),
            f"{entry.name} overlaps with another launch, which {self.gpu.arch} lacks",
        )
        shared = entry.shared_memory_bytes + launch.shared_memory_bytes
        self._require(
            shared <= self.gpu.shared_memory_bytes,
            f"{entry.name} takes {shared} bytes of shared memory ({entry.shared_memory_bytes} "
            f"static, {launch.shared_memory_bytes} dynamic), more than the "
            f"{self.gpu.shared_memory_bytes} of {self.gpu.name}",
        )
        buffers = len(self.alignments) + len(self.workspace_bytes)
        for parameter in launch.parameters:
            if isinstance(parameter, Scalars):
                continue
            index = parameter.index if isinstance(parameter, Buffer) else parameter.buffer
            self._require(
                index < buffers, f"{entry.name} takes buffer {index} of {buffers}: {parameter}"
            )
            # Workspaces follow the buffers that state an alignment, and are aligned enough.
            if isinstance(parameter, TensorMap) and index < len(self.alignments):
                stated = self.alignments[index]
                self._require(
                    stated >= TMA_STRIDE_BYTES,
                    f"{entry.name}: buffer {index} has a tensor map, which takes an alignment of "
                    f"16 bytes, but states {stated}",
                )

    @functools.cached_property
    def digest(self) -> str:
        """A digest that identifies the plan in any process."""
        cubins = (launch.entry.cubin for launch in self.launches)
        parts = (repr(self).encode(), *(hashlib.sha256(cubin).digest() for cubin in cubins))
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def attributes(self) -> dict[str, Any]:
        """Return the custom call's attributes, as ``ffi/launch_plan.cc`` reads them."""
        workspaces = (WORKSPACE_ALIGNMENT,) * len(self.workspace_bytes)
        cubins = tuple(dict.fromkeys(launch.entry.cubin for launch in self.launches))
        launches = (
            {"cubin": cubins.index(launch.entry.cubin), **launch.attributes()}
            for launch in self.launches
        )
        return {
            "name": self.name,
            "arch": self.gpu.arch,
            "cubins": {str(i): np.frombuffer(cubin, np.uint8) for i, cubin in enumerate(cubins)},
            "alignments": np.array(self.alignments + workspaces, np.int64),
            "launches": _numbered(launches),
            **({"exchange": self.exchange.attributes()} if self.exchange else {}),
        }


@dataclass(frozen=True)
class NoKernel:
    """A planner's answer if no kernel covers a call."""

    reason: str
    predicted_us: PredictedUs = NOT_PREDICTED  # where XLA is predicted to be as fast


def _numbered(items: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    # FFI attributes have no lists of dictionaries, so the keys number the items.
    return {str(i): dict(item) for i, item in enumerate(items)}


def _unless_empty(name: str, values: tuple[int, ...]) -> dict[str, Any]:
    # FFI attributes have no empty arrays.
    return {name: np.array(values, np.int64)} if values else {}


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise PlanError(complaint)

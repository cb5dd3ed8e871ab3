"""The launch plan of a user's kernel, batched by ``vmap`` or not."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jax_tilekern.compilation.compiler import (
    Compiled,
    CompileError,
    Kernel,
    Source,
    compile_kernels,
)
from jax_tilekern.compilation.headers import advice
from jax_tilekern.compilation.image import Image
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.kernel_signature import (
    Argument,
    ParameterType,
    alignments,
    check_parameters,
    compiled_types,
    declared_types,
)
from jax_tilekern.plans.launch import (
    MAX_GRID,
    Buffer,
    Dim3,
    Launch,
    LaunchPlan,
    Parameter,
    Scalars,
    TensorMap,
)
from jax_tilekern.plans.occupancy import Occupancy, occupancy

BatchAxis = Literal["x", "y", "z"]


@dataclass(frozen=True)
class Array:
    """Shape and type of an input or output, without the dimensions of batches."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        """Return type and shape, such as ``float32[3,4]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Batch:
    """A dimension that ``vmap`` has put in front of all outputs and of some inputs."""

    size: int
    mapped: tuple[bool, ...]  # whether each input has the dimension


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel, as its user describes it.

    The kernel's parameters are pointers to inputs, outputs and workspaces, then tensor maps, then
    scalars, then, with a ``batch_axis``, a stride in elements for each input and output.
    """

    source: Source | Image
    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_memory_bytes: int
    scalars: tuple[np.generic, ...]
    tensor_maps: tuple[TensorMap, ...]
    workspaces: tuple[int, ...]
    options: tuple[str, ...]
    aliased: frozenset[int]
    alignment: int
    batch_axis: BatchAxis | None
    batches: tuple[Batch, ...]

    @property
    def kernel(self) -> Kernel:
        return Kernel(self.source, self.name, self.options)

    @property
    def buffers(self) -> tuple[Array, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments for the kernel's parameters, in their order."""
        strides = [f"the stride of {name}" for name in self._array_names]
        return (
            *(
                Argument("buffer", f"{name} of {x}", x.dtype, x.bytes, written=i in self._written)
                for i, (name, x) in enumerate(zip(self._array_names, self.buffers, strict=True))
            ),
            *(
                Argument("buffer", f"workspace {i} of {size} bytes", bytes=size)
                for i, size in enumerate(self.workspaces)
            ),
            *(Argument("tensor map", f"tensor map {i}") for i in range(len(self.tensor_maps))),
            *(
                Argument("scalar", f"scalar {i} of {x.dtype}", x.dtype, value=x)
                for i, x in enumerate(self.scalars)
            ),
            *(
                Argument("scalar", text, np.dtype(np.int64), value=0)
                for text in strides * (self.batch_axis is not None)
            ),
        )

    @property
    def _array_names(self) -> list[str]:
        return [f"input {i}" for i in range(len(self.inputs))] + [
            f"output {i}" for i in range(len(self.outputs))
        ]

    @property
    def _written(self) -> set[int]:
        """Buffers that the kernel writes through their own pointer."""
        return {len(self.inputs) + i for i in range(len(self.outputs)) if i not in self.aliased}

    def check(self) -> None:
        """Check what needs no compiler: tensor maps, and parameters by the source's text."""
        _check_tensor_maps(self)
        types = self.declared_types
        if types is not None:
            check_parameters(self.name, types, self.arguments)

    @property
    def declared_types(self) -> tuple[ParameterType, ...] | None:
        """Types of the kernel's parameters, if the source shows them before it is compiled."""
        if isinstance(self.source, Source):
            return declared_types(self.source.text, self.name)
        symbol = self.source.symbol(self.name)
        return None if symbol is None else compiled_types(symbol)


@dataclass(frozen=True)
class KernelPlan(LaunchPlan):
    """The launch plan of a user's kernel; its only launch may be repeated."""

    types_known: bool = True  # whether the types of its parameters were found and compared

    def __post_init__(self) -> None:
        super().__post_init__()
        # The plan has checked threads and shared memory, so only registers may not fit.
        held, threads = self.occupancy, math.prod(self.launch.block)
        self._require(
            held is None or held.blocks > 0,
            f"block {self.launch.block} has {threads} threads of {self.launch.entry.registers} "
            f"registers, more than an SM has; __launch_bounds__({threads}) at the "
            "kernel makes the compiler stay within them",
        )

    @property
    def launch(self) -> Launch:
        return self.launches[0]

    @property
    def occupancy(self) -> Occupancy | None:
        """CTAs that an SM holds at a time, or ``None`` for a GPU that is not known."""
        return occupancy(self.launch, self.gpu)

    @property
    def resources(self) -> str:
        entry, held = self.launch.entry, self.occupancy
        shared = entry.shared_memory_bytes + self.launch.shared_memory_bytes
        times = f", {math.prod(self.launch.repeats)} launches" if self.launch.repeats else ""
        share = (
            f", {held.blocks} blocks per SM ({held.fraction:.0%} of its warps, limited "
            f"by {held.limit})"
            if held
            else ""
        )
        return (
            f"{entry.registers} registers, {entry.spill_bytes} bytes spilled, {entry.stack_bytes} "
            f"bytes of stack, {shared} bytes of shared memory{share}{times}"
            + ("" if self.types_known else "; types of parameters not checked")
        )


def plan_kernel(call: KernelCall, gpu: Gpu) -> KernelPlan:
    compiled = _compile(call, gpu)
    grid, in_grid, repeated = _places(call)
    repeats = tuple(size for size, _ in repeated)
    steps = [
        tuple(strides[i] * array.dtype.itemsize for _, strides in repeated)
        for i, array in enumerate(call.buffers)
    ]
    entry = compiled.entry(call.name)
    types = compiled_types(entry.symbol) or call.declared_types
    if types is not None:
        check_parameters(call.name, types, call.arguments)
    mapped = {m.buffer for m in call.tensor_maps}
    count = len(call.buffers)
    aligned = tuple(
        max(call.alignment, by_type, 16 if i in mapped else 1)
        for i, by_type in enumerate(alignments(types, count))
    )
    _check_alignment(call, aligned, steps)

    pointers = [Buffer(i, steps_bytes=steps[i]) for i in range(count)]
    pointers += [Buffer(count + i) for i in range(len(call.workspaces))]
    maps = [
        replace(m, steps_bytes=steps[m.buffer]) if m.buffer < count else m for m in call.tensor_maps
    ]
    scalars = [Scalars(value.tobytes()) for value in call.scalars]
    strides = [] if call.batch_axis is None else [Scalars.int64(stride) for stride in in_grid]
    parameters: tuple[Parameter, ...] = (*pointers, *maps, *scalars, *strides)

    given = tuple(parameter.parameter_bytes for parameter in parameters)
    if given != entry.parameter_bytes:
        raise ValueError(
            f"kernel {call.name} takes {len(entry.parameter_bytes)} parameters of "
            f"{entry.parameter_bytes} bytes, but the call passes {len(given)} of {given}: "
            f"{', '.join(argument.text for argument in call.arguments)}"
        )
    launch = Launch(
        entry=entry,
        grid=grid,
        block=call.block,
        parameters=parameters,
        shared_memory_bytes=call.shared_memory_bytes,
        cluster=call.cluster,
        repeats=repeats,
    )
    in_launch = math.prod(grid) // math.prod(call.grid)
    return KernelPlan(
        name=call.name,
        gpu=gpu,
        launches=(launch,),
        alignments=aligned,
        workspace_bytes=tuple(size * in_launch for size in call.workspaces),
        types_known=types is not None,
    )


def _compile(call: KernelCall, gpu: Gpu) -> Compiled:
    try:
        return compile_kernels(call.kernel, arch=gpu.arch)
    except CompileError as error:
        message = advice(error.log)
        errors = re.findall(r"^(.*)\(\d+\): error: (.*)", error.log, re.MULTILINE)
        # NVRTC looks names up in a text of its own.
        if {file for file, _ in errors} == {"__nv_name_map"}:
            _, why = errors[0]
            raise CompileError(
                f"{call.source.file} has no kernel {call.name}; a kernel's namespace and template "
                "arguments are part of its name" + f" ({why})" * (f'"{call.name}"' not in why),
                error.log,
            ) from None
        if not message:
            raise
        raise CompileError(f"{message}\n{error}", error.log) from None


# Size of a dimension of batches, and its stride in elements for each input and output.
_Dimension = tuple[int, tuple[int, ...]]


def _places(call: KernelCall) -> tuple[Dim3, tuple[int, ...], list[_Dimension]]:
    """Return the grid, each buffer's batch stride along it, and the dimensions to repeat over."""
    dimensions = _batch_dimensions(call)
    unbatched = (0,) * len(call.buffers)
    if call.batch_axis is None:
        return call.grid, unbatched, dimensions
    axis = "xyz".index(call.batch_axis)
    # The innermost has the shortest strides, so blocks that run together share the most.
    if dimensions and dimensions[-1][0] <= MAX_GRID[axis]:
        size, strides = dimensions.pop()
        grid = (*call.grid[:axis], size, *call.grid[axis + 1 :])
        return grid, strides, dimensions  # type: ignore[return-value]
    return call.grid, unbatched, dimensions


def _batch_dimensions(call: KernelCall) -> list[_Dimension]:
    """Return the batches, outermost first, those merged that are one dimension in every array."""
    found: list[_Dimension] = []
    # From the inside out: a stride is what lies inside of the dimension.
    inside = [math.prod(array.shape) for array in call.buffers]
    for batch in reversed(call.batches):
        has = (*batch.mapped, *(True for _ in call.outputs))
        strides = tuple(size if mapped else 0 for size, mapped in zip(inside, has, strict=True))
        inside = [
            size * (batch.size if mapped else 1) for size, mapped in zip(inside, has, strict=True)
        ]
        if batch.size == 1:
            continue
        if found:
            size, inner = found[0]
            if all(outer == stride * size for outer, stride in zip(strides, inner, strict=True)):
                found[0] = (size * batch.size, inner)
                continue
        found.insert(0, (batch.size, strides))
    return found


def _check_alignment(
    call: KernelCall, alignments: tuple[int, ...], steps: list[tuple[int, ...]]
) -> None:
    for i, (array, alignment, shifts) in enumerate(
        zip(call.buffers, alignments, steps, strict=True)
    ):
        misaligned = [shift for shift in shifts if shift % alignment]
        if misaligned:
            kind, index = ("input", i) if i < len(call.inputs) else ("output", i - len(call.inputs))
            raise ValueError(
                f"kernel {call.name} relies on pointers aligned to {alignment} bytes, but vmap "
                f"shifts {kind} {index} of {array.dtype}{list(array.shape)} by {misaligned[-1]} "
                "bytes: pad it, or let the kernel take the batch in a dimension of its grid "
                "(batch_axis)"
            )


def _check_tensor_maps(call: KernelCall) -> None:
    if call.tensor_maps and call.batch_axis is not None:
        raise ValueError(
            f"kernel {call.name} has tensor maps and batch_axis={call.batch_axis!r}: a tensor map "
            "is of one array, so let vmap repeat the launch instead"
        )
    bytes_ = [array.bytes for array in call.buffers] + list(call.workspaces)
    for m in call.tensor_maps:
        if m.buffer >= len(bytes_):
            raise ValueError(
                f"kernel {call.name}: a tensor map of buffer {m.buffer}, but there are "
                f"{len(bytes_)} inputs, outputs and workspaces"
            )
        reach = m.offset_bytes + m.extent_bytes
        if reach > bytes_[m.buffer]:
            raise ValueError(
                f"kernel {call.name}: a tensor map reaches {reach} bytes into buffer "
                f"{m.buffer}, which has {bytes_[m.buffer]}"
            )

"""The settings of a ``cuda_kernel``, and their values for one call."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_tilekern.compilation.compiler import Source
from jax_tilekern.compilation.image import Image
from jax_tilekern.interop.global_modes import Modes
from jax_tilekern.ops.arguments import check_callable
from jax_tilekern.ops.cuda_kernel.sharding import parsed, sharding_rule
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.cuda_kernel import Array, Batch, BatchAxis, KernelCall
from jax_tilekern.plans.launch import Dim3, TensorMap, check_launch_shape
from jax_tilekern.primitives.linearity import OperandGroup

# Types with several elements per byte.
_PACKED = re.compile(r"u?int[24]$|float[46]_")


class Parameters(Mapping[str, Any]):
    """The keywords of a call, which are static: part of the key of JAX's compiled programs.

    They carry JAX's modes at the call, in which the user's other functions run too. They are equal
    only if they are indistinguishable, because Python has ``1 == 1.0 == True`` and ``0.0 == -0.0``.
    """

    def __init__(self, kernel: str, values: Mapping[str, Any], modes: Modes | None = None) -> None:
        for name, value in values.items():
            if isinstance(value, jax.Array):
                raise TypeError(
                    f"parameter {name} of kernel {kernel} is an array, {jax.typeof(value)}; "
                    "parameters are static. Pass it by position and read it through a pointer, or "
                    "make it a Python number (under jit, by static_argnames)"
                )
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"parameter {name} of kernel {kernel} is a {type(value).__name__}, which is "
                    "not hashable, as a static parameter must be"
                ) from None
        self._kernel, self._values = kernel, dict(values)
        self.modes = Modes.current() if modes is None else modes
        own = tuple(sorted((name, _exact(value)) for name, value in values.items()))
        self._key = (own, self.modes)

    def with_values(self, values: Mapping[str, Any]) -> Parameters:
        """Return parameters with more values, in the same modes."""
        return Parameters(self._kernel, {**self._values, **values}, self.modes)

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """64-bit if the functions of the user run with x64; ``by_types`` reads it."""
        return (np.dtype(np.float64),) if self.modes.x64 else ()

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parameters) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.items())


def _exact(value: Any) -> tuple[str, Any]:
    if isinstance(value, tuple):
        return type(value).__name__, tuple(map(_exact, value))
    number = isinstance(value, float | complex | np.inexact)
    return type(value).__name__, repr(value) if number else value


class Use(NamedTuple):
    """The properties of a call on which settings may depend."""

    inputs: tuple[Array, ...]  # without the dimensions of batches
    parameters: Parameters
    batches: tuple[Batch, ...] = ()  # the dimensions that vmap has put in front

    def __str__(self) -> str:
        """Return it as the arguments of a setting's function."""
        return ", ".join(filter(None, [*map(str, self.inputs), str(self.parameters)]))


@dataclass(frozen=True, eq=False)
class KernelSettings:
    """The settings of :func:`jax_tilekern.cuda_kernel`, and the rules that were attached."""

    label: str
    source: Source | Image
    out: Any
    name: Any
    grid: Any
    block: Any
    cluster: Any
    shared_memory_bytes: Any
    scalars: Any
    tensor_maps: Any
    workspaces: Any
    options: Any
    aliases: Mapping[int, int]
    alignment: int
    batch_axis: BatchAxis | None
    reference: Callable[..., Any] | None
    sharding_rule: Any
    tune: Mapping[str, tuple[Any, ...]]
    debug: bool
    linear: dict[OperandGroup, Callable[..., Any]]

    def __post_init__(self) -> None:
        if self.reference is not None:
            check_callable(f"kernel {self.label}", "reference", self.reference)
        if self.batch_axis not in (None, "x", "y", "z"):
            raise ValueError(
                f"kernel {self.label}: batch_axis is {self.batch_axis!r}, not 'x', 'y', 'z' or None"
            )
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(
                f"kernel {self.label}: alignment {self.alignment} is not a power of two"
            )
        if isinstance(self.sharding_rule, str):
            parsed(self.label, self.sharding_rule)
        if len(set(self.aliases.values())) < len(self.aliases):
            raise ValueError(
                f"kernel {self.label}: aliases={self.aliases} give one output's buffer to several "
                "inputs"
            )

    def outputs(self, use: Use) -> tuple[Array, ...]:
        """Return the types of the outputs, checked, as are those of the inputs."""
        inputs, given = use.inputs, several(self._value("out", use))
        outputs = tuple(self._output(i, one) for i, one in enumerate(given))
        if not outputs:
            raise ValueError(f"kernel {self.label}: out gives no outputs")
        for what, arrays in (("input", inputs), ("output", outputs)):
            for i, array in enumerate(arrays):
                if _PACKED.match(str(array.dtype)):
                    raise TypeError(
                        f"kernel {self.label}: {what} {i} is {array.dtype}, of which a byte holds "
                        "several; pass bytes, as uint8"
                    )
        for group in self.linear:
            if max(group) >= len(inputs):
                raise ValueError(
                    f"kernel {self.label}: deflinear({list(group)}), but there are {len(inputs)} "
                    "inputs"
                )
        for i, o in self.aliases.items():
            if not (0 <= i < len(inputs) and 0 <= o < len(outputs)):
                raise ValueError(
                    f"kernel {self.label}: aliases={{{i}: {o}}}, but there are {len(inputs)} "
                    f"inputs and {len(outputs)} outputs"
                )
            if inputs[i] != outputs[o]:
                raise ValueError(
                    f"kernel {self.label}: input {i} of {inputs[i]} cannot share the buffer "
                    f"of output {o} of {outputs[o]}"
                )
        return outputs

    def check_output_types(self, use: Use) -> None:
        """Raise a ``TypeError`` if x64 is off and an output, but no input, has 64-bit elements.

        Only the user's call is checked, because rules of a call may run in other modes.
        """
        for i, output in enumerate(self.outputs(use)):
            held = jax.dtypes.canonicalize_dtype(output.dtype)
            if output.dtype not in (held, *(x.dtype for x in use.inputs)):
                raise TypeError(
                    f"kernel {self.label}: output {i} is {output}, which JAX would make {held}; "
                    "set jax_enable_x64"
                )

    def candidates(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the values of parameters to tune that a call leaves open, the default first."""
        free = {name: values for name, values in self.tune.items() if name not in parameters}
        return [
            dict(zip(free, values, strict=True)) for values in itertools.product(*free.values())
        ]

    def parameters_of_meaning(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters that are not tuned, on which the results may depend."""
        return {name: value for name, value in parameters.items() if name not in self.tune}

    def rule(self, use: Use) -> ShardingRule | None:
        """Return the sharding rule of a call, if the kernel has one; it fits the shapes."""
        text = self._value("sharding_rule", use)
        if text is None:
            return None
        return sharding_rule(self.label, text, use.inputs, self.outputs(use), use.batches)

    def rule_text(self, use: Use) -> str:
        return str(self._value("sharding_rule", use))

    def returns_tuple(self, use: Use) -> bool:
        return isinstance(self._value("out", use), tuple | list)

    def call(self, use: Use) -> KernelCall:
        """Describe a call, with every setting checked."""

        def value(setting: str) -> Any:
            return self._value(setting, use)

        name = value("name")
        if not isinstance(name, str):
            raise TypeError(f"kernel {self.label}: name is {name!r}, not a string")
        shape = {what: self._dim3(what, value(what)) for what in ("grid", "block", "cluster")}
        check_launch_shape(f"kernel {self.label}", **shape)
        if self.batch_axis is not None and shape["grid"]["xyz".index(self.batch_axis)] != 1:
            raise ValueError(
                f"kernel {self.label}: grid {shape['grid']} has more than one block along "
                f"{self.batch_axis}, which batch_axis gives to the batch"
            )
        options = several(value("options"))
        for option in options:
            if not isinstance(option, str):
                raise TypeError(f"kernel {self.label}: option {option!r} is not a string")
        if isinstance(self.source, Image):
            if options:
                raise ValueError(
                    f"kernel {self.label}: {self.source.file} takes no options {options}"
                )
        elif self.debug:
            options += ("-DTILEKERN_DEBUG",)
        call = KernelCall(
            source=self.source,
            name=name,
            inputs=use.inputs,
            outputs=self.outputs(use),
            **shape,
            shared_memory_bytes=self._integer("shared_memory_bytes", value("shared_memory_bytes")),
            scalars=self._scalars(value("scalars")),
            tensor_maps=self._tensor_maps(value("tensor_maps")),
            workspaces=tuple(self._integer("workspaces", x) for x in several(value("workspaces"))),
            options=options,
            aliased=frozenset(self.aliases.values()),
            alignment=self.alignment,
            batch_axis=self.batch_axis,
            batches=use.batches,
        )
        call.check()
        return call

    def _value(self, setting: str, use: Use) -> Any:
        value = getattr(self, setting)
        if not callable(value):
            return value
        modes = use.parameters.modes.with_types_of([x.dtype for x in use.inputs])
        try:
            with modes.entered():
                structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in use.inputs]
                return value(*structs, **{**self.candidates(use.parameters)[0], **use.parameters})
        except Exception as error:
            kinds = (TypeError, NotImplementedError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), ValueError)
            raise kind(
                f"kernel {self.label}: the function {setting}({use}) raises "
                f"{type(error).__name__}: {error}"
            ) from error

    def _output(self, index: int, given: Any) -> Array:
        if not (hasattr(given, "shape") and hasattr(given, "dtype")):
            raise TypeError(
                f"kernel {self.label}: out gives {given!r} for output {index}, which has no shape "
                "and dtype; give a jax.ShapeDtypeStruct"
            )
        return Array(tuple(int(size) for size in given.shape), np.dtype(given.dtype))

    def _dim3(self, what: str, given: Any) -> Dim3:
        sizes = several(given)
        if not 1 <= len(sizes) <= 3:
            raise ValueError(f"kernel {self.label}: {what} has 1 to 3 dimensions, not {given!r}")
        x, y, z = (*(self._integer(what, size) for size in sizes), 1, 1)[:3]
        return x, y, z

    def _integer(self, what: str, given: Any) -> int:
        # A bool is an int in Python, but an error here.
        if isinstance(given, bool) or not isinstance(given, int | np.integer):
            raise TypeError(
                f"kernel {self.label}: {what} is {given!r}, a {type(given).__name__} and not an "
                "integer"
            )
        return int(given)

    def _scalars(self, given: Any) -> tuple[np.generic, ...]:
        scalars = several(given)
        for scalar in scalars:
            if not isinstance(scalar, np.generic):
                raise TypeError(
                    f"kernel {self.label}: scalar {scalar!r} has Python's type "
                    f"{type(scalar).__name__}, which does not say what the kernel takes; write "
                    "np.int32(...) for an int, np.float32(...) for a float, ..."
                )
        return scalars

    def _tensor_maps(self, given: Any) -> tuple[TensorMap, ...]:
        maps = several(given)
        for one in maps:
            if not isinstance(one, TensorMap):
                raise TypeError(f"kernel {self.label}: {one!r} is no jax_tilekern.TensorMap")
        return maps


def several(given: Any) -> tuple[Any, ...]:
    """Return the values of a setting that may be one or several."""
    return tuple(given) if isinstance(given, tuple | list) else (given,)

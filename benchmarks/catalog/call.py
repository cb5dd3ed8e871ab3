"""A random call, and the description of the operation that it calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.catalog.oracles import PEERS


@dataclasses.dataclass(frozen=True)
class Operand:
    """Shape, type, the order in which the dimensions are stored, and the values if given."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...]
    values: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[i] for i in self.order)

    def __str__(self):
        stored = "" if self.order == tuple(range(len(self.shape))) else f" in order {self.order}"
        return f"{self.dtype}{list(self.shape)}{stored}".replace(" in", " in", 1)


class Side(NamedTuple):
    """What computes a call beside ours, and a context in which it is compiled."""

    function: Callable[..., Any]  # of the operands as they are stored
    context: Callable[[], AbstractContextManager[Any]] | None = None


class Sampled(Protocol):
    """What ``sample`` asks of a call.

    Attributes
    ----------
    operands
        What is drawn.
    structs
        Types of what its functions take, as it is stored.
    operations
        How many operations it has.
    is_wide
        Whether an operand has a 64-bit type.
    """

    @property
    def operands(self) -> tuple[Operand, ...]: ...
    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]: ...
    @property
    def operations(self) -> float: ...
    @property
    def is_wide(self) -> bool: ...

    def values(self, seed: int) -> Sequence[Any]:
        """Return what its functions take: random numbers, or the operands that the call gives."""

    def of_namespace(self, namespace: Any) -> Callable[..., Any]:
        """Return the call of a namespace of functions."""

    def sides(self) -> dict[str, Side]:
        """Return what computes the call beside ours, by key; that of plain JAX is ``XLA``."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call, and how far its result may be from the exact one.

    Attributes
    ----------
    operation, arguments
        Its name, and its arguments besides the operands, in words.
    operands
        What is drawn.
    function
        The call, of a namespace of functions and the operands.
    errors
        ``errors(result, *operands)`` returns an error and its bound, arrays, for each result.
    cotangent_errors
        ``cotangent_errors(cotangents, cotangent, *operands)``, the same for ``jax.vjp``; ``None``
        where it is not checked.
    has_jaxs_bits
        Whether results have the bits of plain JAX's in every order of elements, NaN aside.
    up_to_signs
        Whether columns of the results have any sign.
    is_plain
        Whether NaN and infinity propagate as in a sum of products.
    has_peer
        Whether XLA compiles the same in plain JAX.
    """

    operation: str
    arguments: str
    operands: tuple[Operand, ...]
    function: Callable[..., Any]
    errors: Callable[..., Sequence[tuple[Any, Any]]]
    cotangent_errors: Callable[..., Sequence[tuple[Any, Any]]] | None = None
    is_plain: bool = True
    up_to_signs: bool = False
    has_jaxs_bits: bool = False
    has_peer: bool = True

    def __str__(self):
        arguments = f"; {self.arguments}" if self.arguments else ""
        return f"{self.operation}({', '.join(map(str, self.operands))}{arguments})"

    # What ``sample`` asks: see ``Sampled``.

    @property
    def is_wide(self) -> bool:
        return any(np.zeros((), x.dtype).real.itemsize == 8 for x in self.operands)

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.stored_shape, x.dtype) for x in self.operands]

    @property
    def operations(self) -> float:
        """The operations of the call in plain JAX, as far as XLA counts them."""
        with jax.enable_x64(self.is_wide):
            lowered = jax.jit(self.of_namespace(PEERS)).lower(*self.structs)
            found: Any = lowered.cost_analysis() or {}
        return float(found.get("flops", 0))

    def values(self, seed: int) -> Sequence[Any]:
        return random_arrays(self.operands, seed)

    def of_namespace(self, namespace: Any) -> Callable[..., Any]:
        def function(*stored: Any) -> Any:
            pairs = zip(stored, self.operands, strict=True)
            return self.function(
                namespace,
                *(jnp.transpose(x, tuple(np.argsort(y.order).tolist())) for x, y in pairs),
            )

        return function

    def sides(self) -> dict[str, Side]:
        return {"XLA": Side(self.of_namespace(PEERS))} if self.has_peer else {}


def random_arrays(operands: Sequence[Operand], seed: int) -> list[Any]:
    """Return normal numbers and small integers, or the values that an operand gives."""
    keys = jax.random.split(jax.random.key(seed), len(operands))
    return [_random(key, x) for key, x in zip(keys, operands, strict=True)]


def _random(key: Any, operand: Operand) -> Any:
    shape, dtype = operand.stored_shape, operand.dtype
    if operand.values is not None:
        return jnp.asarray(operand.values)
    if dtype.kind in "iub":
        least = 0 if dtype.kind in "ub" else -128
        return jax.random.randint(key, shape, least, 2 if dtype.kind == "b" else 128).astype(dtype)
    made = dtype if dtype.kind == "c" or dtype.itemsize >= 2 else jnp.float32
    return jax.random.normal(key, shape, made).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Description:
    """What the tests know of an operation.

    Attributes
    ----------
    name
        Its public name, and after a comma the variant, if there are several.
    draw
        Draws a call.
    shares_calls
        Whether a seed and an index draw the call of ``sample`` for all descriptions of this kind.
    derivatives
        How many times it can be differentiated.
    linear
        Whether it is linear in its first operand.
    on_host
        Whether it computes NumPy's arrays, outside of JAX's transformations.
    tolerance
        Share of the largest number by which float32 may differ from float64, beside that of types.
    own_types
        Whether results have other types than plain JAX's, such as float32 for 16-bit operands.
    """

    name: str
    draw: Callable[[Any], Any]
    derivatives: int = 2
    linear: bool = False
    on_host: bool = False
    tolerance: float = 1e-4
    own_types: bool = False
    shares_calls: bool = False


def describe(generator: Callable[..., Call], *names: str, **properties: Any) -> list[Description]:
    """Describe operations, the calls of which one generator draws, by the name."""
    return [
        Description(name, functools.partial(generator, name=name), **properties) for name in names
    ]

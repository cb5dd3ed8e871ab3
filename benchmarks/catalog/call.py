"""A random call, and the description of the operation that it calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Operand:
    """Shape, type, the order in which the dimensions are stored, and the values if given."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...]
    values: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __str__(self):
        stored = "" if self.order == tuple(range(len(self.shape))) else f" in order {self.order}"
        return f"{self.dtype}{list(self.shape)}{stored}".replace(" in", " in", 1)


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
    up_to_signs
        Whether columns of the results have any sign.
    is_plain
        Whether NaN and infinity propagate as in a sum of products.
    """

    operation: str
    arguments: str
    operands: tuple[Operand, ...]
    function: Callable[..., Any]
    errors: Callable[..., Sequence[tuple[Any, Any]]]
    cotangent_errors: Callable[..., Sequence[tuple[Any, Any]]] | None = None
    is_plain: bool = True
    up_to_signs: bool = False

    def __str__(self):
        arguments = f"; {self.arguments}" if self.arguments else ""
        return f"{self.operation}({', '.join(map(str, self.operands))}{arguments})"


@dataclasses.dataclass(frozen=True)
class Description:
    """What the tests know of an operation.

    Attributes
    ----------
    name
        Its public name, and after a comma the variant, if there are several.
    draw
        Draws a call.
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
    draw: Callable[[Any], Call]
    derivatives: int = 2
    linear: bool = False
    on_host: bool = False
    tolerance: float = 1e-4
    own_types: bool = False


def describe(generator: Callable[..., Call], *names: str, **properties: Any) -> list[Description]:
    """Describe operations, the calls of which one generator draws, by the name."""
    return [
        Description(name, functools.partial(generator, name=name), **properties) for name in names
    ]

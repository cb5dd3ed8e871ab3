"""What a public function does before it is traced, so that an eager call costs what JAX's own does.

The body of a public function is a ``jax.jit`` that is inlined where it is traced, as the functions
of ``jax.numpy`` are. An eager call is then the dispatch of a compiled program, and a call inside a
``jit`` copies equations that were made for the same types before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jax_tilekern import compat

Function = TypeVar("Function", bound=Callable[..., Any])


def jitted(*static: str) -> Callable[[Function], Function]:
    """Return a decorator for the body of a public function, whose arguments ``static`` names."""
    decorator: Any = functools.partial(
        jax.jit, static_argnames=static, inline=compat.inlined_when_traced
    )
    return decorator  # type: ignore[no-any-return]


def as_operand(x: Any) -> Any:
    """Return what an operand's ``__jax_array__`` gives, which ``jax.jit`` does not call."""
    if isinstance(x, jax.Array | np.ndarray):
        return x
    convert = getattr(x, "__jax_array__", None)
    return x if convert is None else convert()


def as_static(value: Any) -> Any:
    """Return a static argument as a value that has a hash: sequences as tuples."""
    if isinstance(value, np.ndarray):
        return as_static(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(as_static, value))
    return value

"""How JAX's own primitives are taken over while they are traced: the mechanism of ``patch``.

JAX traces an operation by ``primitive.bind``. :func:`intercept` shadows that method on one
primitive object, once and for good, by a function that does nothing but look at a flag of JAX's
own kind. The flag belongs to the thread, and its value is part of the key under which JAX keeps
what it has traced, so what is traced under one value is never found under the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax

from jax_tilekern.primitives import compat

P = ParamSpec("P")
R = TypeVar("R")

_intercepting = jax.make_user_context(False)


def intercepting() -> AbstractContextManager[None]:
    """Let intercepted primitives trace to their replacements, in this thread."""
    context: AbstractContextManager[None] = _intercepting(True)
    return context


def by_xla(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` reach JAX's own primitives, wherever it is called."""

    @functools.wraps(function)
    def not_intercepted(*args: P.args, **kwargs: P.kwargs) -> R:
        with _intercepting(False):
            return function(*args, **kwargs)

    return not_intercepted


def intercept(primitive: compat.Primitive, replacement: Callable[..., Any]) -> None:
    """Let ``primitive`` trace to ``replacement`` inside :func:`intercepting`.

    Parameters
    ----------
    primitive
        One of JAX's.
    replacement
        Called with the operands and parameters of the primitive. What it calls reaches JAX's own
        primitives.
    """
    bind: Callable[..., Any] = primitive.bind
    replaced = by_xla(replacement)

    @functools.wraps(bind)
    def intercepted(*operands: Any, **params: Any) -> Any:
        if _intercepting.value and not compat.in_pallas_kernel():
            return replaced(*operands, **params)
        return bind(*operands, **params)

    vars(primitive)["bind"] = intercepted


def release(primitive: compat.Primitive) -> None:
    """Undo :func:`intercept`."""
    del vars(primitive)["bind"]

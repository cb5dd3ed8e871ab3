"""Interception of JAX's own primitives while they are traced: the mechanism of ``patch``.

JAX traces an operation by ``primitive.bind``. :func:`intercept` permanently shadows that method on
one primitive object with a function that only tests a flag. The flag is a setting: it belongs to
the thread, and a trace under one value is never reused under the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.scope import Setting

P = ParamSpec("P")
R = TypeVar("R")

_intercepting = Setting("intercepting", False)


def intercepting() -> AbstractContextManager[None]:
    """Make intercepted primitives trace to their replacements, in this thread."""
    return _intercepting(True)


def by_xla(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` bind JAX's own primitives, wherever it is called."""

    @functools.wraps(function)
    def not_intercepted(*args: P.args, **kwargs: P.kwargs) -> R:
        with _intercepting(False):
            return function(*args, **kwargs)

    return not_intercepted


def intercept(primitive: compat.Primitive, replacement: Callable[..., Any]) -> None:
    """Make ``primitive`` trace to ``replacement`` inside :func:`intercepting`.

    Parameters
    ----------
    primitive
        A primitive of JAX.
    replacement
        A function of the operands and parameters of the primitive. Its own calls bind JAX's
        primitives.
    """
    bind: Callable[..., Any] = primitive.bind
    # The primitive's parameters are final: no mode changes what they say.
    replaced = by_xla(mode_independent(replacement))

    @functools.wraps(bind)
    def intercepted(*operands: Any, **params: Any) -> Any:
        if _intercepting.value and not compat.in_pallas_kernel():
            return replaced(*operands, **params)
        return bind(*operands, **params)

    vars(primitive)["bind"] = intercepted


def release(primitive: compat.Primitive) -> None:
    """Undo :func:`intercept`."""
    del vars(primitive)["bind"]

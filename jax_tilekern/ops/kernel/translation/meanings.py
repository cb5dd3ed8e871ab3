"""Equations whose primitive is not JAX's own, as the JAX functions that they mean."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop import compat
from jax_tilekern.primitives.operation import references


def meaning_of(eqn: Any) -> Any:
    """Return the jaxpr of what an equation means, or ``None`` if its primitive is JAX's own.

    A primitive of another library means what its ``def_impl`` computes outside of ``vmap``, as a
    lane is: Equinox's ``unvmap_any`` is ``any`` of the lane's own array, for example.
    """
    name = eqn.primitive.name
    function: Callable[..., Any] | None = references.get(name) or _implementation(eqn.primitive)
    if function is None:
        return None
    with compat.without_mesh():
        try:
            return jax.make_jaxpr(functools.partial(function, **eqn.params))(
                *(x.aval for x in eqn.invars)
            )
        except (TypeError, ValueError, NotImplementedError) as error:
            if name in references:
                raise
            raise Untranslatable(f"no CUDA for {name}: {error}") from error


def _implementation(primitive: Any) -> Callable[..., Any] | None:
    function: Any = getattr(primitive, "impl", None)
    # JAX's own primitives are not meant to be traced by their implementation.
    if not inspect.isfunction(function) or function.__module__.split(".")[0] in ("jax", "jaxlib"):
        return None
    found: Callable[..., Any] = function
    return found

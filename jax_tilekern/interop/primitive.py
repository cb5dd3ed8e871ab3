"""Primitives whose equations have the settings that they are traced under."""

from __future__ import annotations

from typing import Any

from jax_tilekern.interop import compat
from jax_tilekern.scope import with_traced_settings

# JAX would show the frame of ``bind`` as the user's, of a call outside of a function.
compat.hide_frames(__file__)


class Primitive(compat.Primitive):
    """A primitive of this library; see :mod:`jax_tilekern.scope`."""

    def bind(self, *operands: Any, **params: Any) -> Any:
        """Bind the primitive, as JAX does when it evaluates an equation, too."""
        bound: Any = super().bind
        return bound(*operands, **with_traced_settings(params))

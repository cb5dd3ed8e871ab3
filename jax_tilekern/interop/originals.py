"""JAX's modules as they are when the library is imported.

A program may replace JAX's functions by this library's, for example ``jax.numpy.sum`` by
:func:`jax_tilekern.sum`. Code that means JAX's own function of such a name finds it here.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import jax
import jax.scipy.linalg

__all__ = ["jnp", "jsp_linalg", "lax", "ops"]

if TYPE_CHECKING:
    import jax.numpy as jnp
    from jax import lax, ops
    from jax.scipy import linalg as jsp_linalg
else:

    def _copied(module: types.ModuleType, **submodules: Any) -> types.ModuleType:
        copy = types.ModuleType(module.__name__, module.__doc__)
        vars(copy).update(vars(module), **submodules)
        return copy

    jnp = _copied(jax.numpy, linalg=_copied(jax.numpy.linalg))
    lax = _copied(jax.lax, linalg=_copied(jax.lax.linalg))
    ops = _copied(jax.ops)
    jsp_linalg = _copied(jax.scipy.linalg)

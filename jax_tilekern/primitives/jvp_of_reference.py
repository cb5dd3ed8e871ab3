"""Derivatives of an operation that are those of a function of other operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jax_tilekern.interop.compat import ad


def jvp_of(
    reference: Callable[..., Sequence[Array]],
    primals: Sequence[Array],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    """Differentiate a function with respect to the operands that have a tangent."""
    differentiated = [i for i, x in enumerate(tangents) if type(x) is not ad.Zero]

    def of_differentiated(*values: Array) -> Sequence[Array]:
        operands = list(primals)
        for i, value in zip(differentiated, values, strict=True):
            operands[i] = value
        return reference(*operands, **params)

    return jax.jvp(
        of_differentiated,
        [primals[i] for i in differentiated],
        [tangents[i] for i in differentiated],
    )

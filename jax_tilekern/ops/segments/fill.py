"""An array of equal elements: the primitive of a kernel, which stores whole vectors.

XLA stores one element of 16 bits as slowly as one of 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.ops.planned_kernel import define_kernel, planned_kernel
from jax_tilekern.plans.segments.fill import plan_fill
from jax_tilekern.primitives.operation import Fallback, PlannedKernel


def filled(shape: Sequence[int], value: np.ndarray[Any, Any]) -> Array:
    """Return an array of a shape, each element of which is a scalar."""
    (result,) = _bind(shape=tuple(shape), dtype=value.dtype, element=value.tobytes())
    return result  # type: ignore[no-any-return]


def _reference(*, shape: tuple[int, ...], dtype: np.dtype[Any], element: bytes) -> list[Array]:
    return [jnp.full(shape, np.frombuffer(element, dtype)[0], dtype)]


def _planned(
    *_: Any, shape: tuple[int, ...], element: bytes, **__: Any
) -> PlannedKernel | Fallback:
    return planned_kernel((), plan_fill, math.prod(shape), element)


_bind = define_kernel(
    "tilekern_fill",
    _reference,
    _planned,
    describe=lambda shape, **_: f"fill an array of shape {shape}",
    like_results=_reference,
)

"""Operands of 8-bit floats and their scales: checks, and the values that both stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.ops.quantisation.quantize import scales_of_elements
from jax_tilekern.plans.gemm.arithmetic import FP8
from jax_tilekern.plans.quantize import BLOCK


def check_types(function: str, lhs: Array, rhs: Array, out: Any) -> None:
    """Raise an error unless the types of a product and its contracted sizes fit."""
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype not in FP8:
            raise TypeError(
                f"{function} multiplies float8_e4m3fn and float8_e5m2, and {name} is {x.dtype}; "
                "jax_tilekern.quantize makes them"
            )
        if x.ndim < 2:
            raise ValueError(f"{name} of {function} has at least 2 dimensions, not {x.shape}")
    check_result(function, out)
    if lhs.shape[-1] != rhs.shape[-1]:
        raise ValueError(
            f"{function} contracts the last dimensions, which differ: "
            f"lhs {lhs.shape}, rhs {rhs.shape}"
        )


def check_result(function: str, dtype: Any) -> None:
    """Raise an error unless a result has a type of floats."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"preferred_element_type of {function} is a float type, not {np.dtype(dtype)}"
        )


def check_scales(function: str, name: str, x: Array, scales: Array, rows: Sequence[int]) -> None:
    """Raise an error unless scales fit an operand; they may have so many rows."""
    if scales.dtype != np.float32:
        raise TypeError(f"{name}_scales of {function} are float32, not {scales.dtype}")
    *leading, _, k = x.shape
    possible = [
        (*leading, r, c) for r in dict.fromkeys(rows) for c in dict.fromkeys((blocks_of(k), 1))
    ]
    if scales.shape not in possible:
        raise ValueError(
            f"{name}_scales of {function} have shape {scales.shape}; {name} {x.shape} has scales "
            "of shape " + " or ".join(map(str, possible))
        )


def blocks_of(size: int) -> int:
    """Return the number of blocks along a dimension."""
    return -(-size // BLOCK)


def refuse_tangent(function: str, operand: int) -> None:
    """Raise the error about a tangent of ``lhs`` or ``rhs``."""
    raise TypeError(
        f"{function} has no derivative by {('lhs', 'rhs')[operand]}, because 8-bit floats have no "
        "useful tangents: take jax_tilekern.fp8_dot_general, or jax.lax.stop_gradient"
    )


def dequantized(x: Array, scales: Array) -> Array:
    """Return values times the scales of their blocks, in float32."""
    for axis in (x.ndim - 2, x.ndim - 1):
        size = x.shape[axis]
        if scales.shape[axis] not in (1, size):
            scales = scales_of_elements(scales, axis, size)
    return x.astype(np.float32) * scales

"""Operands that have scales: checks, and the values that both stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.ops.quantisation.quantize import scales_of_elements
from jax_tilekern.plans.gemm.arithmetic import FP8, SUB_BYTE_INTEGERS
from jax_tilekern.plans.quantize import BLOCK, GROUPS, INTEGERS, QUANTIZED_DTYPES
from jax_tilekern.primitives.operation import lowering_platform


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


def check_weights(
    function: str, x: Array, w: Array, scales: Array, zeros: Array | None, out: Any
) -> None:
    """Raise an error unless the operands of a product with quantised weights fit."""
    if x.dtype not in QUANTIZED_DTYPES:
        hint = "; 8-bit floats have lhs_scales" if x.dtype in FP8 else ""
        raise TypeError(
            f"{function} without lhs_scales multiplies bfloat16, float16 or float32, and lhs is "
            f"{x.dtype}{hint}"
        )
    if w.dtype not in (*INTEGERS, *FP8):
        raise TypeError(
            f"{function} without lhs_scales has rhs of int4, int8, float8_e4m3fn or float8_e5m2, "
            f"not {w.dtype}; jax_tilekern.quantize makes them"
        )
    check_result(function, out)
    for name, each in (("lhs", x), ("rhs", w)):
        if each.ndim < 2:
            raise ValueError(f"{name} of {function} has at least 2 dimensions, not {each.shape}")
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(
            f"{function} contracts the last dimensions, which differ: lhs {x.shape}, rhs {w.shape}"
        )
    check_weight_scales(f"{function}: rhs_", w, scales, zeros)


def refuse_zeros(function: str, zeros: Array | None) -> None:
    """Raise an error about zero points of a product whose operands are 8-bit floats."""
    if zeros is not None:
        raise TypeError(
            f"{function} with lhs_scales multiplies 8-bit floats, which have no rhs_zeros; weights "
            "have zero points, where lhs_scales is None"
        )


def check_weight_scales(what: str, w: Array, scales: Array, zeros: Array | None) -> None:
    """Raise an error unless scales and zero points fit weights.

    ``what`` is the function and what precedes their names, as in ``"scaled_matmul: rhs_"``.
    """
    *leading, rows, k = w.shape
    counts = dict.fromkeys((*(blocks_of(k, group) for group in reversed(GROUPS)), 1))
    possible = [(*leading, r, c) for r in dict.fromkeys((rows, blocks_of(rows), 1)) for c in counts]
    named = {"scales": scales} if zeros is None else {"scales": scales, "zeros": zeros}
    for name, array in named.items():
        if array.dtype not in QUANTIZED_DTYPES:
            raise TypeError(f"{what}{name} are float32, bfloat16 or float16, not {array.dtype}")
    if scales.shape not in possible:
        raise ValueError(
            f"{what}scales have shape {scales.shape}; weights of shape {w.shape} have scales of "
            f"each {', '.join(map(str, GROUPS))} or all of {k}, of shape "
            + " or ".join(map(str, possible))
        )
    if zeros is not None and zeros.shape != scales.shape:
        prefix = what.rpartition(" ")[2]
        raise ValueError(
            f"{what}zeros have shape {zeros.shape}, and {prefix}scales {scales.shape}; each scale "
            "has a zero point"
        )


def blocks_of(size: int, block: int = BLOCK) -> int:
    """Return the number of blocks along a dimension."""
    return -(-size // block)


def block_of_scales(count: int, size: int) -> int:
    """Return the block along the contracted dimension, of which there are so many scales.

    Different blocks have different numbers of scales, unless one scale serves all of the dimension.
    """
    return next(block for block in GROUPS if blocks_of(size, block) == count)


def refuse_tangent(function: str, operand: int) -> None:
    """Raise the error about a tangent of ``lhs`` or ``rhs``."""
    raise TypeError(
        f"{function} has no derivative by {('lhs', 'rhs')[operand]}, because 8-bit floats have no "
        "useful tangents: take jax_tilekern.fp8_dot_general, or jax.lax.stop_gradient"
    )


def dequantized(x: Array, scales: Array, zeros: Array | None = None) -> Array:
    """Return values, less their zero points, times the scales of their blocks, in float32."""
    wide = _in_bytes(x).astype(np.float32)
    if zeros is not None:
        wide = wide - of_elements(zeros, x)
    return wide * of_elements(scales, x)


def _in_bytes(x: Array) -> Array:
    """Return few 4-bit integers as an array of bytes on GPUs.

    XLA's fusions of a product with fewer than some hundred of them are wrong where it does not
    autotune.
    """
    is_small = isinstance(x.size, int) and x.size < 4096
    if lowering_platform.value != "cuda" or x.dtype not in SUB_BYTE_INTEGERS or not is_small:
        return x
    whole: Array = lax.optimization_barrier(x.astype(np.int8))
    return whole


def of_elements(scales: Array, x: Array) -> Array:
    """Return the scales or zero points of blocks for the elements of ``x``, in float32.

    What all of a dimension has is left to broadcast.
    """
    for axis in (x.ndim - 2, x.ndim - 1):
        size, count = x.shape[axis], scales.shape[axis]
        if count not in (1, size):
            block = BLOCK if axis == x.ndim - 2 else block_of_scales(count, size)
            scales = scales_of_elements(scales, axis, size, block)
    return scales.astype(np.float32)

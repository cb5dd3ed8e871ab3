"""The arithmetic of a product: the types it computes in, and the error that ``precision`` allows.

``precision`` is JAX's: ``None``, a pair of ``jax.lax.Precision`` or a
``jax.lax.DotAlgorithmPreset``. A kernel takes a call only if its error is no larger than the
name promises; presets that no kernel implements are XLA's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_tilekern.plans.cxx import Dtype

F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)
FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
# NumPy does not say that these are integers.
SUB_BYTE_INTEGERS = tuple(
    np.dtype(x) for x in (ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4)
)

# Result types that kernels write; the first is the accumulator's.
_RESULTS: dict[Dtype, tuple[Dtype, ...]] = {
    F32: (F32,),
    F64: (F64,),
    BF16: (F32, BF16),
    F16: (F32, F16),
    INT8: (INT32,),
    **dict.fromkeys(FP8, (F32, BF16, F16)),
}

# Result types that are rounded from the accumulator's when no kernel writes them.
_ROUNDED: dict[Dtype, tuple[Dtype, ...]] = {
    F32: (BF16, F16, *FP8),
    F64: (F32, BF16, F16),
    INT32: (INT8, np.dtype(np.int16)),
}

# Presets that split float32 operands.
_SPLIT_FLOAT32 = (
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "TF32_TF32_F32_X3",
)

# Presets that a kernel on operands of its own type satisfies. A preset that accumulates in a
# 16-bit type is satisfied by accumulation in float32.
_OWN_PRESETS: dict[Dtype, tuple[str, ...]] = {
    BF16: ("BF16_BF16_F32", "BF16_BF16_BF16"),
    F16: ("F16_F16_F32", "F16_F16_F16"),
    F32: ("F32_F32_F32",),
    F64: ("F64_F64_F64",),
    INT8: (),
    **dict.fromkeys(FP8, ("ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM")),
}


@dataclass(frozen=True)
class ElementTypes:
    """Element types that kernels of an arithmetic take.

    Attributes
    ----------
    operands
        Types of the operands, in any pairing.
    results
        Types of the result.
    """

    operands: tuple[Dtype, ...]
    results: tuple[Dtype, ...]


# The types that each arithmetic supports. A family of kernels may support fewer.
TYPES: dict[str, ElementTypes] = {
    "bf16": ElementTypes((BF16,), (BF16, F32)),
    "f16": ElementTypes((F16,), (F16, F32)),
    "tf32": ElementTypes((F32,), (F32,)),
    "f32": ElementTypes((F32,), (F32,)),
    "f32_emulated": ElementTypes((F32,), (F32,)),
    "f32_normwise": ElementTypes((F32,), (F32,)),
    "f64": ElementTypes((F64,), (F64,)),
    "int8": ElementTypes((INT8,), (INT32,)),
    "fp8": ElementTypes(FP8, (F32, BF16, F16)),
    "fp8_fast": ElementTypes(FP8, (F32, BF16, F16)),
}


@dataclass(frozen=True)
class Converted:
    """The product is done in other types: operands cast before it, the result after it."""

    operands: Dtype
    result: Dtype
    reason: str


def accumulator_dtype(operands: Dtype, product: Dtype | None = None) -> Dtype:
    """Return the type in which products are accumulated.

    Parameters
    ----------
    operands
        Type of the operands.
    product
        Type of the product. If it is wider than kernels' accumulators, it is the answer.
    """
    own = np.dtype(operands)
    if own.kind != "b" and own.itemsize < F32.itemsize:
        own = INT32 if own.kind in "iu" or own in SUB_BYTE_INTEGERS else F32
    return own if product is None or product.itemsize <= own.itemsize else np.dtype(product)


def precision_name(precision: Any) -> str:
    """Name of a canonical ``precision``: of a pair, the higher one."""
    if precision is None:
        return "DEFAULT"
    # A jax.lax.DotAlgorithm is a named tuple.
    if type(precision) is tuple:
        return str(max(precision, key=lambda p: int(p.value)).name)
    return str(getattr(precision, "name", precision))


def cpu_arithmetic(lhs: Dtype, rhs: Dtype, out: Dtype, precision: str) -> str | Converted | None:
    """Arithmetic on a CPU, where every precision of the operands' own type is exact enough.

    Returns
    -------
    str | Converted | None
        The arithmetic's name, a conversion that leads to one, or ``None``.
    """
    if precision not in ("DEFAULT", "HIGH", "HIGHEST", *_OWN_PRESETS.get(lhs, ())):
        return None
    return _with_result(lhs, rhs, out, str(lhs))


def cuda_arithmetic(lhs: Dtype, rhs: Dtype, out: Dtype, precision: str) -> str | Converted | None:
    """Arithmetic on a GPU, where float32 operands go through TF32 unless told otherwise.

    Returns
    -------
    str | Converted | None
        The arithmetic's name, a conversion that leads to one, or ``None``.
    """
    if lhs == F32:
        if precision in ("DEFAULT", "HIGH", "TF32_TF32_F32"):
            return _with_result(lhs, rhs, out, "tf32")
        # XLA's BF16_X9 has TF32's error on Hopper (2.9e-4 at 4096 cubed, measured).
        if precision in ("HIGHEST", "F32_F32_F32", "BF16_BF16_F32_X9"):
            return _with_result(lhs, rhs, out, "f32")
        # A hi/lo split into two float16 is as accurate as one into three bfloat16, and costs less.
        if precision in _SPLIT_FLOAT32:
            return _with_result(lhs, rhs, out, "f32_emulated")
        for narrow in (BF16, F16):
            if precision == _OWN_PRESETS[narrow][0] and out == F32:
                return Converted(narrow, F32, f"{precision} takes {narrow} operands")
        return None
    if precision not in ("DEFAULT", "HIGH", "HIGHEST", *_OWN_PRESETS.get(lhs, ())):
        return None
    if lhs in FP8:
        # XLA's default does not promote accumulators either.
        fast = precision in ("DEFAULT", "ANY_F8_ANY_F8_F32_FAST_ACCUM")
        return _with_result(lhs, rhs, out, "fp8_fast" if fast else "fp8")
    names: dict[Dtype, str] = {F64: "f64", BF16: "bf16", F16: "f16", INT8: "int8"}
    return _with_result(lhs, rhs, out, names.get(lhs, ""))


def _with_result(lhs: Dtype, rhs: Dtype, out: Dtype, name: str) -> str | Converted | None:
    if lhs not in _RESULTS or not (lhs == rhs or (lhs in FP8 and rhs in FP8)):
        return None
    if out in _RESULTS[lhs]:
        return name
    accumulator = _RESULTS[lhs][0]
    if lhs == INT8 and out in (F32, BF16, F16):
        # Products are exact, and accumulators float32. (XLA's compiler crashes on this on a GPU.)
        return Converted(F32, F32, "int8 products are accumulated in float32")
    if out in _ROUNDED[accumulator]:
        return Converted(lhs, accumulator, f"{lhs} products are accumulated in {accumulator}")
    return None

"""How element types and compile-time choices are written in a kernel's C++ name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Dtype = np.dtype[Any]

CXX_TYPES: dict[Dtype, str] = {
    np.dtype(np.bool_): "bool",
    np.dtype(np.int8): "signed char",
    np.dtype(np.int16): "short",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "long long",
    np.dtype(np.uint8): "unsigned char",
    np.dtype(np.uint16): "unsigned short",
    np.dtype(np.uint32): "unsigned int",
    np.dtype(np.uint64): "unsigned long long",
    np.dtype(ml_dtypes.float8_e4m3fn): "tilekern::float8_e4m3fn",
    np.dtype(ml_dtypes.float8_e5m2): "tilekern::float8_e5m2",
    np.dtype(np.float16): "tilekern::float16",
    np.dtype(ml_dtypes.bfloat16): "tilekern::bfloat16",
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.complex64): "float2",
    np.dtype(np.complex128): "double2",
}


def cxx_config(name: str, **fields: int) -> str:
    """Return a struct of compile-time choices as a template argument."""
    # int() turns flags into 0 and 1, which C++ takes for bool.
    values = ", ".join(f".{field} = {int(value)}" for field, value in fields.items())
    return f"tilekern::{name}{{{values}}}"

// Elements of every type, written from numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

struct Type {
  const char* name;
  XLA_FFI_DataType ffi;
  size_t bytes;
};

inline constexpr Type kF32 = {"f32", XLA_FFI_DataType_F32, 4},
                      kF64 = {"f64", XLA_FFI_DataType_F64, 8},
                      kBF16 = {"bf16", XLA_FFI_DataType_BF16, 2},
                      kF16 = {"f16", XLA_FFI_DataType_F16, 2},
                      kE4M3 = {"f8e4m3fn", XLA_FFI_DataType_F8E4M3FN, 1},
                      kE5M2 = {"f8e5m2", XLA_FFI_DataType_F8E5M2, 1},
                      kS8 = {"s8", XLA_FFI_DataType_S8, 1}, kS32 = {"s32", XLA_FFI_DataType_S32, 4},
                      kU8 = {"u8", XLA_FFI_DataType_U8, 1}, kS16 = {"s16", XLA_FFI_DataType_S16, 2},
                      kU64 = {"u64", XLA_FFI_DataType_U64, 8};

// Writes a number as an element; it is in the type's range, or wraps if the type is an integer's.
// Floats are rounded to nearest even, and are normal numbers or zero.
void Write(const Type& type, double value, char* to);

// Conversions of single elements to float and back, rounding to nearest even.
#pragma once

#include "types.cuh"

namespace tilekern {

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) { return __uint_as_float(uint32(value.bits) << 16); }
inline float to_float(float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline bfloat16 from_float<bfloat16>(float value) {
  bfloat16 result;
  // sm_80 converts pairs only; the low half is the second operand.
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(value));
  result.bits = static_cast<uint16>(pair);
  return result;
}
template <>
inline float16 from_float<float16>(float value) {
  float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

}  // namespace tilekern

// What convert.cuh has, on a CPU.
#pragma once

#include "cuda.h"

namespace tilekern {

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) {
  return std::bit_cast<float>(static_cast<uint32>(value.bits) << 16);
}
inline float to_float(float16 value) {
  return static_cast<float>(std::bit_cast<_Float16>(value.bits));
}

template <typename T>
T from_float(float value) {
  if constexpr (kSame<T, float16>) return {std::bit_cast<uint16>(static_cast<_Float16>(value))};
  if constexpr (kSame<T, bfloat16>) {
    // Rounds finite values to nearest even.
    const uint32 bits = std::bit_cast<uint32>(value);
    return {static_cast<uint16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
  if constexpr (kSame<T, float>) return value;
}

}  // namespace tilekern

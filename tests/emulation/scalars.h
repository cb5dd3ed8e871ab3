// What scalar_functions.cuh has that reductions of integers and float32 call, on a CPU.
#pragma once

#include <type_traits>

#include "cuda.h"

namespace tilekern::lax {

template <typename T>
inline constexpr bool kIsFloat = std::is_floating_point_v<T>;
template <typename T>
inline constexpr bool kIsSigned = std::is_signed_v<T> || !std::is_arithmetic_v<T>;
template <typename T>
using Unsigned = std::make_unsigned_t<T>;

template <typename T>
T add(T x, T y) {
  if constexpr (kIsFloat<T>) return x + y;
  return static_cast<T>(static_cast<uint64>(x) + static_cast<uint64>(y));
}
template <typename T>
T mul(T x, T y) {
  if constexpr (kIsFloat<T>) return x * y;
  return static_cast<T>(static_cast<uint64>(x) * static_cast<uint64>(y));
}
template <typename T>
T max(T x, T y) {
  return x > y ? x : y;
}
template <typename T>
T min(T x, T y) {
  return x < y ? x : y;
}

}  // namespace tilekern::lax

// Elements as unsigned numbers in the order of lax.sort: -0 equals 0, and NaN comes last.
#pragma once

#include "selection/ordered_bits.cuh"

namespace tilekern {

// Bits of floats below those of -inf in the order of ordered_bits(): NaN with a sign bit.
template <typename T>
inline constexpr OrderedBits<T> kBelowInfinity = 0;
template <>
inline constexpr uint64 kBelowInfinity<double> = (uint64{1} << 52) - 1;
template <>
inline constexpr uint32 kBelowInfinity<float> = (1u << 23) - 1;
template <>
inline constexpr uint32 kBelowInfinity<bfloat16> = (1u << 7) - 1;
template <>
inline constexpr uint32 kBelowInfinity<float16> = (1u << 10) - 1;

// The bits of an element in an order in which every NaN comes last.
template <typename T>
inline constexpr OrderedBits<T> kAllBits = kSignBit<T> | (kSignBit<T> - 1);
template <typename T>
inline OrderedBits<T> sortable_bits(T element) {
  return (ordered_bits(element) - kBelowInfinity<T>)&kAllBits<T>;
}
template <typename T>
inline T element_of_sortable(OrderedBits<T> bits) {
  return element_of<T>((bits + kBelowInfinity<T>)&kAllBits<T>);
}

// What is compared: -0 is 0, and all NaN are one.
template <typename T>
inline constexpr OrderedBits<T> kZeroKey = kSignBit<T> - kBelowInfinity<T>;
template <typename T>
inline constexpr OrderedBits<T> kNanKey = kAllBits<T> - 2 * kBelowInfinity<T> + 1;
template <typename T>
inline OrderedBits<T> sort_key(OrderedBits<T> bits) {
  if constexpr (kIsFloat<T>) {
    return min_of(bits + (bits == kZeroKey<T> - 1), kNanKey<T>);
  } else {
    return bits;
  }
}

}  // namespace tilekern

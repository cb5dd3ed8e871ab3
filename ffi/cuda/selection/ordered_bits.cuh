// Bits of elements as unsigned numbers that have the order of the elements.
#pragma once

#include "types.cuh"

namespace tilekern {

template <int kBytes>
using UnsignedOf =
    Select<kBytes == 1, uint8, Select<kBytes == 2, uint16, Select<kBytes == 4, uint32, uint64>>>;

template <typename T>
inline constexpr bool kIsFloat =
    kSame<T, float> || kSame<T, double> || kSame<T, bfloat16> || kSame<T, float16>;

// Registers of 32 bits hold shorter elements.
template <typename T>
using OrderedBits = Select<sizeof(T) == 8, uint64, uint32>;

template <typename T>
inline constexpr OrderedBits<T> kSignBit = OrderedBits<T>{1} << (8 * sizeof(T) - 1);

// The order of integers, and the total order of floats, in which -0 is less than +0, and NaN is
// the least or the largest by its sign.
template <typename T>
inline OrderedBits<T> ordered_bits(T element) {
  using Bits = OrderedBits<T>;
  constexpr Bits kSign = kSignBit<T>;
  const Bits bits = reinterpret_cast<const UnsignedOf<sizeof(T)>&>(element);
  if constexpr (kIsFloat<T>) {
    return bits & kSign ? ~bits & (kSign | (kSign - 1)) : bits | kSign;
  } else {
    return static_cast<T>(-1) < static_cast<T>(0) ? bits ^ kSign : bits;
  }
}

// The element whose ordered_bits() these are.
template <typename T>
inline T element_of(OrderedBits<T> ordered) {
  constexpr OrderedBits<T> kSign = kSignBit<T>;
  OrderedBits<T> bits = ordered;
  if constexpr (kIsFloat<T>) {
    bits = ordered & kSign ? ordered ^ kSign : ~ordered;
  } else if constexpr (static_cast<T>(-1) < static_cast<T>(0)) {
    bits = ordered ^ kSign;
  }
  const auto word = static_cast<UnsignedOf<sizeof(T)>>(bits);
  return reinterpret_cast<const T&>(word);
}

}  // namespace tilekern

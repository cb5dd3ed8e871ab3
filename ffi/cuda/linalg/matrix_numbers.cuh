// Bits, roots and powers of two of the elements of matrices.
#pragma once

#include "types.cuh"

namespace tilekern {

inline uint32 magnitude_bits(float value) { return __float_as_uint(value) & 0x7fffffffu; }
inline uint64 magnitude_bits(double value) {
  return static_cast<uint64>(__double_as_longlong(value)) & 0x7fffffffffffffffull;
}

template <typename T>
inline T absolute(T value) {
  return value < T(0) ? -value : value;
}

inline float square_root(float value) { return __fsqrt_rn(value); }
inline double square_root(double value) { return __dsqrt_rn(value); }

template <typename T>
struct FloatFormat {
  using Bits = uint32;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kEpsilon = 0x1p-23f, kSmallestSquare = 0x1p-103f;
  // Brings a number of which the square is too small to be accurate to one of which it is not.
  static constexpr float kRaise = 0x1p100f;
  static float from_bits(uint32 bits) { return __uint_as_float(bits); }
};
template <>
struct FloatFormat<double> {
  using Bits = uint64;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kEpsilon = 0x1p-52, kSmallestSquare = 0x1p-970;
  static constexpr double kRaise = 0x1p900;
  static double from_bits(uint64 bits) {
    return __longlong_as_double(static_cast<long long>(bits));
  }
};

// A power of two that brings a magnitude to about 1, and its reciprocal. Both are normal.
template <typename T>
struct PowerOfTwo {
  using Format = FloatFormat<T>;
  using Bits = typename Format::Bits;

  explicit PowerOfTwo(Bits magnitude) {
    const int exponent = static_cast<int>(magnitude >> Format::kMantissa);
    const int inverse = min_of(max_of(2 * Format::kBias - exponent, 1), 2 * Format::kBias - 1);
    down = Format::from_bits(Bits(inverse) << Format::kMantissa);
    up = Format::from_bits(Bits(2 * Format::kBias - inverse) << Format::kMantissa);
  }

  T down, up;
};

}  // namespace tilekern

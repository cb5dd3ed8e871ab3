// How numbers are quantised: the scale of a block, and the bytes of its elements.
#pragma once

#include "ptx.cuh"
#include "types.cuh"

namespace tilekern {

template <typename Q>
struct Float8Limits;
template <>
struct Float8Limits<float8_e4m3fn> {
  static constexpr float kMax = 448.0f;
};
template <>
struct Float8Limits<float8_e5m2> {
  static constexpr float kMax = 57344.0f;
};
// A byte that is NaN of either type.
inline constexpr uint32 kFloat8Nan = 0x7f;

// Rounds four finite numbers that are in range.
inline uint32 to_float8(float8_e4m3fn*, const float (&x)[4]) {
  uint32 bytes;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "  cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "  mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(bytes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return bytes;
}
inline uint32 to_float8(float8_e5m2*, const float (&x)[4]) {
  uint32 bytes;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
      "  cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      "  mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(bytes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return bytes;
}

inline bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// The scale of a block, and what its elements are multiplied by.
struct BlockScale {
  float scale;
  float factor;
};

// `largest` is the largest finite magnitude of the block. Blocks whose magnitudes are below 2^-90
// count as zeros.
template <typename Q, bool kPowerOfTwo>
inline BlockScale block_scale(float largest) {
  if (!(largest >= 0x1p-90f)) return {1.0f, 1.0f};
  const float scale = largest * (1.0f / Float8Limits<Q>::kMax);
  if constexpr (kPowerOfTwo) {
    // Rounds the exponent up.
    const uint32 exponent = (__float_as_uint(scale) + 0x7fffff) >> 23;
    return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
  } else {
    return {scale, 1.0f / scale};
  }
}

// Four elements that are multiplied by the factor of their block. Only if `special` may some of
// them be infinite or NaN.
template <typename Q>
inline uint32 quantized(const float (&x)[4], bool special) {
  uint32 word = to_float8(static_cast<Q*>(nullptr), x);
  if (special) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!is_finite(x[i])) word = (word & ~(255u << 8 * i)) | kFloat8Nan << 8 * i;
    }
  }
  return word;
}

}  // namespace tilekern

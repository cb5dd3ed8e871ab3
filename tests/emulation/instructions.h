// Instructions of PTX as functions: tests/emulated.py calls them where kernels have assembly.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace ptx {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline float div_full_f32(float x, float y) { return x / y; }
inline float rcp_approx_f32(float x) { return 1 / x; }
inline float rcp_approx_ftz_f32(float x) { return 1 / x; }
inline float ex2_approx_ftz_f32(float x) { return std::exp2(x); }
inline float max_NaN_f32(float x, float y) {
  if (x != x || y != y) return kNan;
  return x > y || (x == y && std::signbit(y)) ? x : y;
}
inline float min_NaN_f32(float x, float y) {
  if (x != x || y != y) return kNan;
  return x < y || (x == y && std::signbit(x)) ? x : y;
}
inline float cvt_f32_f16(std::uint16_t bits) { return std::bit_cast<_Float16>(bits); }
inline std::uint16_t cvt_rn_f16_f32(float x) {
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(x));
}
inline std::uint32_t bfloat16_of(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline std::uint32_t cvt_rn_bf16x2_f32(float high, float low) {
  return bfloat16_of(high) << 16 | bfloat16_of(low);
}

}  // namespace ptx

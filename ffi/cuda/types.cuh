// Element types and constants. NVRTC has no standard headers, so nothing is included.
#pragma once

namespace tilekern {

using int8 = signed char;
using int16 = short;
using int32 = int;
using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

struct bfloat16 {
  uint16 bits;
};
struct float16 {
  uint16 bits;
};
struct float8_e4m3fn {
  unsigned char bits;
};
struct float8_e5m2 {
  unsigned char bits;
};

// The batch dimensions of a product; `MAX_BATCH_DIMS` in `plans/gemm/geometry.py`.
inline constexpr int kMaxBatchDims = 4;

template <typename A, typename B>
inline constexpr bool kSame = false;
template <typename A>
inline constexpr bool kSame<A, A> = true;

template <bool kCondition, typename Then, typename Else>
struct SelectType {
  using Type = Then;
};
template <typename Then, typename Else>
struct SelectType<false, Then, Else> {
  using Type = Else;
};
template <bool kCondition, typename Then, typename Else>
using Select = typename SelectType<kCondition, Then, Else>::Type;

// A word of 1, 2, 4, 8 or 16 bytes, which one instruction reads.
template <int kBytes>
using WordOf = Select<
    kBytes == 1, uint8,
    Select<kBytes == 2, uint16, Select<kBytes == 4, uint32, Select<kBytes == 8, uint2, uint4>>>>;

template <typename T>
constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

constexpr int log2_of(int power_of_two) {
  int exponent = 0;
  while ((1 << exponent) < power_of_two) ++exponent;
  return exponent;
}

}  // namespace tilekern

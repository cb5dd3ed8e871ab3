// What kernels of lanes call besides the elementwise functions: jax_tilekern/ops/kernel/translation
// writes them.
#pragma once

#include "lane_tridiagonal.cuh"
#include "scalar_functions.cuh"

namespace tilekern::lax {

template <typename To, typename From>
inline To bitcast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, x);
}

// A start index within 0 and a limit.
template <typename T>
inline int clamped_index(T start, int limit) {
  if (kIsSigned<T> && start < T(0)) return 0;
  // The minimum of two of the same type is one with an earlier minimum.
  if constexpr (kSame<T, int32>) return min(start, limit);
  return uint64(start) < uint64(limit) ? static_cast<int>(start) : limit;
}
template <typename T>
inline bool is_index(T start, int limit) {
  return !(kIsSigned<T> && start < T(0)) && limit >= 0 && uint64(start) <= uint64(limit);
}

// The order of JAX's sorts: NaNs are equal and the last.
template <typename T>
inline bool sorts_before(T x, T y) {
  if constexpr (kIsFloat<T>) return x < y || (x == x && y != y);
  return x < y;
}

struct Pair {
  uint32 x, y;
};

inline uint32 rotated(uint32 x, int bits) { return (x << bits) | (x >> (32 - bits)); }

// Threefry-2x32 with 20 rounds, as jax.random has it.
inline Pair threefry2x32(uint32 key0, uint32 key1, uint32 x, uint32 y) {
  const uint32 keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAu};
  const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x += keys[0];
  y += keys[1];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x += y;
      y = rotated(y, rotations[i % 2][j]) ^ x;
    }
    x += keys[(i + 1) % 3];
    y += keys[(i + 2) % 3] + static_cast<uint32>(i + 1);
  }
  return {x, y};
}

}  // namespace tilekern::lax

// Long functions that are called where a kernel has many of them: NVRTC takes seconds to compile
// copies of each.
namespace tilekern::called {

#define TILEKERN_CALLED(name)      \
  template <typename... T>         \
  __noinline__ auto name(T... x) { \
    return lax::name(x...);        \
  }

TILEKERN_CALLED(acos)
TILEKERN_CALLED(acosh)
TILEKERN_CALLED(asin)
TILEKERN_CALLED(asinh)
TILEKERN_CALLED(atan)
TILEKERN_CALLED(atan2)
TILEKERN_CALLED(atanh)
TILEKERN_CALLED(cos)
TILEKERN_CALLED(cosh)
TILEKERN_CALLED(digamma)
TILEKERN_CALLED(erf)
TILEKERN_CALLED(erf_inv)
TILEKERN_CALLED(erfc)
TILEKERN_CALLED(expm1)
TILEKERN_CALLED(lgamma)
TILEKERN_CALLED(log)
TILEKERN_CALLED(log1p)
TILEKERN_CALLED(log2)
TILEKERN_CALLED(pow)
TILEKERN_CALLED(rem)
TILEKERN_CALLED(sin)
TILEKERN_CALLED(sinh)
TILEKERN_CALLED(tan)
TILEKERN_CALLED(tanh)
TILEKERN_CALLED(threefry2x32)
#undef TILEKERN_CALLED

}  // namespace tilekern::called

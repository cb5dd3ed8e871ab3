// What kernels of lanes use of CUDA, which have neither barriers nor shared memory, on a CPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "instructions.h"

#define __global__
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))

struct {
  unsigned x = 0;
} threadIdx, blockIdx;

inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __popcll(unsigned long long bits) { return std::popcount(bits); }
inline int __clzll(long long bits) {
  return std::countl_zero(static_cast<unsigned long long>(bits));
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }

// Giles, "Approximating the erfinv function".
inline float erfinvf(float x) {
  if (std::fabs(x) == 1) return x * std::numeric_limits<float>::infinity();
  float w = -std::log1p(-x * x);
  const bool is_small = w < 5;
  const float small[] = {2.81022636e-08f,  3.43273939e-07f, -3.5233877e-06f,
                         -4.39150654e-06f, 0.00021858087f,  -0.00125372503f,
                         -0.00417768164f,  0.246640727f,    1.50140941f};
  const float large[] = {-0.000200214257f, 0.000100950558f, 0.00134934322f,
                         -0.00367342844f,  0.00573950773f,  -0.0076224613f,
                         0.00943887047f,   1.00167406f,     2.83297682f};
  w = is_small ? w - 2.5f : std::sqrt(w) - 3;
  float p = 0;
  for (int i = 0; i < 9; ++i) p = p * w + (is_small ? small[i] : large[i]);
  return p * x;
}
inline double erfinv(double x) {
  double y = erfinvf(static_cast<float>(x));
  for (int i = 0; i < 3; ++i) y -= (std::erf(y) - x) * std::exp(y * y) * 0.886226925452758;
  return y;
}

struct Kernel {
  void (*run)(void**);
  long long lanes;
};

template <typename... Arguments>
void call(void (*kernel)(Arguments...), void** buffers) {
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    kernel(static_cast<Arguments>(buffers[i])...);
  }(std::index_sequence_for<Arguments...>());
}

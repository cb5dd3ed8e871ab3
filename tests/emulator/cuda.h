// What CUDA C++ has beyond C++, for kernels that run on a CPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "threads.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __builtin_assume(condition)
#define __CUDA_ARCH__ EMULATED_ARCH

struct alignas(16) float4 {
  float x = 0, y = 0, z = 0, w = 0;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) double2 {
  double x, y;
};

namespace emulation {

inline Dim3 thread_index() {
  const unsigned index = running->index;
  return {index % block.x, index / block.x % block.y, index / block.x / block.y};
}
// Like CUDA's, the built-in variables convert to int without a warning of narrowing.
struct Index {
  unsigned x, y, z;
};
inline Index as_index(Dim3 dim) { return {dim.x, dim.y, dim.z}; }

template <typename T>
T atomic(T* address, T value, T (*combine)(T, T)) {
  progress = true;
  const T old = *address;
  *address = combine(old, value);
  return old;
}

}  // namespace emulation

#define threadIdx (emulation::as_index(emulation::thread_index()))
#define blockIdx (emulation::as_index(emulation::cta().index))
#define blockDim (emulation::as_index(emulation::block))
#define gridDim (emulation::as_index(emulation::grid))

inline void __syncthreads() { emulation::wait(emulation::cta().all); }
inline int __syncthreads_or(int vote) {
  int& votes = emulation::cta().votes;
  __syncthreads();
  votes = 0;
  __syncthreads();
  votes |= vote;
  __syncthreads();
  return votes;
}
inline int __syncthreads_count(int vote) {
  int& votes = emulation::cta().votes;
  __syncthreads();
  votes = 0;
  __syncthreads();
  votes += vote != 0;
  __syncthreads();
  return votes;
}
inline void __syncwarp(unsigned = 0) { emulation::wait(emulation::cta().warps[emulation::warp()]); }
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned, T value, int source, int width = 32) {
  const int from = emulation::lane() / width * width + source % width;
  return emulation::with_values_of_warp(value, [&](auto of) { return of(from); });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned other, int = 32) {
  const int from = emulation::lane() ^ static_cast<int>(other);
  return emulation::with_values_of_warp(value, [&](auto of) { return of(from); });
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned step, int width = 32) {
  const int lane = emulation::lane(), from = lane - static_cast<int>(step);
  const int first = lane / width * width;
  return emulation::with_values_of_warp(value,
                                        [&](auto of) { return of(from < first ? lane : from); });
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned step, int width = 32) {
  const int lane = emulation::lane(), from = lane + static_cast<int>(step);
  const int end = lane / width * width + width;
  return emulation::with_values_of_warp(value,
                                        [&](auto of) { return of(from < end ? from : lane); });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulation::with_values_of_warp(value, [](auto of) {
    unsigned largest = 0;
    for (int lane = 0; lane < 32; ++lane) largest = std::max(largest, of(lane));
    return largest;
  });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return emulation::with_values_of_warp(value, [](auto of) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= of(lane);
    return bits;
  });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulation::with_values_of_warp(vote, [](auto of) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(of(lane)) << lane;
    return votes;
  });
}
inline int __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, !vote) == 0; }

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return emulation::atomic<T>(address, value, [](T old, T value) { return old + value; });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return emulation::atomic<T>(address, value, [](T old, T value) { return std::max(old, value); });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return emulation::atomic<T>(address, value, [](T old, T value) { return std::min(old, value); });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return emulation::atomic<T>(address, value, [](T old, T value) { return old | value; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return emulation::atomic<unsigned>(
      address, last, [](unsigned old, unsigned last) { return old >= last ? 0 : old + 1; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return emulation::atomic<T>(address, value, [](T, T value) { return value; });
}
// A thread that reads what others write may wait for it.
template <typename T>
T __ldcg(const T* address) {
  emulation::yield();
  return *address;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __popcll(unsigned long long bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
inline int __clzll(long long bits) {
  return std::countl_zero(static_cast<unsigned long long>(bits));
}
inline int __ffs(unsigned bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
inline int __ffsll(unsigned long long bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline int __double2hiint(double value) {
  return static_cast<int>(std::bit_cast<std::uint64_t>(value) >> 32);
}
inline int __double2loint(double value) {
  return static_cast<int>(std::bit_cast<std::uint64_t>(value));
}
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
// The sum of the products of four signed bytes, and a third number.
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) {
    sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  }
  return sum;
}
inline double __drcp_rn(double value) { return 1 / value; }
inline double __dsqrt_rn(double value) { return std::sqrt(value); }
inline float __fsqrt_rn(float value) { return std::sqrt(value); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline double rsqrt(double value) { return 1 / std::sqrt(value); }
// By Newton's method on erf, from an approximation (Winitzki 2008).
inline double erfinv(double y) {
  if (!(std::abs(y) < 1)) return std::abs(y) == 1 ? y * HUGE_VAL : NAN;
  const double log = std::log1p(-y * y), half = 2 / (M_PI * 0.147) + log / 2;
  double x = std::copysign(std::sqrt(std::sqrt(half * half - log / 0.147) - half), y);
  for (int i = 0; i < 4; ++i) x -= (std::erf(x) - y) / (M_2_SQRTPI * std::exp(-x * x));
  return x;
}
inline float erfinvf(float y) { return static_cast<float>(erfinv(y)); }
using std::isfinite, std::isinf, std::isnan, std::signbit;
inline std::uint64_t __cvta_generic_to_shared(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address >> 32 != 0) emulation::fail("address of no shared memory");
  return address;
}

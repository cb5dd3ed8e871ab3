// Where elements lie between the least and the largest of a row, as numbers of 16 bits.
#pragma once

#include "convert.cuh"
#include "selection/sort_key.cuh"

namespace tilekern {

inline constexpr uint32 kRangeParts = 1u << 16;

// How far an element is from a lower one, rounded. It does not decrease with the element.
template <typename T>
inline float distance(OrderedBits<T> low, OrderedBits<T> high) {
  if constexpr (kSame<T, float> || kSame<T, double>) {
    return static_cast<float>(element_of_sortable<T>(high) - element_of_sortable<T>(low));
  } else if constexpr (kIsFloat<T>) {
    return to_float(element_of_sortable<T>(high)) - to_float(element_of_sortable<T>(low));
  } else {
    return static_cast<float>(high - low);
  }
}

// The part of a range in which an element is. Parts do not decrease with the element.
template <typename T>
struct RangeParts {
  OrderedBits<T> least;
  float scale;

  uint32 of(OrderedBits<T> bits) const {
    // The product of infinity and 0 is NaN, and fminf() returns the other number.
    const float part = distance<T>(least, bits) * scale;
    return static_cast<uint32>(fminf(part, static_cast<float>(kRangeParts - 1)));
  }
};

// The parts of the range of a row, of which a thread has elements at own_first + 32 * i. All
// threads of the CTA call it.
template <typename T, int kThreads, int kItems>
inline RangeParts<T> range_parts(const OrderedBits<T> (&own)[kItems], uint32 own_first,
                                 uint32 count) {
  using Bits = OrderedBits<T>;
  constexpr int kWarps = kThreads / 32;
  __shared__ Bits leasts[kWarps], mosts[kWarps];
  Bits least = kAllBits<T>, most = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (own_first + 32 * i >= count) continue;
    least = min_of(least, own[i]);
    most = max_of(most, own[i]);
  }
#pragma unroll
  for (uint32 step = 16; step >= 1; step /= 2) {
    least = min_of(least, __shfl_xor_sync(~0u, least, step));
    most = max_of(most, __shfl_xor_sync(~0u, most, step));
  }
  if (threadIdx.x % 32 == 0) {
    leasts[threadIdx.x / 32] = least;
    mosts[threadIdx.x / 32] = most;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    least = min_of(least, leasts[warp]);
    most = max_of(most, mosts[warp]);
  }
  return {least, static_cast<float>(kRangeParts) / distance<T>(least, most)};
}

}  // namespace tilekern

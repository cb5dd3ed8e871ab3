// Binary searches of a sorted array, in the order of lax.sort.
#pragma once

#include "selection/sort_key.cuh"

namespace tilekern {

inline constexpr int kSearchThreads = 256;
// Searches of a thread, whose loads are in flight together.
inline constexpr int kSearches = 4;

// Where each query belongs: before the elements that equal it, or with kRight after them. The steps
// are those of jnp.searchsorted: `steps` are ceil(log2(count + 1)), and no step depends on whether
// the search has ended, so arrays that are not sorted have the same results.
template <typename T, bool kRight>
__global__ void __launch_bounds__(kSearchThreads)
    searchsorted(const T* sorted, const T* queries, int32* found, uint32 count, uint32 steps,
                 int64 searches) {
  using Bits = OrderedBits<T>;
  const int64 first = static_cast<int64>(blockIdx.x) * (kSearchThreads * kSearches) + threadIdx.x;
  Bits wanted[kSearches];
  uint32 low[kSearches], high[kSearches];
#pragma unroll
  for (int i = 0; i < kSearches; ++i) {
    const int64 at = first + i * kSearchThreads;
    wanted[i] = at < searches ? sort_key<T>(sortable_bits(queries[at])) : 0;
    low[i] = 0;
    high[i] = count;
  }
  for (uint32 step = 0; step < steps; ++step) {
    uint32 middle[kSearches];
    T element[kSearches];
#pragma unroll
    for (int i = 0; i < kSearches; ++i) {
      middle[i] = low[i] + (high[i] - low[i]) / 2;
      // Both ends meet at the end of the array, and a step after that changes neither.
      element[i] = sorted[min_of(middle[i], count - 1)];
    }
#pragma unroll
    for (int i = 0; i < kSearches; ++i) {
      const Bits key = sort_key<T>(sortable_bits(element[i]));
      const bool is_before = kRight ? wanted[i] < key : wanted[i] <= key;
      high[i] = is_before ? middle[i] : high[i];
      low[i] = is_before ? low[i] : middle[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kSearches; ++i) {
    const int64 at = first + i * kSearchThreads;
    if (at < searches) found[at] = static_cast<int32>(high[i]);
  }
}

}  // namespace tilekern

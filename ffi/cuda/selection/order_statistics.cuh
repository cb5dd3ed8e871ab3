// Elements of rows by their ranks in the order of lax.sort, or NaN where a row has one. A CTA holds
// a row in registers and finds an element by its digits.
#pragma once

#include "selection/sort_key.cuh"
#include "selection/threshold.cuh"

namespace tilekern {

// A NaN whose only bit of the mantissa is the highest, and whose sign is positive.
template <typename T>
inline T quiet_nan() {
  constexpr OrderedBits<T> kBits = (kAllBits<T> >> 1) - (kBelowInfinity<T> >> 1);
  const auto word = static_cast<UnsignedOf<sizeof(T)>>(kBits);
  return reinterpret_cast<const T&>(word);
}

// `ranks` of all rows; those beyond a row count as its first or last. With kIndices, the columns of
// the elements, too: of equal elements the first has the lowest rank.
template <typename T, int kThreads, int kItems, bool kIndices>
__global__ void __launch_bounds__(kThreads, (sizeof(T) == 8 ? 512 : 1024) / kThreads)
    order_statistics(const T* x, const int32* ranks, T* values, int32* indices, uint32 columns,
                     uint32 count) {
  using Bits = OrderedBits<T>;
  constexpr uint32 kTile = kThreads * kItems;
  const T* const row = x + static_cast<int64>(blockIdx.x) * columns;
  const int64 to = static_cast<int64>(blockIdx.x) * count;
  const uint32 lower = (1u << threadIdx.x % 32) - 1;
  // A warp's elements are adjacent.
  const uint32 own_first = threadIdx.x / 32 * (32 * kItems) + threadIdx.x % 32;
  Bits own[kItems];
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 column = own_first + 32 * i;
    own[i] = column < columns ? sort_key<T>(sortable_bits(row[column])) : 0;
    has_nan = has_nan || own[i] == kNanKey<T>;
  }
  if (kIsFloat<T> && __syncthreads_or(has_nan)) {
    for (uint32 i = threadIdx.x; i < count; i += kThreads) {
      values[to + i] = quiet_nan<T>();
      if constexpr (kIndices) indices[to + i] = 0;
    }
    return;
  }
  Threshold<Bits> at;
  uint32 before_it = 0;
  for (uint32 i = 0, last = columns; i < count; ++i) {
    const auto rank =
        static_cast<uint32>(min_of(max_of(ranks[i], 0), static_cast<int32>(columns) - 1));
    if (rank != last) {
      at = find_threshold<8 * sizeof(T), kThreads, true>(own, columns - rank);
      // This many equal elements are before it. Zeros beyond the row equal the least element.
      before_it = at.count - at.wanted - (at.prefix == 0 ? kTile - columns : 0);
      last = rank;
    }
    // The signs of zeros differ.
    if (!kIndices && !(kIsFloat<T> && at.prefix == kZeroKey<T>)) {
      if (threadIdx.x == 0) values[to + i] = element_of_sortable<T>(at.prefix);
      continue;
    }
    uint32 equal = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) equal += own[j] == at.prefix;
    uint32 before = __shfl_sync(~0u, sum_before<kThreads>(equal), 0);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const uint32 alike = __ballot_sync(~0u, own[j] == at.prefix);
      if (own[j] == at.prefix && before + __popc(alike & lower) == before_it) {
        const uint32 column = own_first + 32 * j;
        values[to + i] = row[column];
        if constexpr (kIndices) indices[to + i] = static_cast<int32>(column);
      }
      before += __popc(alike);
    }
  }
}

}  // namespace tilekern

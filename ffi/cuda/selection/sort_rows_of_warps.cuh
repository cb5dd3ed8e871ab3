// Sorts short rows, stably and in the order of lax.sort. A warp holds a row in registers, as
// numbers of an element's key and its position, which differ; so any sort of them is stable.
#pragma once

#include "selection/sort_key.cuh"

namespace tilekern {

inline constexpr int kRowSortThreads = 128;

// Sorts the numbers of a warp in ascending order, by Batcher's bitonic sort. Afterwards a lane has
// the kItems ones that begin at the place kItems * lane.
template <typename Key, int kItems>
inline void sort_warp(Key (&own)[kItems]) {
  const uint32 lane = threadIdx.x % 32;
#pragma unroll
  for (int width = 2; width <= 32 * kItems; width *= 2) {
#pragma unroll
    for (int step = width / 2; step >= 1; step /= 2) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const bool ascends = ((lane * kItems + i) & width) == 0;
        if (step >= kItems) {
          const Key other = __shfl_xor_sync(~0u, own[i], step / kItems);
          const bool is_first = (lane & (step / kItems)) == 0;
          own[i] = (own[i] < other) == (is_first == ascends) ? own[i] : other;
        } else if ((i & step) == 0) {
          const Key a = own[i], b = own[i + step];
          const bool in_order = (a < b) == ascends;
          own[i] = in_order ? a : b;
          own[i + step] = in_order ? b : a;
        }
      }
    }
  }
}

// Rows of at most 32 * kItems columns. `backwards` has 1 where rows are read, and 2 where they are
// written, from their last element on.
template <typename T, int kItems, bool kValues, bool kIndices>
__global__ void __launch_bounds__(kRowSortThreads)
    sort_rows_of_warps(const T* x, T* values, int32* indices, uint32 rows, uint32 columns,
                       uint32 backwards) {
  // Positions are less than 2^16.
  using Key = Select<sizeof(T) == 4, uint64, uint32>;
  constexpr int kPositionBits = 16;
  const uint32 lane = threadIdx.x % 32, last = columns - 1;
  const uint32 row = blockIdx.x * (kRowSortThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const int64 start = static_cast<int64>(row) * columns;
  const auto column_of = [&](uint32 position) {
    return backwards & 1 ? last - position : position;
  };
  Key own[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 position = i * 32 + lane;
    const OrderedBits<T> key =
        position <= last ? sort_key<T>(sortable_bits(x[start + column_of(position)])) : kAllBits<T>;
    own[i] = static_cast<Key>(key) << kPositionBits | position;
  }
  sort_warp(own);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 place = lane * kItems + i;
    if (place > last) continue;
    const uint32 column = column_of(static_cast<uint32>(own[i]) % (1u << kPositionBits));
    const int64 to = start + (backwards & 2 ? last - place : place);
    if constexpr (kValues) values[to] = x[start + column];
    if constexpr (kIndices) indices[to] = static_cast<int32>(column);
  }
}

}  // namespace tilekern

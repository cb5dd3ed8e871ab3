// Sorts short rows, stably and in the order of lax.sort or of lax.top_k. A warp holds one or
// several rows in registers, as numbers of an element's key and its position, which differ; so any
// sort of them is stable.
#pragma once

#include "selection/sort_key.cuh"

namespace tilekern {

inline constexpr int kRowSortThreads = 128;
// Positions are less than 2^16.
inline constexpr int kPositionBits = 16;

// A key of 64 bits and a position.
struct LongKey {
  uint64 key;
  uint32 position;
};
inline bool operator<(const LongKey& a, const LongKey& b) {
  return a.key < b.key || (a.key == b.key && a.position < b.position);
}

template <typename T>
using PlacedKey = Select<sizeof(T) == 8, LongKey, Select<sizeof(T) == 4, uint64, uint32>>;
template <typename T>
inline PlacedKey<T> placed_key(OrderedBits<T> key, uint32 position) {
  if constexpr (sizeof(T) == 8) {
    return {key, position};
  } else {
    return static_cast<PlacedKey<T>>(key) << kPositionBits | position;
  }
}
inline uint32 position_of(const LongKey& key) { return key.position; }
inline uint32 position_of(uint64 key) { return static_cast<uint32>(key) % (1u << kPositionBits); }
inline uint32 position_of(uint32 key) { return key % (1u << kPositionBits); }

template <typename Key>
inline Key of_lane_xor(const Key& key, uint32 lanes) {
  if constexpr (kSame<Key, LongKey>) {
    return {__shfl_xor_sync(~0u, key.key, lanes), __shfl_xor_sync(~0u, key.position, lanes)};
  } else {
    return __shfl_xor_sync(~0u, key, lanes);
  }
}

// Sorts the keys of each kLanes lanes in ascending order, by Batcher's bitonic sort. Afterwards a
// lane has the kItems ones that begin at the place kItems * lane.
template <int kLanes, typename Key, int kItems>
inline void sort_lanes(Key (&own)[kItems]) {
  const uint32 lane = threadIdx.x % kLanes;
#pragma unroll
  for (int width = 2; width <= kLanes * kItems; width *= 2) {
#pragma unroll
    for (int step = width / 2; step >= 1; step /= 2) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const bool ascends = ((lane * kItems + i) & width) == 0;
        if (step >= kItems) {
          const Key other = of_lane_xor(own[i], step / kItems);
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

// Rows of at most kLanes * kItems columns, of which the first `kept` in the order are results. With
// kLargest the order is that of lax.top_k. `backwards` has 1 where rows are read, and 2 where they
// are written, from their last element on.
template <typename T, int kLanes, int kItems, bool kLargest, bool kValues, bool kIndices>
__global__ void __launch_bounds__(kRowSortThreads)
    sort_rows_of_warps(const T* x, T* values, int32* indices, uint32 rows, uint32 columns,
                       uint32 kept, uint32 backwards) {
  const uint32 lane = threadIdx.x % kLanes, last = columns - 1;
  const uint32 row = blockIdx.x * (kRowSortThreads / kLanes) + threadIdx.x / kLanes;
  const bool is_row = row < rows;
  const T* const from = x + static_cast<int64>(row) * columns;
  const auto column_of = [&](uint32 position) {
    return backwards & 1 ? last - position : position;
  };
  PlacedKey<T> own[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 position = i * kLanes + lane;
    OrderedBits<T> key = kAllBits<T>;
    if (is_row && position <= last) {
      const T element = from[column_of(position)];
      key = kLargest ? ordered_bits(element) ^ kAllBits<T> : sort_key<T>(sortable_bits(element));
    }
    own[i] = placed_key<T>(key, position);
  }
  sort_lanes<kLanes>(own);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 place = lane * kItems + i;
    if (!is_row || place >= kept) continue;
    const uint32 column = column_of(position_of(own[i]));
    const int64 to = static_cast<int64>(row) * kept + (backwards & 2 ? last - place : place);
    if constexpr (kValues) values[to] = from[column];
    if constexpr (kIndices) indices[to] = static_cast<int32>(column);
  }
}

}  // namespace tilekern

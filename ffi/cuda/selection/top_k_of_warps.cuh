// The k largest elements of short rows, in the order of lax.top_k: the total order of floats, and
// the lower column first where elements are equal. A warp holds a row in registers and finds one
// element after the other.
#pragma once

#include "selection/ordered_bits.cuh"

namespace tilekern {

inline constexpr int kTopKThreads = 128;

// An element and its column as one number, which is larger the earlier the element is found. 0 is
// none. Columns are less than 2^16, and those of elements of 32 bits less than 2^32.
template <typename T>
using Ranked = Select<sizeof(T) == 4, uint64, uint32>;
template <typename T>
inline constexpr int kColumnBits = sizeof(T) == 4 ? 32 : 16;
template <typename T>
inline constexpr Ranked<T> kColumnMask = (Ranked<T>{1} << kColumnBits<T>)-1;

template <typename T>
inline Ranked<T> ranked(T element, uint32 column) {
  return static_cast<Ranked<T>>(ordered_bits(element)) << kColumnBits<T> |
         (~column & kColumnMask<T>);
}

// The largest number of a warp's lanes.
inline uint32 warp_max(uint32 value) { return __reduce_max_sync(~0u, value); }
inline uint64 warp_max(uint64 value) {
  const uint32 high = static_cast<uint32>(value >> 32), most = warp_max(high);
  const uint32 low = warp_max(high == most ? static_cast<uint32>(value) : 0u);
  return static_cast<uint64>(most) << 32 | low;
}

// A step of Batcher's odd-even mergesort and those after it, which merge sorted parts of kWidth.
// The numbers are constants of a template, since unrolled loops keep comparisons of them.
template <int kWidth, int kStep, typename Key, int kCount>
inline void merge_descending(Key (&values)[kCount]) {
#pragma unroll
  for (int i = kStep % kWidth; i < kCount - kStep; ++i) {
    const bool is_compared = (i - kStep % kWidth) % (2 * kStep) < kStep;
    if (is_compared && i / (2 * kWidth) == (i + kStep) / (2 * kWidth)) {
      const Key a = values[i], b = values[i + kStep];
      values[i] = max_of(a, b);
      values[i + kStep] = min_of(a, b);
    }
  }
  if constexpr (kStep > 1) merge_descending<kWidth, kStep / 2>(values);
}

// Sorts parts of 2 * kWidth in descending order and merges these, where parts of kWidth are sorted.
template <int kWidth, typename Key, int kCount>
inline void sort_descending(Key (&values)[kCount]) {
  if constexpr (kWidth < kCount) {
    merge_descending<kWidth, kWidth>(values);
    sort_descending<2 * kWidth>(values);
  }
}

// kItems elements of a lane, of which kDepth may be found; `columns` is at most 32 * kItems.
template <typename T, int kItems, int kDepth>
__global__ void __launch_bounds__(kTopKThreads)
    top_k_of_warps(const T* x, T* values, int32* columns_found, uint32 rows, uint32 columns,
                   uint32 k) {
  const uint32 lane = threadIdx.x % 32;
  const uint32 row = blockIdx.x * (kTopKThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const T* const from = x + static_cast<int64>(row) * columns;
  // The lane's elements that are not found yet, first those that are found first.
  Ranked<T> own[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 column = i * 32 + lane;
    own[i] = column < columns ? ranked(from[column], column) : 0;
  }
  sort_descending<1>(own);
  // Each lane keeps one of 32 elements that are found, and all lanes write theirs at once.
  Ranked<T> kept = 0;
  for (uint32 i = 0; i < k; ++i) {
    const Ranked<T> found = warp_max(own[0]);
    if (found == own[0]) {
#pragma unroll
      for (int j = 0; j + 1 < kDepth; ++j) own[j] = own[j + 1];
      own[kDepth - 1] = 0;
    }
    if (i % 32 == lane) kept = found;
    if (i % 32 != 31 && i + 1 < k) continue;
    const uint32 to = i / 32 * 32 + lane;
    if (to > i) continue;
    const int64 place = static_cast<int64>(row) * k + to;
    values[place] = element_of<T>(static_cast<uint32>(kept >> kColumnBits<T>));
    columns_found[place] = static_cast<int32>(~kept & kColumnMask<T>);
  }
}

}  // namespace tilekern

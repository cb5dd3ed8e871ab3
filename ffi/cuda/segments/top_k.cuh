// The k largest elements of rows, in the order of lax.top_k: the total order of floats, and the
// lower column first where elements are equal. A group of warps holds a row in registers and finds
// one element after the other.
#pragma once

#include "scalar_functions.cuh"

namespace tilekern {

inline constexpr int kTopKThreads = 128;

// An element's bits as a number that has the order of the elements.
template <typename T>
inline uint32 ordered_bits(T element) {
  constexpr int kBits = 8 * static_cast<int>(sizeof(T));
  constexpr uint32 kSign = 1u << (kBits - 1);
  uint32 bits;
  if constexpr (sizeof(T) == 4) {
    bits = reinterpret_cast<const uint32&>(element);
  } else if constexpr (sizeof(T) == 2) {
    bits = reinterpret_cast<const uint16&>(element);
  } else {
    bits = reinterpret_cast<const uint8&>(element);
  }
  if constexpr (kSame<T, float> || kSame<T, bfloat16> || kSame<T, float16>) {
    return bits & kSign ? ~bits & (2 * kSign - 1) : bits | kSign;
  } else {
    return lax::kIsSigned<T> ? bits ^ kSign : bits;
  }
}

// An element and its column as one number, which is larger the earlier the element is found.
// Columns are at most 2^16; 0 is none.
inline uint64 ranked(uint32 bits, uint32 column) {
  return static_cast<uint64>(bits) << 32 | static_cast<uint32>(~column);
}

// Sorts in descending order, by Batcher's odd-even mergesort.
template <int kCount>
inline void sort_descending(uint64 (&values)[kCount]) {
#pragma unroll
  for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
    for (int step = width; step >= 1; step /= 2) {
#pragma unroll
      for (int i = 0; i < kCount - step; ++i) {
        const bool is_compared = i >= step % width && (i - step % width) % (2 * step) < step;
        if (is_compared && i / (2 * width) == (i + step) / (2 * width)) {
          const uint64 a = values[i], b = values[i + step];
          values[i] = max_of(a, b);
          values[i + step] = min_of(a, b);
        }
      }
    }
  }
}

// kItems elements of a lane, and kWarps warps to a row. `columns` is at most 32 * kItems * kWarps.
template <typename T, int kItems, int kWarps>
__global__ void __launch_bounds__(kTopKThreads)
    top_k(const T* x, T* values, int32* columns_found, uint32 rows, uint32 columns, uint32 k) {
  constexpr uint32 kLanes = 32 * kWarps, kGroups = kTopKThreads / kLanes;
  __shared__ uint64 of_warps[2][kTopKThreads / 32];
  const uint32 lane = threadIdx.x % kLanes, warp = threadIdx.x / 32;
  const uint32 row = blockIdx.x * kGroups + threadIdx.x / kLanes;
  // With several warps to a row there is one row to a CTA, so all threads leave.
  if (row >= rows) return;
  const T* const from = x + static_cast<int64>(row) * columns;
  // The lane's elements that are not found yet, first those that are found first.
  uint64 own[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 column = i * kLanes + lane;
    own[i] = column < columns ? ranked(ordered_bits(from[column]), column) : 0;
  }
  sort_descending(own);
  for (uint32 i = 0; i < k; ++i) {
    const uint32 bits = static_cast<uint32>(own[0] >> 32);
    const uint32 most = __reduce_max_sync(~0u, bits);
    const uint32 rest = bits == most ? static_cast<uint32>(own[0]) : 0u;
    uint64 found = static_cast<uint64>(most) << 32 | __reduce_max_sync(~0u, rest);
    if constexpr (kWarps > 1) {
      if (threadIdx.x % 32 == 0) of_warps[i % 2][warp] = found;
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kWarps; ++j) found = max_of(found, of_warps[i % 2][j]);
    }
    if (found == own[0]) {
#pragma unroll
      for (int j = 0; j + 1 < kItems; ++j) own[j] = own[j + 1];
      own[kItems - 1] = 0;
      const uint32 column = ~static_cast<uint32>(found);
      const int64 place = static_cast<int64>(row) * k + i;
      values[place] = from[column];
      columns_found[place] = static_cast<int32>(column);
    }
  }
}

}  // namespace tilekern

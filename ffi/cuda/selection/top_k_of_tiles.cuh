// The k largest elements of rows of any length, in the order of lax.top_k. A CTA has a tile of a
// row in registers and finds the k largest of the tile: it sorts the elements above a lower bound
// of the k-th. Launches repeat this for what the tiles before have found, until a tile has all that
// is left of a row.
//
// Tiles write equal elements in the order of their columns. So of equal elements a lower position
// is a lower column in every launch.
#pragma once

#include "ptx.cuh"
#include "selection/ordered_bits.cuh"
#include "selection/threshold.cuh"

namespace tilekern {

// The largest k; `MAX_K` in `plans/selection/top_k.py`.
inline constexpr int kMostFound = 2048;

// One launch; `plan_top_k` packs the same fields in the same order.
struct TopKShape {
  // Elements of a row, and of what is found of it.
  uint32 columns;
  uint32 found;
  uint32 tiles;
  // Columns of a tile; the last one has those that are left.
  uint32 length;
  uint32 k;
};

// A lower bound of the k-th largest element: the k-th largest of the maxima of groups of elements.
// At most (k - 1) * kGroupSize elements are above it, and few more than k of most arrays are.
inline constexpr int kGroupSize = 8;
template <int kBits, int kThreads, typename Bits, int kItems>
inline Bits lower_bound(const Bits (&own)[kItems], uint32 k) {
  Bits maxima[kItems / kGroupSize];
#pragma unroll
  for (int i = 0; i < kItems / kGroupSize; ++i) {
    maxima[i] = own[i * kGroupSize];
#pragma unroll
    for (int j = 1; j < kGroupSize; ++j) maxima[i] = max_of(maxima[i], own[i * kGroupSize + j]);
  }
  return find_threshold<kBits, kThreads, true>(maxima, k).prefix;
}

// How many elements are above a threshold, and 2^16 times how many are at it.
template <int kThreads, typename Bits, int kItems>
inline BlockSum count_found(const Bits (&own)[kItems], Bits prefix, int shift) {
  uint32 counts = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Bits top = own[i] >> shift;
    if (top >= prefix) counts += top == prefix ? 1u << 16 : 1u;
  }
  return block_sum<kThreads>(counts);
}

// Calls write(place, item) for the elements above the threshold, and for the first `wanted` of
// those at it; places are in the order of the columns. A warp's elements are adjacent, and
// `before` is what count_found() says of those of the threads before.
template <typename Bits, int kItems, class Write>
inline void for_each_found(const Bits (&own)[kItems], const Threshold<Bits>& at, uint32 before,
                           const Write& write) {
  const uint32 lower = (1u << threadIdx.x % 32) - 1;
  before = __shfl_sync(~0u, before, 0);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Bits top = own[i] >> at.shift;
    if (!__any_sync(~0u, top >= at.prefix)) continue;
    const uint32 above = __ballot_sync(~0u, top > at.prefix);
    const uint32 equal = __ballot_sync(~0u, top == at.prefix);
    const uint32 equal_before = (before >> 16) + __popc(equal & lower);
    if (top > at.prefix || (top == at.prefix && equal_before < at.wanted)) {
      const uint32 above_before = (before & 0xffff) + __popc(above & lower);
      write(above_before + min_of(equal_before, at.wanted), i);
    }
    before += __popc(above) + (__popc(equal) << 16);
  }
}

// Elements and their columns, in shared memory.
template <typename Bits>
struct FoundElements {
  Bits (&bits)[kMostFound];
  uint32 (&columns)[kMostFound];

  bool comes_before(uint32 i, uint32 j) const {
    return bits[i] > bits[j] || (bits[i] == bits[j] && columns[i] < columns[j]);
  }
  void swap(uint32 i, uint32 j) const {
    const Bits own = bits[i];
    const uint32 column = columns[i];
    bits[i] = bits[j];
    columns[i] = columns[j];
    bits[j] = own;
    columns[j] = column;
  }
};

// Sorts the first `count` elements by Batcher's bitonic sort, the largest first. All threads of the
// CTA call it.
template <int kThreads, typename Bits>
inline void sort_found(const FoundElements<Bits>& found, uint32 count) {
  uint32 size = 1;
  while (size < count) size *= 2;
  for (uint32 i = count + threadIdx.x; i < size; i += kThreads) {
    found.bits[i] = 0;
    found.columns[i] = ~0u;
  }
  for (uint32 width = 2; width <= size; width *= 2) {
    for (uint32 step = width / 2; step >= 1; step /= 2) {
      // Steps up to 32 exchange the 64 elements of a warp's 32 pairs.
      if (step >= 32 || width == 2) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      for (uint32 pair = threadIdx.x; pair < size / 2; pair += kThreads) {
        const uint32 i = 2 * pair - (pair & (step - 1)), j = i + step;
        const bool descends = (i & width) == 0;
        if (found.comes_before(j, i) == descends) found.swap(i, j);
      }
    }
  }
  __syncthreads();
}

// kItems elements of a thread. With kFirst, x is a row, and otherwise what tiles have found of it,
// with its columns. With kLast, a tile is all that is left of a row.
template <typename T, int kThreads, int kItems, bool kFirst, bool kLast>
__global__ void __launch_bounds__(kThreads, (sizeof(T) == 8 ? 512 : 1024) / kThreads)
    top_k_of_tiles(const T* x, const int32* columns, T* values, int32* columns_found,
                   const __grid_constant__ TopKShape shape) {
  using Bits = OrderedBits<T>;
  static_assert(kThreads * kItems < 1 << 16);
  const uint32 row = blockIdx.x / shape.tiles, tile = blockIdx.x % shape.tiles;
  const uint32 first = tile * shape.length;
  const uint32 count = min_of(shape.length, shape.columns - first);
  const int64 start = static_cast<int64>(row) * shape.columns + first;
  // A warp's elements are adjacent.
  const uint32 own_first = threadIdx.x / 32 * (32 * kItems) + threadIdx.x % 32;
  launch_dependents();
  wait_for_prerequisites();
  Bits own[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 position = own_first + 32 * i;
    own[i] = position < count ? ordered_bits(x[start + position]) : 0;
  }
  const uint32 wanted = min_of(shape.k, count);
  constexpr int kBits = 8 * sizeof(T);
  // What is found: at first all elements above a lower bound, if these are not too many. If they
  // are too few, the k-th largest element is the bound.
  Threshold<Bits> at{};
  BlockSum counts{};
  uint32 found_count = kMostFound + 1;
  if (2 * kGroupSize * wanted <= kThreads * kItems) {
    at.prefix = lower_bound<kBits, kThreads>(own, wanted);
    counts = count_found<kThreads>(own, at.prefix, 0);
    found_count = counts.total & 0xffff;
    if (found_count < wanted) {
      at.wanted = wanted - found_count;
      found_count = wanted;
    }
  }
  if (found_count > kMostFound) {
    at = find_threshold<kBits, kThreads, false>(own, wanted);
    counts = count_found<kThreads>(own, at.prefix, at.shift);
    found_count = wanted;
  }
  const auto column_of = [&](int item) {
    const uint32 position = own_first + 32 * item;
    return kFirst ? static_cast<int32>(first + position) : columns[start + position];
  };
  const int64 to = static_cast<int64>(row) * shape.found + tile * shape.k;
  if (!kLast && found_count == wanted) {
    for_each_found(own, at, counts.before, [&](uint32 place, int item) {
      values[to + place] = element_of<T>(own[item]);
      columns_found[to + place] = column_of(item);
    });
    return;
  }
  __shared__ Bits bits[kMostFound];
  __shared__ uint32 columns_of_bits[kMostFound];
  const FoundElements<Bits> found{bits, columns_of_bits};
  for_each_found(own, at, counts.before, [&](uint32 place, int item) {
    bits[place] = own[item];
    columns_of_bits[place] = static_cast<uint32>(column_of(item));
  });
  sort_found<kThreads>(found, found_count);
  for (uint32 i = threadIdx.x; i < wanted; i += kThreads) {
    values[to + i] = element_of<T>(bits[i]);
    columns_found[to + i] = static_cast<int32>(columns_of_bits[i]);
  }
}

}  // namespace tilekern

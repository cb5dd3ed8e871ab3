// The k largest elements of rows of any length, in the order of lax.top_k. A CTA has a tile of a
// row in registers and finds the k largest of the tile. At least k elements reach the k-th of the
// largest elements of its threads, and hardly more where large elements are anywhere in the tile;
// these are sorted. Where they are too many, the CTA counts one digit of the elements after the
// other, most significant first, and keeps those that begin as the k-th does. Launches repeat this
// for what the tiles before have found, until a tile has all that is left of a row; the last launch
// sorts.
//
// Tiles write equal elements in the order of the columns. So a lower position is a lower column in
// every launch, and they need no other order.
#pragma once

#include "ptx.cuh"
#include "selection/ordered_bits.cuh"
#include "selection/threshold.cuh"

namespace tilekern {

// The largest k; `MAX_K` in `plans/selection/top_k_problem.py`.
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

// Calls write(place, item) for the elements above the threshold, and for the first `wanted` of
// those at it; places are in the order of the columns. A warp's elements are adjacent.
template <int kThreads, typename Bits, int kItems, class Write>
inline void for_each_found(const Bits (&own)[kItems], const Threshold<Bits>& at,
                           const Write& write) {
  // Elements above the threshold, and 2^16 times those at it.
  uint32 counts = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Bits top = own[i] >> at.shift;
    if (top >= at.prefix) counts += top == at.prefix ? 1u << 16 : 1u;
  }
  const uint32 lower = (1u << threadIdx.x % 32) - 1;
  uint32 before = __shfl_sync(~0u, sum_before<kThreads>(counts), 0);
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

// Whether an element comes before another one, without a branch.
template <typename Bits>
inline bool comes_first(Bits bits, uint32 column, Bits others, uint32 other_column) {
  const bool is_larger = bits > others, is_equal = bits == others, is_lower = column < other_column;
  return is_larger | (is_equal & is_lower);
}

// Elements and their columns, in shared memory.
template <typename Bits, uint32 kMost>
struct FoundElements {
  Bits (&bits)[kMost];
  uint32 (&columns)[kMost];

  bool comes_before(uint32 i, uint32 j) const {
    return comes_first(bits[i], columns[i], bits[j], columns[j]);
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

// How many of the first `count` elements come before one of them. `lanes` adjacent threads, a power
// of two up to 32, compare it with a part of them each. All threads of a warp call it.
template <typename Bits, uint32 kMost>
inline uint32 rank_found(const FoundElements<Bits, kMost>& found, uint32 count, uint32 number,
                         uint32 part, uint32 lanes) {
  uint32 rank = 0;
  if (number < count) {
    const Bits bits = found.bits[number];
    const uint32 column = found.columns[number];
#pragma unroll 8
    for (uint32 i = part; i < count; i += lanes) {
      rank += comes_first(found.bits[i], found.columns[i], bits, column);
    }
  }
  for (uint32 step = 1; step < lanes; step *= 2) rank += __shfl_xor_sync(~0u, rank, step);
  return rank;
}

// Sorts the first `count` elements by Batcher's bitonic sort, the largest first. All threads of the
// CTA call it.
template <int kThreads, typename Bits, uint32 kMost>
inline void sort_found(const FoundElements<Bits, kMost>& found, uint32 count) {
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

// A number, and how many threads reach it with theirs, which has kBits: at least `wanted`, and few
// others where numbers differ. All threads of the CTA call it.
template <typename Bits>
struct ThreadBound {
  Bits bits;
  uint32 threads;
};
template <int kThreads, int kBits, typename Bits>
inline ThreadBound<Bits> bound_of_threads(Bits most, uint32 wanted) {
  ThreadBound<Bits> bound{0, kThreads};
  for (int bit = kBits - 1; bit >= 0 && bound.threads > wanted + wanted / 4; --bit) {
    const Bits next = bound.bits | Bits{1} << bit;
    const uint32 count = __syncthreads_count(most >= next);
    if (count >= wanted) bound = {next, count};
  }
  return bound;
}

// Where fewer threads would compare each element with the others, a sort is faster.
inline constexpr uint32 kLeastRankLanes = 2;

// kItems elements of a thread. With kFirst, x is a row, and otherwise what tiles have found of it,
// with its columns. With kLast, a tile is all that is left of a row. With kIfMany, only rows are
// read that have more candidates than are sorted.
template <typename T, int kThreads, int kItems, bool kFirst, bool kLast, bool kIfMany>
__global__ void __launch_bounds__(kThreads, (sizeof(T) == 8 ? 512 : 1024) / kThreads)
    top_k_of_tiles(const T* x, const int32* columns, T* values, int32* columns_found,
                   const uint32* candidates, const __grid_constant__ TopKShape shape) {
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
  if (kIfMany && candidates[row] <= kMostFound) return;
  Bits own[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 position = own_first + 32 * i;
    own[i] = position < count ? ordered_bits(x[start + position]) : 0;
  }
  const uint32 wanted = min_of(shape.k, count);
  const auto column_of = [&](int item) {
    const uint32 position = own_first + 32 * item;
    return kFirst ? static_cast<int32>(first + position) : columns[start + position];
  };
  const int64 to = static_cast<int64>(row) * shape.found + tile * shape.k;
  constexpr uint32 kMost = kLast ? kMostFound : 2 * kThreads;
  __shared__ Bits bits[kMost];
  __shared__ uint32 columns_of_bits[kMost];
  const FoundElements<Bits, kMost> found{bits, columns_of_bits};
  const auto write_found = [&](uint32 place, uint32 number) {
    values[to + place] = element_of<T>(bits[number]);
    columns_found[to + place] = static_cast<int32>(columns_of_bits[number]);
  };
  const auto write_sorted = [&](uint32 number) {
    sort_found<kThreads>(found, number);
    for (uint32 i = threadIdx.x; i < wanted; i += kThreads) write_found(i, i);
  };
  // Registers do not hold more elements beside.
  constexpr bool kBounds = sizeof(T) * kItems <= 128;
  if (kBounds && wanted <= kThreads * 3 / 4) {
    __shared__ uint32 reaching;
    if (threadIdx.x == 0) reaching = 0;
    Bits most = own[0];
#pragma unroll
    for (int i = 1; i < kItems; ++i) most = max_of(most, own[i]);
    __syncthreads();
    const auto bound = bound_of_threads<kThreads, 8 * sizeof(T)>(most, wanted);
    // Otherwise many elements are equal.
    const bool are_few = bound.threads <= 2 * wanted + 32;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!are_few || own[i] < bound.bits || own_first + 32 * i >= count) continue;
      const uint32 place = atomicAdd(&reaching, 1u);
      if (place >= kMost) continue;
      bits[place] = own[i];
      columns_of_bits[place] = static_cast<uint32>(column_of(i));
    }
    __syncthreads();
    if (are_few && kLeastRankLanes * reaching <= kThreads) {
      // As many lanes compare each element as there are threads.
      uint32 lanes = 32;
      while (lanes * reaching > kThreads) lanes /= 2;
      const uint32 own_number = threadIdx.x / lanes, part = threadIdx.x % lanes;
      const uint32 rank = rank_found(found, reaching, own_number, part, lanes);
      if (own_number < reaching && part == 0 && rank < wanted) write_found(rank, own_number);
      return;
    }
    if (are_few && reaching <= kMost) {
      write_sorted(reaching);
      return;
    }
    __syncthreads();
  }
  const auto at = find_threshold<8 * sizeof(T), kThreads, false>(own, wanted);
  for_each_found<kThreads>(own, at, [&](uint32 place, int item) {
    if constexpr (kLast) {
      bits[place] = own[item];
      columns_of_bits[place] = static_cast<uint32>(column_of(item));
    } else {
      values[to + place] = element_of<T>(own[item]);
      columns_found[to + place] = column_of(item);
    }
  });
  if constexpr (kLast) write_sorted(wanted);
}

}  // namespace tilekern

// A stable sort of the numbers of rows by small integer keys: least significant digit first, with
// counts instead of atomic operations on memory, so that the order is the same at every call. The
// passes over a digit are `count_digits`, `scan_digits` and `scatter_digits`; `find_bounds` finds
// where each key begins. Few keys have one digit, and few tiles need no scan: then `count_digits`
// and `sort_tiles` are all, and the latter alone where there is one tile.
#pragma once

#include "block_scan.cuh"
#include "ptx.cuh"
#include "types.cuh"

namespace tilekern {

inline constexpr int kSortThreads = 256;
inline constexpr int kSortWarps = kSortThreads / 32;
// A thread has so many digits in a row.
inline constexpr int kThreadDigits = 2;
inline constexpr int kMaxDigits = kThreadDigits * kSortThreads;

// One pass; `IndexSort` in `plans/segments/index_sort.py` packs the same fields in the same order.
struct SortPass {
  uint32 count;
  uint32 tiles;
  // The digit is (key >> shift) % digits, and the number of digits is a power of two.
  uint32 shift;
  uint32 digits;
  uint32 bins;
};

// The bin of a key: those below 0 are in the first bin, those above in the last.
inline int32 bin_of_key(int32 key, uint32 bins) {
  return min_of(max_of(key, -1), static_cast<int32>(bins) - 2) + 1;
}

inline uint32 digit_of(const SortPass& pass, int32 bin) {
  return static_cast<uint32>(bin) >> pass.shift & (pass.digits - 1);
}

// Counts the digits of each tile: counts[digit][tile], or counts[tile][digit] with kByTile. A
// thread has kItems keys of a tile. With kFirst they are keys, without it bins.
template <int kItems, bool kFirst, bool kByTile = false>
__global__ void __launch_bounds__(kSortThreads)
    count_digits(const int32* keys, uint32* counts, const __grid_constant__ SortPass pass) {
  __shared__ uint32 found[kMaxDigits];
  const uint32 thread = threadIdx.x;
  for (uint32 digit = thread; digit < kMaxDigits; digit += kSortThreads) found[digit] = 0;
  launch_dependents();
  wait_for_prerequisites();
  __syncthreads();
  const uint32 first = blockIdx.x * kSortThreads * kItems;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 row = first + i * kSortThreads + thread;
    if (row >= pass.count) continue;
    const int32 bin = kFirst ? bin_of_key(keys[row], pass.bins) : keys[row];
    atomicAdd(&found[digit_of(pass, bin)], 1u);
  }
  __syncthreads();
  for (uint32 digit = thread; digit < pass.digits; digit += kSortThreads) {
    const int64 row = kByTile ? blockIdx.x : digit, column = kByTile ? digit : blockIdx.x;
    counts[row * (kByTile ? pass.digits : pass.tiles) + column] = found[digit];
  }
}

// Replaces each count of a digit, one for each CTA, by the sum of those before, and writes the
// total.
__global__ void __launch_bounds__(kSortThreads)
    scan_digits(uint32* counts, uint32* totals, const __grid_constant__ SortPass pass) {
  __shared__ uint32 carried;
  uint32* const own = counts + static_cast<int64>(blockIdx.x) * pass.tiles;
  uint32 total = 0;
  launch_dependents();
  wait_for_prerequisites();
  for (uint32 first = 0; first < pass.tiles; first += kSortThreads) {
    const uint32 tile = first + threadIdx.x;
    const uint32 count = tile < pass.tiles ? own[tile] : 0;
    const uint32 before = sum_before<kSortThreads>(count);
    if (tile < pass.tiles) own[tile] = total + before;
    if (threadIdx.x == kSortThreads - 1) carried = before + count;
    __syncthreads();
    total += carried;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// How many keys of a digit all tiles have, and how many those before this one.
struct DigitCounts {
  uint32 total;
  uint32 before;
};

// Those that scan_digits() has left.
struct ScannedCounts {
  const SortPass& pass;
  const uint32* counts;
  const uint32* totals;

  void load() const {}
  DigitCounts operator()(uint32 digit, uint32) const {
    return {totals[digit], counts[static_cast<int64>(digit) * pass.tiles + blockIdx.x]};
  }
};

// The sums of counts[tile][digit], which every CTA adds up for itself.
struct SummedCounts {
  const SortPass& pass;
  const uint32* counts;
  // In shared memory.
  uint32 (&totals)[kMaxDigits];
  uint32 (&before)[kMaxDigits];

  void load() const {
    if (pass.tiles == 1) return;
    for (uint32 digit = threadIdx.x; digit < kMaxDigits; digit += kSortThreads) {
      totals[digit] = before[digit] = 0;
    }
    __syncthreads();
    // A thread has four digits, of which there is a multiple, and every so many tiles.
    const uint32 width = pass.digits / 4, quad = threadIdx.x % width;
    uint32 all[4] = {}, own[4] = {};
#pragma unroll 4
    for (uint32 tile = threadIdx.x / width; tile < pass.tiles; tile += kSortThreads / width) {
      const uint4 found = reinterpret_cast<const uint4*>(counts)[tile * width + quad];
      const uint32 four[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        all[i] += four[i];
        if (tile < blockIdx.x) own[i] += four[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      atomicAdd(&totals[4 * quad + i], all[i]);
      atomicAdd(&before[4 * quad + i], own[i]);
    }
  }
  DigitCounts operator()(uint32 digit, uint32 here) const {
    const bool alone = pass.tiles == 1;
    return {alone ? here : totals[digit], alone ? 0 : before[digit]};
  }
};

// Sorts the CTA's tile by a digit, stably and in shared memory, so that it writes runs of a digit.
// Rows are those of scatter_digits().
//
//   counts.load()              by all threads, before a barrier
//   counts(digit, here)        a digit's counts, of which the tile has `here`
//   begins(digit, begin)       where a digit begins in the order of all rows
//   placed(row, place)         the place of one of the thread's rows
//   write(place, bin, row)     what is at a place; threads have adjacent places
template <int kItems, bool kFirst, class Counts, class Begins, class Placed, class Write>
inline void sort_tile(const int32* keys, const int32* rows, const SortPass& pass,
                      const Counts& counts, const Begins& begins, const Placed& placed,
                      const Write& write) {
  constexpr uint32 kTile = kSortThreads * kItems;
  // For each warp and digit, first the count, then where the next one goes in the tile.
  __shared__ uint32 places[kSortWarps][kMaxDigits];
  // What is added to a place in the tile.
  __shared__ uint32 offsets[kMaxDigits];
  __shared__ int32 tile_keys[kTile], tile_rows[kTile];
  const uint32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const uint32 tile = blockIdx.x * kTile;
  // Keys of a warp are adjacent.
  const uint32 first = tile + warp * 32 * kItems;
  for (uint32 digit = thread; digit < kMaxDigits; digit += kSortThreads) {
#pragma unroll
    for (int i = 0; i < kSortWarps; ++i) places[i][digit] = 0;
  }
  __syncthreads();
  launch_dependents();
  wait_for_prerequisites();
  counts.load();
  int32 key[kItems];
  uint32 rank[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 at = first + i * 32 + lane;
    key[i] = at < pass.count ? keys[at] : 0;
    if (kFirst) key[i] = bin_of_key(key[i], pass.bins);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool inside = first + i * 32 + lane < pass.count;
    const uint32 digit = digit_of(pass, key[i]);
    // The lanes that have this digit.
    uint32 alike = __ballot_sync(~0u, inside);
    for (uint32 bit = 1; bit < pass.digits; bit *= 2) {
      const uint32 ones = __ballot_sync(~0u, digit & bit);
      alike &= digit & bit ? ones : ~ones;
    }
    const uint32 before = __popc(alike & ((1u << lane) - 1));
    const uint32 known = inside ? places[warp][digit] : 0;
    rank[i] = known + before;
    __syncwarp();
    if (inside && before == 0) places[warp][digit] = known + __popc(alike);
    __syncwarp();
  }
  // A thread's digits: how many in the tile, and in all tiles.
  uint32 here[kThreadDigits], here_all = 0, everywhere_all = 0;
  DigitCounts everywhere[kThreadDigits];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreadDigits; ++i) {
    const uint32 digit = kThreadDigits * thread + i;
    here[i] = 0;
    everywhere[i] = {};
    if (digit < pass.digits) {
#pragma unroll
      for (int j = 0; j < kSortWarps; ++j) here[i] += places[j][digit];
      everywhere[i] = counts(digit, here[i]);
    }
    here_all += here[i];
    everywhere_all += everywhere[i].total;
  }
  uint32 place = sum_before<kSortThreads>(here_all),
         begin = sum_before<kSortThreads>(everywhere_all);
#pragma unroll
  for (int i = 0; i < kThreadDigits; ++i) {
    const uint32 digit = kThreadDigits * thread + i;
    if (digit >= pass.digits) continue;
    begins(digit, begin);
    offsets[digit] = begin + everywhere[i].before - place;
    begin += everywhere[i].total;
#pragma unroll
    for (int j = 0; j < kSortWarps; ++j) {
      const uint32 count = places[j][digit];
      places[j][digit] = place;
      place += count;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 at = first + i * 32 + lane;
    if (at >= pass.count) continue;
    const uint32 digit = digit_of(pass, key[i]);
    const uint32 local = places[warp][digit] + rank[i];
    const int32 row = kFirst ? static_cast<int32>(at) : rows[at];
    tile_keys[local] = key[i];
    tile_rows[local] = row;
    placed(row, offsets[digit] + local);
  }
  __syncthreads();
  const uint32 count = min_of(pass.count - tile, kTile);
  for (uint32 i = thread; i < count; i += kSortThreads) {
    const int32 own = tile_keys[i];
    write(offsets[digit_of(pass, own)] + i, own, tile_rows[i]);
  }
}

// Writes the rows in the order of this digit. With kFirst, they are in the order of their numbers;
// without it, `rows` are the rows in the order of the digits before, and `keys` are their bins.
template <int kItems, bool kFirst>
__global__ void __launch_bounds__(kSortThreads)
    scatter_digits(const int32* keys, const int32* rows, const uint32* counts, const uint32* totals,
                   int32* sorted_keys, int32* sorted_rows, const __grid_constant__ SortPass pass) {
  sort_tile<kItems, kFirst>(
      keys, rows, pass, ScannedCounts{pass, counts, totals}, [](uint32, uint32) {},
      [](int32, uint32) {},
      [&](uint32 place, int32 bin, int32 row) {
        sorted_keys[place] = bin;
        sorted_rows[place] = row;
      });
}

// The only pass over keys of one digit: the order of the rows, and the bounds of the bins as
// find_bounds() has them. With kPlaces, the place of each row in the order, too, and bounds without
// the last one. `counts` are those of each tile, counts[tile][digit]; they are not read where there
// is one tile.
template <int kItems, bool kPlaces>
__global__ void __launch_bounds__(kSortThreads)
    sort_tiles(const int32* keys, const uint32* counts, int32* order, int32* places, int32* bounds,
               const __grid_constant__ SortPass pass) {
  __shared__ uint32 totals[kMaxDigits], before[kMaxDigits];
  sort_tile<kItems, true>(
      keys, nullptr, pass, SummedCounts{pass, counts, totals, before},
      [&](uint32 digit, uint32 begin) {
        if (blockIdx.x == 0 && digit < pass.bins) bounds[digit] = static_cast<int32>(begin);
        if (!kPlaces && blockIdx.x == 0 && digit == 0) {
          bounds[pass.bins] = static_cast<int32>(pass.count);
        }
      },
      [&](int32 row, uint32 place) {
        if (kPlaces) places[row] = static_cast<int32>(place);
      },
      [&](uint32 place, int32, int32 row) { order[place] = row; });
}

// bounds[i] is the number of keys of bins below i, for i up to `bins`, where keys ascend. With
// kBins they are bins. Whatever the keys are, the bounds ascend, because the search for a larger
// key turns right wherever that for a smaller one does.
template <bool kBins>
__global__ void __launch_bounds__(kSortThreads)
    find_bounds(const int32* keys, int32* bounds, uint32 count, uint32 bins) {
  const uint32 bin = blockIdx.x * kSortThreads + threadIdx.x;
  launch_dependents();
  wait_for_prerequisites();
  if (bin > bins) return;
  uint32 low = 0, high = count;
  while (low < high) {
    const uint32 middle = low + (high - low) / 2;
    const int32 found = kBins ? keys[middle] : bin_of_key(keys[middle], bins);
    if (found < static_cast<int32>(bin)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  // Every row belongs to a bin.
  bounds[bin] = bin == 0 ? 0 : bin == bins ? count : low;
}

}  // namespace tilekern

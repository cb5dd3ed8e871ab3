// Sorts rows of any length, stably and in the order of lax.sort: -0 equals 0, and NaN comes last.
//
// `count_row_digits` counts all digits of a row in one pass over it. Then `sort_by_digit` sorts by
// one digit of 8 bits after the other, least significant first, and moves each element once
// (Adinets and Merrill, "Onesweep", 2022). A tile of a row publishes its counts of a digit. What
// precedes them is found by look-back: a thread adds up the counts of the tiles before, until it
// finds a tile that has published the sum up to itself. Sums of integers do not depend on where it
// does, so all results have fixed bits. CTAs take tiles by tickets, so those before have started.
//
// A digit that all elements of a row share is skipped. Buffers alternate such that the last pass
// over a row writes the result; passes before it write sortable_bits().
//
// Rows of 64 bits are first sorted by their upper digits alone, as many as tell most elements
// apart. `order_prefix_runs` then orders the elements of each short run that shares these digits.
// Where a longer run is not in order, the row is sorted by all digits.
#pragma once

#include "ptx.cuh"
#include "selection/sort_rows.cuh"

namespace tilekern {

inline constexpr int kCountThreads = 512;
// Elements that a thread loads at once.
inline constexpr int kCountItems = 8;
// Lanes add to copies of a count that are in adjacent banks, so at most two lanes add to one.
inline constexpr uint32 kCountCopies = 16;

// Run-time choices; `RadixSort` in `plans/selection/radix_sort.py` packs the fields of both structs
// in the same order.
struct CountShape {
  uint32 columns;
  // CTAs of a row, and columns of each.
  uint32 parts;
  uint32 length;
};
struct DigitPassShape {
  uint32 rows;
  uint32 columns;
  uint32 tiles;  // of a row
  uint32 digit;  // its number
  uint32 is_of_prefix;
  uint32 reads_backwards;
  uint32 writes_backwards;
};

// What a pass does with a row that is sorted by its upper digits first.
template <typename T>
inline constexpr bool kHasPrefix = sizeof(T) == 8;
// Elements of a run that are compared with each other.
inline constexpr uint32 kPrefixRun = 32;
// In how many bits more than the number of a column has the prefix differs. Values of floats crowd
// where exponents are equal.
template <typename T>
inline constexpr int kPrefixSlack = kIsFloat<T> ? 7 : -1;

// The first digit of the prefix that rows are sorted by, or 0 where all digits are as fast.
template <typename T>
inline uint32 first_of_prefix(OrderedBits<T> differing, uint32 columns) {
  const int enough = 32 - __clz(columns) + kPrefixSlack<T>;
  uint32 first = 0, left_out = 0;
#pragma unroll
  for (uint32 digit = 0; digit < sizeof(T); ++digit) {
    const auto upper = differing >> digit * kSortDigitBits;
    // Two digits that are left out pay for the order of runs.
    if (left_out >= 2 && __popcll(upper) >= enough) first = digit;
    left_out += upper % kSortDigits != 0;
  }
  return first;
}

// Counts counts[row][digit][value], and the bits in which elements of a row differ.
template <typename T>
__global__ void __launch_bounds__(kCountThreads)
    count_row_digits(const T* x, OrderedBits<T>* differing, uint32* counts,
                     const __grid_constant__ CountShape shape) {
  using Bits = OrderedBits<T>;
  constexpr uint32 kCounts = sizeof(T) * kSortDigits;
  uint32* const copies = reinterpret_cast<uint32*>(shared_memory);
  const uint32 thread = threadIdx.x, row = blockIdx.x / shape.parts;
  const uint32 begin = blockIdx.x % shape.parts * shape.length;
  const uint32 end = min_of(begin + shape.length, shape.columns);
  const T* const elements = x + static_cast<int64>(row) * shape.columns;
  launch_dependents();
  for (uint32 i = thread; i < kCounts * kCountCopies; i += kCountThreads) copies[i] = 0;
  __syncthreads();
  const Bits first = sort_key<T>(sortable_bits(elements[0]));
  Bits differ[1] = {};
  for (uint32 at = begin + thread; at < end; at += kCountThreads * kCountItems) {
    Bits own[kCountItems];
#pragma unroll
    for (int i = 0; i < kCountItems; ++i) {
      const uint32 column = at + i * kCountThreads;
      own[i] = column < end ? sort_key<T>(sortable_bits(elements[column])) : first;
    }
#pragma unroll
    for (int i = 0; i < kCountItems; ++i) {
      if (at + i * kCountThreads >= end) break;
      differ[0] |= own[i] ^ first;
#pragma unroll
      for (uint32 digit = 0; digit < sizeof(T); ++digit) {
        const auto value = static_cast<uint32>(own[i] >> digit * kSortDigitBits) % kSortDigits;
        const uint32 count = digit * kSortDigits + value;
        atomicAdd(&copies[count * kCountCopies + thread % kCountCopies], 1u);
      }
    }
  }
  const Bits all = differing_bits(differ, Bits{0}, [](Bits bits) { return bits; });
  wait_for_prerequisites();
  if (thread == 0 && all != 0) atomicOr(&differing[row], all);
  for (uint32 count = thread; count < kCounts; count += kCountThreads) {
    uint32 sum = 0;
#pragma unroll
    for (uint32 i = 0; i < kCountCopies / 4; ++i) {
      const uint4 four = shared_memory[count * (kCountCopies / 4) + i];
      sum += four.x + four.y + four.z + four.w;
    }
    if (sum > 0) atomicAdd(&counts[static_cast<int64>(row) * kCounts + count], sum);
  }
}

// What a tile publishes of a value of a digit: nothing yet, which is 0; how many elements of the
// tile have it, plus 1; or where the tiles up to this one end in the order of the row, with a mark.
inline constexpr uint32 kIsEnd = 1u << 31;
inline void publish(uint32* slot, uint32 word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(slot), "r"(word) : "memory");
}
inline uint32 published(const uint32* slot) {
  uint32 word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(slot) : "memory");
  return word;
}

// Where `tiles` tiles before one with this slot end, of which there is at least one. Slots of
// several tiles are loaded at a time, because latency is what counts.
inline uint32 end_of_tiles_before(const uint32* slot, uint32 tiles) {
  constexpr uint32 kLoads = 4;
  uint32 end = 0;
  for (;; slot -= kLoads * kSortDigits, tiles -= kLoads) {
    uint32 words[kLoads];
#pragma unroll
    for (uint32 i = 0; i < kLoads; ++i) {
      words[i] = published(slot - min_of(i + 1, tiles) * kSortDigits);
    }
#pragma unroll
    for (uint32 i = 0; i < kLoads; ++i) {
      while (words[i] == 0) words[i] = published(slot - (i + 1) * kSortDigits);
      if (words[i] & kIsEnd) return end + (words[i] - kIsEnd);
      end += words[i] - 1;
    }
  }
}

// Threads of an SM that sort tiles, by their registers: 64 of each, and 80 with long elements.
template <typename T>
inline constexpr int kTileThreads = sizeof(T) == 8 ? 768 : 1024;

// A CTA sorts a tile of a row by one digit. The first pass reads `x`; the last one writes the
// results, which are `keys`, with kValues, and `indices`. `slots` are slots[row][tile][value].
template <typename T, int kThreads, int kItems, bool kValues, bool kIndices>
__global__ void __launch_bounds__(kThreads, kTileThreads<T> / kThreads)
    sort_by_digit(const T* x, T* keys, T* other_keys, int32* indices, int32* other_indices,
                  uint32* ticket_counter, const OrderedBits<T>* differing, const uint32* counts,
                  uint32* slots, const uint32* failed,
                  const __grid_constant__ DigitPassShape shape) {
  using Bits = OrderedBits<T>;
  using Word = UnsignedOf<sizeof(T)>;
  constexpr int kWarps = kThreads / 32;
  constexpr uint32 kTile = kThreads * kItems, kDigits = sizeof(T);
  static_assert(kTile <= 1 << 16 && kThreads >= kSortDigits);
  // In shared memory: elements and indices of the tile; for each warp and value first the count,
  // then where the next one goes; what is added to a place in the tile.
  Word* const tile_keys = reinterpret_cast<Word*>(shared_memory);
  int32* const tile_indices = reinterpret_cast<int32*>(tile_keys + kTile);
  auto* const places = reinterpret_cast<uint32(*)[kSortDigits]>(tile_indices + kIndices * kTile);
  uint32* const offsets = places[kWarps];
  uint32* const sums = offsets + kSortDigits;
  uint32* const ticket = sums + kWarps;
  const uint32 thread = threadIdx.x, lane = thread % 32;
  uint32* const own_places = places[thread / 32];
  launch_dependents();
  wait_for_prerequisites();
  if (thread == 0) *ticket = atomicAdd(ticket_counter, 1u);
  for (uint32 value = lane; value < kSortDigits; value += 32) own_places[value] = 0;
  __syncthreads();
  const uint32 row = *ticket % shape.rows, tile = *ticket / shape.rows;

  const Bits bits_that_differ = differing[row];
  const auto differs = [&](uint32 digit) {
    return (bits_that_differ >> digit * kSortDigitBits) % kSortDigits != 0;
  };
  // Equal elements are copied by the last pass.
  if (!differs(shape.digit) && (bits_that_differ != 0 || shape.digit + 1 < kDigits)) return;
  uint32 first_digit = 0;
  if constexpr (kHasPrefix<T>) {
    first_digit = first_of_prefix<T>(bits_that_differ, shape.columns);
    if (shape.is_of_prefix ? first_digit == 0 || shape.digit < first_digit
                           : first_digit != 0 && failed[row] == 0) {
      return;
    }
    if (!shape.is_of_prefix) first_digit = 0;
  }
  bool is_first = true;
  uint32 passes_left = kHasPrefix<T> && shape.is_of_prefix;
#pragma unroll
  for (uint32 digit = 0; digit < kDigits; ++digit) {
    if (digit >= first_digit && digit < shape.digit && differs(digit)) is_first = false;
    if (digit > shape.digit) passes_left += differs(digit);
  }
  const bool is_last = passes_left == 0, to_results = passes_left % 2 == 0;
  const int64 start = static_cast<int64>(row) * shape.columns;
  const T* const from_keys = (to_results ? other_keys : keys) + start;
  const int32* const from_indices = (to_results ? other_indices : indices) + start;

  // A warp's elements are adjacent.
  const uint32 begin = tile * kTile, last = shape.columns - 1;
  const uint32 own_first = begin + thread / 32 * (32 * kItems) + lane;
  const uint32 own_count = own_first <= last ? (last - own_first) / 32 + 1 : 0;
  // The column of the first one in the operand, and the distance to that of the next one.
  const int64 column = shape.reads_backwards ? int64{last} - own_first : own_first;
  const int step = shape.reads_backwards ? -32 : 32;
  // What is beyond the row is the last of its value in the tile, and is not counted.
  constexpr Bits kBeyond = kAllBits<T>;
  Bits own[kItems];
  if (is_first) {
    const T* from = x + start + column;
#pragma unroll
    for (uint32 i = 0; i < kItems; ++i, from += step)
      own[i] = i < own_count ? sortable_bits(*from) : kBeyond;
  } else {
    const Word* const from = reinterpret_cast<const Word*>(from_keys) + own_first;
#pragma unroll
    for (uint32 i = 0; i < kItems; ++i) own[i] = i < own_count ? from[32 * i] : kBeyond;
  }
  const auto value_of = [&](Bits bits) {
    return static_cast<uint32>(sort_key<T>(bits) >> shape.digit * kSortDigitBits) % kSortDigits;
  };
  // The value, and how many elements of the warp before have it.
  uint32 ranks[kItems];
#pragma unroll
  for (uint32 i = 0; i < kItems; ++i) {
    const uint32 value = value_of(own[i]);
    const uint32 alike = lanes_alike(value);
    const uint32 before = __popc(alike & ((1u << lane) - 1));
    const uint32 known = own_places[value];
    ranks[i] = value << 16 | (known + before);
    // The address of the count is computed again later, so no register holds it until then.
    asm volatile("" : "+r"(ranks[i]));
    __syncwarp();
    if (before == 0) own_places[value] = known + __popc(alike);
    __syncwarp();
  }
  __syncthreads();

  // A thread has a value of the digit.
  const bool has_value = thread < kSortDigits;
  uint32* const slot =
      slots + (static_cast<int64>(row) * shape.tiles + tile) * kSortDigits + thread;
  const uint32 length = min_of(shape.columns - begin, kTile);
  uint32 count = 0;
  if (has_value) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) count += places[warp][thread];
    if (thread == value_of(kBeyond)) count -= kTile - length;
    if (tile > 0) publish(slot, count + 1);
  }
  const uint32 place = sum_before<kThreads>(count, sums);
  // Where the value begins in the order of the row.
  uint32 end = 0;
  if (tile == 0) {
    const int64 number = (static_cast<int64>(row) * kDigits + shape.digit) * kSortDigits + thread;
    end = sum_before<kThreads>(has_value ? counts[number] : 0, sums);
    if (has_value) publish(slot, kIsEnd | (end + count));
  }
  if (has_value) {
    uint32 next = place;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const uint32 of_warp = places[warp][thread];
      places[warp][thread] = next;
      next += of_warp;
    }
  }
  __syncthreads();
#pragma unroll
  for (uint32 i = 0; i < kItems; ++i) {
    ranks[i] = own_places[ranks[i] >> 16] + (ranks[i] & 0xffff);
    if (i < own_count) tile_keys[ranks[i]] = static_cast<Word>(own[i]);
  }
  if constexpr (kIndices) {
    int32 own_indices[kItems];
#pragma unroll
    for (uint32 i = 0; i < kItems; ++i) {
      own_indices[i] = static_cast<int32>(column) + i * step;
      if (!is_first && i < own_count) own_indices[i] = from_indices[own_first + 32 * i];
    }
#pragma unroll
    for (uint32 i = 0; i < kItems; ++i) {
      if (i < own_count) tile_indices[ranks[i]] = own_indices[i];
    }
  }
  if (has_value) {
    if (tile > 0) {
      end = end_of_tiles_before(slot, tile);
      publish(slot, kIsEnd | (end + count));
    }
    offsets[thread] = end - place;
  }
  __syncthreads();

  T* const to_keys = (to_results ? keys : other_keys) + start;
  int32* const to_indices = (to_results ? indices : other_indices) + start;
#pragma unroll 4
  for (uint32 at = thread; at < length; at += kThreads) {
    const Bits bits = tile_keys[at];
    const uint32 position = offsets[value_of(bits)] + at;
    const uint32 to = is_last && shape.writes_backwards ? last - position : position;
    if (!is_last) {
      reinterpret_cast<Word*>(to_keys)[to] = static_cast<Word>(bits);
    } else if constexpr (kValues) {
      to_keys[to] = element_of_sortable<T>(bits);
    }
    if constexpr (kIndices) to_indices[to] = tile_indices[at];
  }
}

// Orders runs of elements that share the prefix of a row, which `other_keys` is sorted by.
struct PrefixRunsShape {
  uint32 columns;
  uint32 tiles;  // of a row
  uint32 writes_backwards;
};
template <typename T, int kThreads, int kItems, bool kValues, bool kIndices>
__global__ void __launch_bounds__(kThreads)
    order_prefix_runs(const T* other_keys, T* keys, const int32* other_indices, int32* indices,
                      const OrderedBits<T>* differing, uint32* failed,
                      const __grid_constant__ PrefixRunsShape shape) {
  using Bits = OrderedBits<T>;
  constexpr uint32 kTile = kThreads * kItems;
  Bits* const tile_bits = reinterpret_cast<Bits*>(shared_memory);
  const uint32 row = blockIdx.x / shape.tiles, begin = blockIdx.x % shape.tiles * kTile;
  launch_dependents();
  wait_for_prerequisites();
  const uint32 first_digit = first_of_prefix<T>(differing[row], shape.columns);
  if (first_digit == 0) return;
  // A row that has failed is sorted by all digits.
  if (__syncthreads_or(threadIdx.x == 0 && published(&failed[row]) != 0)) return;
  const int64 start = static_cast<int64>(row) * shape.columns;
  const auto* const from = reinterpret_cast<const Bits*>(other_keys) + start;
  // The tile, and a run's length before and behind it.
  const uint32 halo = min_of(begin, kPrefixRun);
  const uint32 end = min_of(begin + kTile, shape.columns);
  const uint32 known = min_of(end + kPrefixRun, shape.columns) - (begin - halo);
  for (uint32 i = threadIdx.x; i < known; i += kThreads) tile_bits[i] = from[begin - halo + i];
  __syncthreads();
  const uint32 shift = first_digit * kSortDigitBits;
  const auto key_at = [&](uint32 i) { return sort_key<T>(tile_bits[i]); };
  bool is_disordered = false;
  for (uint32 i = threadIdx.x + 1; i < known; i += kThreads) {
    const Bits left = key_at(i - 1), right = key_at(i);
    is_disordered |= left > right && left >> shift == right >> shift;
  }
  const bool has_disorder = __syncthreads_or(is_disordered);
  for (uint32 at = begin + threadIdx.x; at < end; at += kThreads) {
    const uint32 own = at - begin + halo;
    const Bits bits = tile_bits[own], key = sort_key<T>(bits), prefix = key >> shift;
    uint32 before = 0, behind = 0, larger_before = 0, smaller_behind = 0;
    while (has_disorder && before < kPrefixRun && before < own) {
      const Bits other = key_at(own - before - 1);
      if (other >> shift != prefix) break;
      larger_before += other > key;
      ++before;
    }
    while (has_disorder && behind < kPrefixRun && own + behind + 1 < known) {
      const Bits other = key_at(own + behind + 1);
      if (other >> shift != prefix) break;
      smaller_behind += other < key;
      ++behind;
    }
    uint32 to = at - larger_before + smaller_behind;
    if (before + behind >= kPrefixRun) {
      // A longer run stays as it is.
      to = at;
      if (before > 0 && key_at(own - 1) > key) publish(&failed[row], 1);
    }
    if (shape.writes_backwards) to = shape.columns - 1 - to;
    if constexpr (kValues) keys[start + to] = element_of_sortable<T>(bits);
    if constexpr (kIndices) indices[start + to] = other_indices[start + at];
  }
}

}  // namespace tilekern

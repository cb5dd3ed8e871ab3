// Sorts rows that fit shared memory, stably and in the order of lax.sort: -0 equals 0, and NaN
// comes last. A CTA has a row and sorts it by one digit of 8 bits after the other, least
// significant first; digits that all elements share are skipped. Where elements of 64 bits are
// spread over their range, the digits are those of the parts of the range in which they are, and
// the few elements of a part are compared with each other.
#pragma once

#include "block_scan.cuh"
#include "selection/range_digits.cuh"
#include "selection/sort_key.cuh"

namespace tilekern {

extern __shared__ uint4 shared_memory[];

// Run-time choices; `SortRows` in `plans/selection/sort_rows.py` packs the same fields in the same
// order.
struct SortRowsShape {
  uint32 columns;
  // Whether the row is read, and written, from its last element on.
  uint32 reads_backwards;
  uint32 writes_backwards;
};

inline constexpr int kSortDigitBits = 8;
inline constexpr uint32 kSortDigits = 1u << kSortDigitBits;

// The lanes of a warp whose values have the same bit as this lane's. The compiler computes the bit
// twice, as a predicate and as a number, where it has __ballot_sync().
inline uint32 lanes_alike_in(uint32 value, uint32 bit) {
  uint32 lanes;
  asm volatile(
      "{\n"
      "  .reg .pred is_one;\n"
      "  .reg .b32 masked;\n"
      "  and.b32 masked, %1, %2;\n"
      "  setp.ne.u32 is_one, masked, 0;\n"
      "  vote.sync.ballot.b32 %0, is_one, 0xffffffff;\n"
      "  @!is_one not.b32 %0, %0;\n"
      "}"
      : "=r"(lanes)
      : "r"(value), "r"(bit));
  return lanes;
}

// One instruction, which the compiler does not find behind those of lanes_alike_in().
inline uint32 and_of(uint32 x, uint32 y, uint32 z) {
  uint32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0x80;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}

// The lanes that have the same digit.
inline uint32 lanes_alike(uint32 digit) {
  static_assert(kSortDigitBits == 8);
  uint32 of_bits[kSortDigitBits];
#pragma unroll
  for (int bit = 0; bit < kSortDigitBits; ++bit) of_bits[bit] = lanes_alike_in(digit, 1u << bit);
  const uint32 low = and_of(of_bits[0], of_bits[1], of_bits[2]);
  const uint32 middle = and_of(of_bits[3], of_bits[4], of_bits[5]);
  return and_of(low, middle, of_bits[6] & of_bits[7]);
}

// Whether one of the CTA's elements has a bit that another one lacks, for each bit.
template <int kItems, typename Bits, class Key>
inline Bits differing_bits(const Bits (&own)[kItems], Bits first, const Key& key) {
  constexpr int kWords = sizeof(Bits) / 4;
  __shared__ uint32 words[kWords];
  if (threadIdx.x < kWords) words[threadIdx.x] = 0;
  __syncthreads();
  Bits bits = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) bits |= key(own[i]) ^ key(first);
  Bits result = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint32 word = __reduce_or_sync(~0u, static_cast<uint32>(bits >> (32 * i)));
    if (threadIdx.x % 32 == 0) atomicOr(&words[i], word);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWords; ++i) result |= static_cast<Bits>(words[i]) << (32 * i);
  return result;
}

// Sorts the elements of a CTA by a digit, stably. `own` are those at own_first + 32 * i, and after
// it `words` has all of them. `places` are kSortDigits words for each warp.
template <int kThreads, bool kIndices, typename Bits, int kItems, typename Word, class DigitOf>
inline void sort_tile(Bits (&own)[kItems], uint32 (&own_columns)[kIndices ? kItems : 1],
                      uint32 own_first, uint32* places, Word* words, uint16* columns,
                      const DigitOf& digit_of) {
  constexpr int kWarps = kThreads / 32;
  const uint32 thread = threadIdx.x, lane = thread % 32;
  // For each digit how many elements before had it; later, where the next one goes.
  uint32* const own_places = places + thread / 32 * kSortDigits;
  for (uint32 digit = lane; digit < kSortDigits; digit += 32) own_places[digit] = 0;
  __syncwarp();
  // The digit, and how many elements of the warp before have it.
  uint32 ranks[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 digit = digit_of(own[i]);
    const uint32 alike = lanes_alike(digit), known = own_places[digit];
    const uint32 before = __popc(alike & ((1u << lane) - 1));
    ranks[i] = digit << 16 | (known + before);
    // The address of the count is computed again later, so no register holds it until then.
    asm volatile("" : "+r"(ranks[i]));
    __syncwarp();
    if (before == 0) own_places[digit] = known + __popc(alike);
    __syncwarp();
  }
  __syncthreads();
  constexpr uint32 kOwnDigits = max_of<uint32>(1, kSortDigits / kThreads);
  const uint32 first = thread * kOwnDigits;
  const uint32 end = first < kSortDigits ? first + kOwnDigits : first;
  uint32 sum = 0;
  for (uint32 digit = first; digit < end; ++digit) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += places[warp * kSortDigits + digit];
  }
  uint32 place = sum_before<kThreads>(sum);
  for (uint32 digit = first; digit < end; ++digit) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      uint32& count = places[warp * kSortDigits + digit];
      const uint32 own_count = count;
      count = place;
      place += own_count;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 to = own_places[ranks[i] >> 16] + (ranks[i] & 0xffff);
    words[to] = static_cast<Word>(own[i]);
    if constexpr (kIndices) columns[to] = static_cast<uint16>(own_columns[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    own[i] = words[own_first + 32 * i];
    if constexpr (kIndices) own_columns[i] = columns[own_first + 32 * i];
  }
}

// Whether few of the CTA's elements share the first digit of their parts. A lane has a sample,
// which the elements of its warp are spread over.
template <typename T, int kThreads, int kItems>
inline bool are_spread(const RangeParts<T>& parts, const OrderedBits<T> (&own)[kItems],
                       uint32 own_first, uint32 count) {
  const uint32 sampled = threadIdx.x % kItems;
  OrderedBits<T> sample = own[0];
#pragma unroll
  for (uint32 i = 1; i < kItems; ++i) sample = sampled == i ? own[i] : sample;
  const uint32 alike = lanes_alike(parts.of(sample) >> kSortDigitBits);
  const bool is_crowded = own_first + 32 * sampled < count && __popc(alike) > 4;
  return !__syncthreads_or(__popc(__ballot_sync(~0u, is_crowded)) > 8);
}

// A CTA to a row of at most kThreads * kItems columns.
template <typename T, int kThreads, int kItems, bool kValues, bool kIndices>
__global__ void __launch_bounds__(kThreads)
    sort_rows(const T* x, T* values, int32* indices, const __grid_constant__ SortRowsShape shape) {
  using Bits = OrderedBits<T>;
  using Word = UnsignedOf<sizeof(T)>;
  constexpr uint32 kTile = kThreads * kItems;
  static_assert(kTile <= 1 << 16);
  Word* const words = reinterpret_cast<Word*>(shared_memory);
  uint16* const columns = reinterpret_cast<uint16*>(words + kTile);
  uint32* const places = reinterpret_cast<uint32*>(columns + kIndices * kTile);
  const uint32 thread = threadIdx.x, lane = thread % 32;
  const int64 start = static_cast<int64>(blockIdx.x) * shape.columns;
  // A warp's elements are adjacent.
  const uint32 own_first = thread / 32 * (32 * kItems) + lane;
  const uint32 last = shape.columns - 1;
  Bits own[kItems];
  uint32 own_columns[kIndices ? kItems : 1];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 position = own_first + 32 * i;
    const uint32 column = shape.reads_backwards ? last - position : position;
    // What is beyond the row comes last, because the sort is stable.
    own[i] = position <= last ? sortable_bits(x[start + column]) : kAllBits<T>;
    if constexpr (kIndices) own_columns[i] = column;
  }
  const auto sort_by = [&](const auto& digit_of) {
    sort_tile<kThreads, kIndices>(own, own_columns, own_first, places, words, columns, digit_of);
  };
  const auto write = [&](uint32 position, Bits bits, uint32 column) {
    const int64 to = start + (shape.writes_backwards ? last - position : position);
    if constexpr (kValues) values[to] = element_of_sortable<T>(bits);
    if constexpr (kIndices) indices[to] = static_cast<int32>(column);
  };
  const Bits differing =
      differing_bits(own, sortable_bits(x[start]), [](Bits bits) { return sort_key<T>(bits); });
  uint32 digits = 0;
#pragma unroll
  for (uint32 digit = 0; digit < sizeof(T); ++digit) {
    digits += (differing >> digit * kSortDigitBits) % kSortDigits != 0;
  }
  if constexpr (sizeof(T) == 8) {
    const auto parts = range_parts<T, kThreads>(own, own_first, shape.columns);
    if (digits > 2 && are_spread<T, kThreads>(parts, own, own_first, shape.columns)) {
      sort_by([&](Bits bits) { return parts.of(bits) % kSortDigits; });
      sort_by([&](Bits bits) { return parts.of(bits) >> kSortDigitBits; });
      // Elements of a part are adjacent, and few.
      auto* const parts_of = reinterpret_cast<uint16*>(places);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        parts_of[own_first + 32 * i] = static_cast<uint16>(parts.of(own[i]));
      }
      __syncthreads();
#pragma unroll 1
      for (uint32 at = own_first; at <= min_of(last, own_first + 32 * (kItems - 1)); at += 32) {
        const Bits bits = words[at], key = sort_key<T>(bits);
        const uint32 part = parts_of[at];
        uint32 to = at;
#pragma unroll 1
        for (uint32 j = at; j > 0 && parts_of[j - 1] == part; --j) {
          to -= sort_key<T>(words[j - 1]) > key;
        }
#pragma unroll 1
        for (uint32 j = at + 1; j <= last && parts_of[j] == part; ++j) {
          to += sort_key<T>(words[j]) < key;
        }
        write(to, bits, kIndices ? columns[at] : 0);
      }
      return;
    }
  }
  for (int shift = 0; shift < 8 * static_cast<int>(sizeof(T)); shift += kSortDigitBits) {
    if ((differing >> shift) % kSortDigits == 0) continue;
    sort_by(
        [&](Bits bits) { return static_cast<uint32>(sort_key<T>(bits) >> shift) % kSortDigits; });
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 position = own_first + 32 * i;
    if (position <= last) write(position, own[i], own_columns[kIndices ? i : 0]);
  }
}

}  // namespace tilekern

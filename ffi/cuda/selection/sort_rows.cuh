// Sorts rows that fit shared memory, stably and in the order of lax.sort: -0 equals 0, and NaN
// comes last. A CTA has a row and sorts it by one digit of 8 bits after the other, least
// significant first; digits that all elements share are skipped.
#pragma once

#include "block_scan.cuh"
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

// A CTA to a row of at most kThreads * kItems columns.
template <typename T, int kThreads, int kItems, bool kValues, bool kIndices>
__global__ void __launch_bounds__(kThreads)
    sort_rows(const T* x, T* values, int32* indices, const __grid_constant__ SortRowsShape shape) {
  using Bits = OrderedBits<T>;
  using Word = UnsignedOf<sizeof(T)>;
  constexpr int kWarps = kThreads / 32;
  constexpr uint32 kTile = kThreads * kItems;
  static_assert(kTile <= 1 << 16);
  // For each warp and digit how many elements before had it; later, where the next one goes.
  uint32* const places = reinterpret_cast<uint32*>(shared_memory);
  Word* const words = reinterpret_cast<Word*>(places + kWarps * kSortDigits);
  uint16* const columns = reinterpret_cast<uint16*>(words + kTile);
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
  const Bits differing =
      differing_bits(own, sortable_bits(x[start]), [](Bits bits) { return sort_key<T>(bits); });
  uint32* const own_places = places + thread / 32 * kSortDigits;
  for (int shift = 0; shift < 8 * static_cast<int>(sizeof(T)); shift += kSortDigitBits) {
    if ((differing >> shift) % kSortDigits == 0) continue;
    for (uint32 digit = lane; digit < kSortDigits; digit += 32) own_places[digit] = 0;
    __syncwarp();
    // The digit, and how many elements of the warp before have it.
    uint32 ranks[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const auto digit = static_cast<uint32>(sort_key<T>(own[i]) >> shift) % kSortDigits;
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
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32 position = own_first + 32 * i;
    if (position > last) continue;
    const int64 to = start + (shape.writes_backwards ? last - position : position);
    if constexpr (kValues) values[to] = element_of_sortable<T>(own[i]);
    if constexpr (kIndices) indices[to] = static_cast<int32>(own_columns[i]);
  }
}

}  // namespace tilekern

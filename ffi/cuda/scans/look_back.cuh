// The hand-over between the tiles of a scan, and what the scan kernels share.
//
// A kernel is a template of a scan, a functor that `plans/scans/scan_text.py` generates:
//
//   struct Scan {
//     struct Value {...};                // what is combined: 32-bit and 64-bit numbers
//     struct Vector {...};               // the bits of adjacent elements of each array
//     static constexpr int kVector = 4;  // elements of a vector
//     static constexpr bool kReverse, kInitial;
//     // The place is a Row, RowStarts or Before.
//     template <class Place>
//     Vector load(int64 at, int count, const Place& place) const;
//     void prefetch(int64 at) const;     // to L2, the lines of an element of each array
//     static Value value(const Vector& vector, int i);
//     static Value combine(const Value& earlier, const Value& later);
//     Value initial(int64 sequence) const;  // what precedes the first element, with kInitial
//     void store(int64 at, int count, const Value (&values)[kVector]) const;
//   };
//
// `combine` need not have a neutral element, so kernels keep account of what is preceded by
// something. Elements beyond the end of a sequence come after all others in its order, whatever
// they are.
//
// A tile publishes its *aggregate*, the combination of its elements. Tiles are in groups. What
// precedes a tile is what precedes its group, combined with the aggregates of the tiles of its
// group before it, in order. The last tile of a group publishes what precedes the next group. So
// the result has the same bits whatever the order in which CTAs run, and there is one wait for each
// group, and not one for each tile. CTAs take tiles by tickets, so those before have started.
#pragma once

#include "ptx.cuh"
#include "scalar_functions.cuh"
#include "vector_loads.cuh"

namespace tilekern {

inline constexpr uint64 kPublished = uint64{1} << 32;

// A value as words. Each is published with a mark, as 64 bits that are written at once, so that
// nothing else has to be ordered.
template <typename Value>
struct ValueWords {
  static constexpr int kCount = static_cast<int>(sizeof(Value) / 4);
  uint32 words[kCount];
};

template <typename Value>
inline void publish(uint64* slots, int64 number, const Value& value) {
  const auto own = __builtin_bit_cast(ValueWords<Value>, value);
  slots += number * ValueWords<Value>::kCount;
#pragma unroll
  for (int i = 0; i < ValueWords<Value>::kCount; ++i) {
    store_relaxed(slots + i, kPublished | own.words[i]);
  }
}

// Waits until the value has been published.
template <typename Value>
inline Value awaited(const uint64* slots, int64 number) {
  ValueWords<Value> found;
  slots += number * ValueWords<Value>::kCount;
#pragma unroll
  for (int i = 0; i < ValueWords<Value>::kCount; ++i) {
    uint64 slot;
    do {
      slot = load_relaxed(slots + i);
    } while (slot < kPublished);
    found.words[i] = static_cast<uint32>(slot);
  }
  return __builtin_bit_cast(Value, found);
}

// Zeros the ticket counter and what is published.
__global__ void __launch_bounds__(256) clear_published(uint64* slots, int64 count) {
  launch_dependents();
  const int64 threads = static_cast<int64>(gridDim.x) * 256;
  for (int64 i = static_cast<int64>(blockIdx.x) * 256 + threadIdx.x; i < count; i += threads) {
    slots[i] = 0;
  }
}

// The next number of a tile; slot 0 counts them.
inline uint32 request_ticket(uint64* slots) {
  return atomicAdd(reinterpret_cast<uint32*>(slots), 1u);
}

// The number of the CTA's first tile. All threads of the CTA call it.
inline uint32 take_ticket(uint64* slots) {
  __shared__ uint32 ticket;
  wait_for_prerequisites();
  if (threadIdx.x == 0) ticket = request_ticket(slots);
  __syncthreads();
  return ticket;
}

// Where an array has a sequence, and the distance from an element to the one before in its order.
struct Row {
  int64 begin;
  int64 end;
  int64 before;

  // Whether an element precedes that at a place, the i-th of a vector.
  bool precedes(int64 place, int, int) const {
    return begin <= place + before && place + before < end;
  }
};

// The elements of a vector that begin a sequence, as bits in the order of the sequences, and the
// distance to the element before in that order.
struct RowStarts {
  uint32 bits;
  int before;

  bool precedes(int64, int i, int elements) const {
    return (bits >> (before > 0 ? elements - 1 - i : i) & 1) == 0;
  }
};

// The distance to the element before in the order of a sequence, and whether there is one.
struct Before {
  int64 step;
  bool exists;
};

// Bytes of an access to adjacent elements of kBytes.
template <int kBytes>
inline constexpr int kAccessBytes = min_of(kBytes & -kBytes, 16);

// Loads adjacent elements, the first `count` of kBytes.
template <int kBytes, typename T>
inline Bits<kBytes> load_elements(const T* from, int count) {
  constexpr int kElements = kBytes / static_cast<int>(sizeof(T));
  constexpr int kAccess = kAccessBytes<kBytes>;
  Bits<kBytes> bits = {};
  if (count == kElements) {
    if constexpr (kAccess == kBytes) return load_once<kBytes>(from);
#pragma unroll
    for (int i = 0; i < kBytes / kAccess; ++i) {
      const auto part = load_once<kAccess>(from + i * (kElements * kAccess / kBytes));
#pragma unroll
      for (int j = 0; j < kAccess / 4; ++j) bits.words[i * (kAccess / 4) + j] = part.words[j];
    }
    return bits;
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (i < count) reinterpret_cast<T*>(bits.words)[i] = from[i];
  }
  return bits;
}

// Stores elements of kParts numbers each that fill kBytes, the first `count`.
template <int kBytes, int kParts, typename T, int kNumbers>
inline void store_elements(T* to, const T (&elements)[kNumbers], int count) {
  using Access = WordOf<kAccessBytes<kBytes>>;
  if (count * kParts == kNumbers) {
#pragma unroll
    for (int i = 0; i < kBytes / kAccessBytes<kBytes>; ++i) {
      reinterpret_cast<Access*>(to)[i] = reinterpret_cast<const Access*>(elements)[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    if (i < count * kParts) to[i] = elements[i];
  }
}

// Loads for each element of a vector along sequences the one before it in its own.
template <int kBytes, typename T, class Sequence>
inline Bits<kBytes> load_before(const T* array, int64 at, int count, const Sequence& sequence) {
  constexpr int kElements = kBytes / static_cast<int>(sizeof(T));
  Bits<kBytes> bits = {};
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (i < count && sequence.precedes(at + i, i, kElements))
      reinterpret_cast<T*>(bits.words)[i] = array[at + i + sequence.before];
  }
  return bits;
}

// The same where vectors lie across sequences.
template <int kBytes, typename T>
inline Bits<kBytes> load_before(const T* array, int64 at, int, const Before& before) {
  return before.exists ? load_once<kBytes>(array + at + before.step) : Bits<kBytes>{};
}

// The value of another lane.
template <typename Value>
inline Value value_of_lane(const Value& value, int lane) {
  auto own = __builtin_bit_cast(ValueWords<Value>, value);
#pragma unroll
  for (uint32& word : own.words) word = __shfl_sync(~0u, word, lane);
  return __builtin_bit_cast(Value, own);
}
template <typename Value>
inline Value value_of_lane_before(const Value& value, uint32 step) {
  auto own = __builtin_bit_cast(ValueWords<Value>, value);
#pragma unroll
  for (uint32& word : own.words) word = __shfl_up_sync(~0u, word, step);
  return __builtin_bit_cast(Value, own);
}

// The combination of the values of this lane and those before.
template <class Scan>
inline typename Scan::Value scanned_over_lanes(typename Scan::Value value) {
#pragma unroll
  for (uint32 step = 1; step < 32; step *= 2) {
    const auto before = value_of_lane_before(value, step);
    if (threadIdx.x % 32 >= step) value = Scan::combine(before, value);
  }
  return value;
}

// What may be preceded by nothing.
template <class Scan>
struct Prefix {
  using Value = typename Scan::Value;
  Value value;
  bool is_some;

  // Combines with what comes after.
  void append(const Value& later) {
    value = is_some ? Scan::combine(value, later) : later;
    is_some = true;
  }
};

}  // namespace tilekern

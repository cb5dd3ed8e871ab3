// Vector loads of elements that a kernel reads and widens, and conversions of what it computes.
#pragma once

#include "convert.cuh"

namespace tilekern {

// The bits of a loaded vector; fewer than 4 bytes are the low bytes of a word.
template <int kBytes>
struct Bits {
  static constexpr int kWords = max_of(1, kBytes / 4);
  uint32 words[kWords];
};

// Loads data that other rows or threads read too, through L1.
template <int kBytes>
inline Bits<kBytes> load_reused(const void* address) {
  const WordOf<kBytes> word = __ldg(static_cast<const WordOf<kBytes>*>(address));
  if constexpr (kBytes < 4) {
    return {{word}};
  } else {
    return __builtin_bit_cast(Bits<kBytes>, word);
  }
}

// Loads data that is read once, bypassing L1. It is not volatile, so that the compiler can keep
// many loads in flight.
template <int kBytes>
inline Bits<kBytes> load_once(const void* address) {
  Bits<kBytes> bits;
  if constexpr (kBytes == 16) {
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(bits.words[0]), "=r"(bits.words[1]), "=r"(bits.words[2]), "=r"(bits.words[3])
        : "l"(address));
  } else if constexpr (kBytes == 8) {
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
        : "=r"(bits.words[0]), "=r"(bits.words[1])
        : "l"(address));
  } else if constexpr (kBytes == 4) {
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(bits.words[0]) : "l"(address));
  } else {
    bits = load_reused<kBytes>(address);
  }
  return bits;
}

// Converts an element from its bits to the type of the sums.
template <typename Sum, typename T>
inline Sum widened(T*, uint64 bits) {
  if constexpr (kSame<T, double>) {
    return __longlong_as_double(static_cast<int64>(bits));
  } else if constexpr (kSame<T, float>) {
    return __uint_as_float(static_cast<uint32>(bits));
  } else if constexpr (kSame<T, bfloat16> || kSame<T, float16>) {
    return to_float(T{static_cast<uint16>(bits)});
  } else {
    // Integers are summed unsigned, so that they wrap.
    return static_cast<Sum>(static_cast<T>(bits));
  }
}

// Returns element i of a vector.
template <typename T, typename Sum, int kBytes>
inline Sum element(const Bits<kBytes>& bits, int i) {
  constexpr int kSize = static_cast<int>(sizeof(T));
  constexpr T* kType = nullptr;
  if constexpr (kSize == 8) {
    return widened<Sum>(kType,
                        static_cast<uint64>(bits.words[2 * i + 1]) << 32 | bits.words[2 * i]);
  } else if constexpr (kSize == 4) {
    return widened<Sum>(kType, bits.words[i]);
  } else {
    constexpr int kPerWord = 4 / kSize;
    constexpr uint32 kMask = (1u << (8 * kSize)) - 1;
    const uint32 word = bits.words[i / kPerWord];
    return widened<Sum>(kType, word >> (8 * kSize * (i % kPerWord)) & kMask);
  }
}

// Rounds a sum to the type of the output.
template <typename Out, typename Sum>
inline Out rounded(Sum sum) {
  if constexpr (kSame<Out, bfloat16> || kSame<Out, float16>) {
    return from_float<Out>(sum);
  } else {
    return static_cast<Out>(sum);
  }
}

}  // namespace tilekern

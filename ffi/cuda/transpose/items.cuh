// Loads and stores of runs of items of any alignment, for the transpose kernels.
#pragma once

#include "transpose/shape.cuh"

namespace tilekern {

// Copies the 16-byte chunk at an aligned address to shared memory asynchronously, up to the array's
// end.
inline void copy_chunk(uint32 destination, const char* chunk, const char* end) {
  const int bytes = end - chunk < 16 ? static_cast<int>(end - chunk) : 16;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(chunk), "r"(bytes)
               : "memory");
}

// Returns an address modulo 16.
inline uint32 misalignment(const char* address) {
  return static_cast<uint32>(reinterpret_cast<uint64>(address)) & 15;
}

// Gathers four 32-bit words of items; item i is in shared memory at `position(i)`.
template <int kItemBytes, typename Position>
inline void gather(uint32 (&words)[4], const unsigned char* shared, Position position) {
  constexpr int kItems = 16 / kItemBytes;
  Item<kItemBytes> items[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    items[i] = *reinterpret_cast<const Item<kItemBytes>*>(shared + position(i));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kItemBytes == 1) {
      words[i] = permute_bytes(permute_bytes(items[4 * i], items[4 * i + 1], 0x0040),
                               permute_bytes(items[4 * i + 2], items[4 * i + 3], 0x0040), 0x5410);
    } else if constexpr (kItemBytes == 2) {
      words[i] = permute_bytes(items[2 * i], items[2 * i + 1], 0x5410);
    } else {
      words[i] = reinterpret_cast<const uint32(&)[kItemBytes / 4]>(
          items[4 * i / kItemBytes])[i % (kItemBytes / 4)];
    }
  }
}

inline void store_words(char* address, const uint32 (&words)[4]) {
  *reinterpret_cast<uint4*>(address) = {words[0], words[1], words[2], words[3]};
}

// Stores the items of the words with an index in [first, last), one by one.
template <int kItemBytes>
inline void store_some(char* address, const uint32 (&words)[4], int64 first, int64 last) {
#pragma unroll
  for (int i = 0; i < 16 / kItemBytes; ++i) {
    if (i < first || i >= last) continue;
    char* item = address + i * kItemBytes;
    if constexpr (kItemBytes < 4) {
      *reinterpret_cast<Item<kItemBytes>*>(item) =
          static_cast<Item<kItemBytes>>(words[i * kItemBytes / 4] >> (i * kItemBytes % 4 * 8));
    } else {
#pragma unroll
      for (int word = 0; word < kItemBytes / 4; ++word) {
        reinterpret_cast<uint32*>(item)[word] = words[i * kItemBytes / 4 + word];
      }
    }
  }
}

}  // namespace tilekern

// An array that is filled with copies of a word.
#pragma once

#include "types.cuh"

namespace tilekern {

inline constexpr int kFillThreads = 256;

// The first bytes of one more word follow the words.
__global__ void __launch_bounds__(kFillThreads)
    fill(uint4* out, int64 words, const __grid_constant__ uint4 word, int32 bytes) {
  const int64 threads = static_cast<int64>(gridDim.x) * kFillThreads;
  const int64 first = static_cast<int64>(blockIdx.x) * kFillThreads + threadIdx.x;
  for (int64 i = first; i < words; i += threads) out[i] = word;
  if (first < bytes) {
    reinterpret_cast<uint8*>(out + words)[first] = reinterpret_cast<const uint8*>(&word)[first];
  }
}

}  // namespace tilekern

// An array that is filled with copies of a word.
#pragma once

#include "types.cuh"

namespace tilekern {

inline constexpr int kFillThreads = 256;

template <int kBytes>
__global__ void __launch_bounds__(kFillThreads)
    fill(WordOf<kBytes>* out, int64 count, const __grid_constant__ WordOf<kBytes> word) {
  const int64 threads = static_cast<int64>(gridDim.x) * kFillThreads;
  for (int64 i = static_cast<int64>(blockIdx.x) * kFillThreads + threadIdx.x; i < count;
       i += threads) {
    out[i] = word;
  }
}

}  // namespace tilekern

// Sums over the threads of a CTA.
#pragma once

#include "types.cuh"

namespace tilekern {

// The sum of the values of the threads before this one, and of all threads.
struct BlockSum {
  uint32 before;
  uint32 total;
};

// All threads of the CTA call it.
template <int kThreads>
inline BlockSum block_sum(uint32 value) {
  __shared__ uint32 warps[kThreads / 32];
  const uint32 lane = threadIdx.x % 32;
  uint32 sum = value;
#pragma unroll
  for (uint32 step = 1; step < 32; step *= 2) {
    const uint32 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  // The array may still be read for the call before.
  __syncthreads();
  if (lane == 31) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  BlockSum result{sum - value, 0};
  for (uint32 warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < threadIdx.x / 32) result.before += warps[warp];
    result.total += warps[warp];
  }
  return result;
}

template <int kThreads>
inline uint32 sum_before(uint32 value) {
  return block_sum<kThreads>(value).before;
}

}  // namespace tilekern

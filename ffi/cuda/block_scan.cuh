// Sums over the threads of a CTA.
#pragma once

#include "types.cuh"

namespace tilekern {

// Returns the sum of the values of the threads before this one. All threads of the CTA call it.
// `warps` are kThreads / 32 words of shared memory.
template <int kThreads>
inline uint32 sum_before(uint32 value, uint32* warps) {
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
  uint32 before = sum - value;
  for (uint32 warp = 0; warp < threadIdx.x / 32; ++warp) before += warps[warp];
  return before;
}

template <int kThreads>
inline uint32 sum_before(uint32 value) {
  __shared__ uint32 warps[kThreads / 32];
  return sum_before<kThreads>(value, warps);
}

}  // namespace tilekern

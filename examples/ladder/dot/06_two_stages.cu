// A second kernel, of one block, adds up the sums of the blocks in an order that never changes, so
// the result is the same every time. The first stage is that of the warp shuffles.
//
// Expect: a second launch, of two microseconds or so, which a long vector hides.
constexpr int kThreads = 256;

__device__ float warp_sum(float sum) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    add_partial(const float* partial, float* total, int blocks) {
  __shared__ float sums[kThreads / 32];
  float sum = 0;
  for (int i = threadIdx.x; i < blocks; i += kThreads) sum += partial[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = warp_sum(threadIdx.x < kThreads / 32 ? sums[threadIdx.x] : 0);
    if (threadIdx.x == 0) *total = sum;
  }
}

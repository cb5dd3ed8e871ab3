// Warp shuffles and atomicAdd together: one barrier a block, and no trip to the host.
//
// Expect: the time of the tree with atomicAdd. The tree's barriers are a small part of a long
// vector, and its last digits change from run to run as well.
constexpr int kThreads = 256;

__device__ float warp_sum(float sum) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    dot_atomic_add(const float* x, const float* y, const float*, float* total, long long size) {
  __shared__ float sums[kThreads / 32];
  float sum = 0;
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  for (long long i = blockIdx.x * kThreads + threadIdx.x; i < size; i += step) sum += x[i] * y[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = warp_sum(threadIdx.x < kThreads / 32 ? sums[threadIdx.x] : 0);
    if (threadIdx.x == 0) atomicAdd(total, sum);
  }
}

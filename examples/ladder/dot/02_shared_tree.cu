// A block adds up its sums by a tree in shared memory: half of the threads add the other half's
// sums, then a quarter, and so on, log2(kThreads) steps with a barrier each. The sums of the blocks
// are added on the host.
//
// Expect: for a short vector faster than the serial sum, for a long one the same. The trip to the
// host stays: a copy and a wait, more than a short vector takes to read.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    dot_shared_tree(const float* x, const float* y, float* partial, long long size) {
  __shared__ float sums[kThreads];
  float sum = 0;
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  for (long long i = blockIdx.x * kThreads + threadIdx.x; i < size; i += step) sum += x[i] * y[i];
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

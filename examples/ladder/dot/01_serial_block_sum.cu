// Each thread adds up a share of the products and puts its sum in shared memory, where thread 0
// adds all of them, one after the other. A share is a thread's own element, then the one a whole
// grid further, and so on (a grid-stride loop), so that a warp always reads neighbours. The sums of
// the blocks are added on the host.
//
// Expect: for a long vector no worse than what follows, because a block sums once after thousands
// of loads. For a short one the 255 dependent additions are most of the kernel.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    dot_serial_block_sum(const float* x, const float* y, float* partial, long long size) {
  __shared__ float sums[kThreads];
  float sum = 0;
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  for (long long i = blockIdx.x * kThreads + threadIdx.x; i < size; i += step) sum += x[i] * y[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (int i = 0; i < kThreads; ++i) total += sums[i];
    partial[blockIdx.x] = total;
  }
}

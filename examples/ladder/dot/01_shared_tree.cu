// Each thread multiplies and adds a share of the vectors: its own element, then the one a whole
// grid further, and so on (a grid-stride loop), so that a warp always reads neighbours. A block
// adds up its 256 sums by a tree in shared memory: 128 threads add the other half's, then 64, and
// so on. The sums of the blocks are added on the host.
//
// Expect: the kernel comes close to the memory already. The trip to the host does not: it costs a
// copy and a wait, more than a short vector takes to read.
constexpr int kThreads = 256;

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

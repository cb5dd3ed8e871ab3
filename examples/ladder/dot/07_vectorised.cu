// Each thread loads 16 bytes at a time, and four such vectors of each operand before it adds: 128
// bytes are in flight for every thread. The four sums of a float4 are added at the end. The second
// stage is that of the rung before.
//
// Expect: the bandwidth of the memory. A GPU needs tens of kilobytes in flight on every SM to keep
// its memory busy, and wide loads get there with fewer instructions.
constexpr int kThreads = 256, kReads = 4;

__device__ float warp_sum(float sum) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    dot_vectorised(const float4* x, const float4* y, float* partial, long long size) {
  __shared__ float sums[kThreads / 32];
  float4 sum = make_float4(0, 0, 0, 0);
  const auto add = [&](float4 a, float4 b) {
    sum.x += a.x * b.x;
    sum.y += a.y * b.y;
    sum.z += a.z * b.z;
    sum.w += a.w * b.w;
  };
  const long long quads = size / 4, step = static_cast<long long>(gridDim.x) * kThreads;
  long long i = blockIdx.x * kThreads + threadIdx.x;
  for (; i + (kReads - 1) * step < quads; i += kReads * step) {
    float4 a[kReads], b[kReads];
#pragma unroll
    for (int r = 0; r < kReads; ++r) {
      a[r] = x[i + r * step];
      b[r] = y[i + r * step];
    }
#pragma unroll
    for (int r = 0; r < kReads; ++r) add(a[r], b[r]);
  }
  for (; i < quads; i += step) add(x[i], y[i]);
  // The last one to three elements are the first threads'.
  const long long rest = 4 * quads + blockIdx.x * kThreads + threadIdx.x;
  if (rest < size) {
    sum.x += reinterpret_cast<const float*>(x)[rest] * reinterpret_cast<const float*>(y)[rest];
  }
  const float own = warp_sum((sum.x + sum.y) + (sum.z + sum.w));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x < 32) {
    const float all = warp_sum(threadIdx.x < kThreads / 32 ? sums[threadIdx.x] : 0);
    if (threadIdx.x == 0) partial[blockIdx.x] = all;
  }
}

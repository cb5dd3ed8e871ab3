// The same by float4, with four loads of the matrix in flight in every thread. Rows must be whole
// float4s.
//
// Expect: the memory's bandwidth. x comes from the L1 cache, and by float4 takes a quarter of the
// load instructions, of which it needs as many as the matrix.
constexpr int kReads = 4;

__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

__global__ void vectorised(const float4* a, const float4* x, float* y, int rows, int quads) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const float4* from = a + static_cast<long long>(row) * quads;
  float sum = 0;
  int k = threadIdx.x;
  for (; k + 32 * (kReads - 1) < quads; k += 32 * kReads) {
    float4 read[kReads];
#pragma unroll
    for (int r = 0; r < kReads; ++r) read[r] = from[k + 32 * r];
#pragma unroll
    for (int r = 0; r < kReads; ++r) sum += dot(read[r], x[k + 32 * r]);
  }
  for (; k < quads; k += 32) sum += dot(from[k], x[k]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (threadIdx.x == 0) y[row] = sum;
}

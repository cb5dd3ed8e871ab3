// The same by float4, with four reads of the matrix under way in every thread. Rows must be whole
// float4s.
//
// Expect: the memory's bandwidth. x comes out of the cache, and by float4 costs a quarter of the
// instructions, which are as many as those for the matrix.
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

// A warp takes a row together, neighbours reading neighbours, and adds up its 32 sums by shuffles.
//
// Expect: close to the memory's bandwidth. Loads are coalesced, 128 bytes each, and 32 times as
// many threads have them in flight.
__global__ void row_per_warp(const float* a, const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const float* from = a + static_cast<long long>(row) * columns;
  float sum = 0;
  for (int k = threadIdx.x; k < columns; k += 32) sum += from[k] * x[k];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (threadIdx.x == 0) y[row] = sum;
}

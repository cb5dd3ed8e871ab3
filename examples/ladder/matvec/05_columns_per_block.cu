// A block of 32x32 threads takes 32 columns together: each warp goes down them in steps of 32 rows,
// and the 32 sums of each column are added in shared memory.
//
// Expect: 32 times the threads, so the memory is kept busy. The loads of a warp are coalesced as
// before.
constexpr int kWarps = 32;

__global__ void __launch_bounds__(32 * kWarps)
    columns_per_block(const float* x, const float* a, float* y, int rows, int columns) {
  __shared__ float sums[kWarps][33];  // Padded: it is read by columns.
  const int column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int k = threadIdx.y; k < rows; k += kWarps) {
      sum += x[k] * a[static_cast<long long>(k) * columns + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Now warp w has column w, and its lanes the 32 sums.
  sum = sums[threadIdx.x][threadIdx.y];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  const int own = blockIdx.x * 32 + threadIdx.y;
  if (threadIdx.x == 0 && own < columns) y[own] = sum;
}

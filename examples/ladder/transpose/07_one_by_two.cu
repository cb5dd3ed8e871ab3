// Each thread takes one row by two columns: it reads both in one instruction of 8 bytes, and writes
// them to two rows of y. No shared memory is used.
//
// A warp is 4 threads along a row by 8 down the rows. It reads 8 rows of 32 bytes, which are whole
// sectors, and writes 8 rows of 32 bytes, whole sectors again.
//
// Expect: well above the naive rungs, for a handful of instructions a thread.
__global__ void one_by_two(const float2* x, float* y, int rows, int columns) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows || 2 * pair >= columns) return;
  const float2 both = x[static_cast<long long>(row) * (columns / 2) + pair];
  float* to = y + static_cast<long long>(2 * pair) * rows + row;
  to[0] = both.x;
  to[rows] = both.y;
}

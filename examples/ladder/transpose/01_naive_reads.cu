// Each thread moves one element. The 32 threads of a warp take neighbours of one row of x, so that
// a read is one run of 128 bytes, which memory hands out as four sectors of 32 bytes.
//
// Expect: the writes of the warp go to 32 rows of y, one sector each, of which 4 bytes are used.
// Reads are as good as they get and writes are eight times what they should be.
__global__ void naive_reads(const float* x, float* y, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= rows || column >= columns) return;
  y[static_cast<long long>(column) * rows + row] =
      x[static_cast<long long>(row) * columns + column];
}

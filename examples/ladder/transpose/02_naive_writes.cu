// The same, turned around: the threads of a warp take neighbours of one row of y, so that writes
// are runs of 128 bytes and reads are 32 sectors.
//
// Expect: faster than the first. A sector that was read is in the cache when the next column's
// threads want it, while a sector that was written in parts has to be put together again.
__global__ void naive_writes(const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= rows || column >= columns) return;
  y[static_cast<long long>(column) * rows + row] =
      x[static_cast<long long>(row) * columns + column];
}

// Each thread takes a row of the matrix and goes along it.
//
// Expect: the threads of a warp are in 32 rows at once, so every read is 32 sectors of which 4
// bytes are used at a time. The cache keeps the sectors only as long as there is room for all.
__global__ void row_per_thread(const float* a, const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const float* from = a + static_cast<long long>(row) * columns;
  float sum = 0;
  for (int k = 0; k < columns; ++k) sum += from[k] * x[k];
  y[row] = sum;
}

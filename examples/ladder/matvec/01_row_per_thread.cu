// Each thread takes a row of the matrix and goes along it.
//
// Expect: the lanes of a warp are in 32 rows at once, so each load request touches 32 sectors and
// uses 4 bytes of each. The L1 cache keeps the sectors for the next loads only while there is room
// for all of them.
__global__ void row_per_thread(const float* a, const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const float* from = a + static_cast<long long>(row) * columns;
  float sum = 0;
  for (int k = 0; k < columns; ++k) sum += from[k] * x[k];
  y[row] = sum;
}

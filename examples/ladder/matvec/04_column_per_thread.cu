// The transposed order, x @ a: now each thread takes a column and goes down it. Loads are coalesced
// without any effort, and no sum has to be shared.
//
// Expect: still far from the memory's bandwidth. A matrix has only so many columns, and as many
// threads do not have enough loads in flight.
__global__ void column_per_thread(const float* x, const float* a, float* y, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float sum = 0;
  for (int k = 0; k < rows; ++k) sum += x[k] * a[static_cast<long long>(k) * columns + column];
  y[column] = sum;
}

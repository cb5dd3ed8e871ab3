// The transposed order, x @ a: now each thread takes a column and goes down it. Neighbours read
// neighbours without any effort, and no sum has to be shared.
//
// Expect: whole runs of 128 bytes, and still far from the memory's bandwidth: a matrix has only so
// many columns, and as many threads do not have enough under way.
__global__ void column_per_thread(const float* x, const float* a, float* y, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float sum = 0;
  for (int k = 0; k < rows; ++k) sum += x[k] * a[static_cast<long long>(k) * columns + column];
  y[column] = sum;
}

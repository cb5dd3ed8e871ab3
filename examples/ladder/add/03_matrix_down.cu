// A grid of two dimensions over a matrix, the wrong way round: the lanes of a warp take one column,
// so that what they load and store lies a row apart.
//
// Expect: a sector of 32 bytes for every 4. The caches repair a part of it, since the block's other
// warps take the columns beside.
__global__ void matrix_down(const float* x, const float* y, float* out, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= rows || column >= columns) return;
  const long long i = static_cast<long long>(row) * columns + column;
  out[i] = x[i] + y[i];
}

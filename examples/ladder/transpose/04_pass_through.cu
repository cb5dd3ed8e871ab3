// Shared memory used only to pass through: each thread writes its element of a tile there and reads
// the same element back, so accesses to global memory are those of the naive rung of this shape.
//
// Expect: no better than without. Shared memory is not fast by being touched: it pays only where a
// thread takes out what another one has put in, which is the next rung's idea. Lane i accesses bank
// i, so there are no bank conflicts at any shape whose rows a warp covers whole.
template <int kWidth, int kHeight>
__global__ void __launch_bounds__(kWidth* kHeight)
    pass_through(const float* x, float* y, int rows, int columns) {
  // Volatile, or the compiler would see that the trip is for nothing and leave it out.
  __shared__ volatile float tile[kHeight][kWidth];
  const int column = blockIdx.x * kWidth + threadIdx.x;
  const int row = blockIdx.y * kHeight + threadIdx.y;
  const bool inside = row < rows && column < columns;
  if (inside) {
    tile[threadIdx.y][threadIdx.x] = x[static_cast<long long>(row) * columns + column];
  }
  __syncthreads();
  if (inside) {
    y[static_cast<long long>(column) * rows + row] = tile[threadIdx.y][threadIdx.x];
  }
}

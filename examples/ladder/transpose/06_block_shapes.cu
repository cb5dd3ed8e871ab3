// The shape of the tile: a block of kWidth x kHeight threads moves a tile of as many elements, one
// for each thread. A row that is read is kWidth elements long, and a row that is written kHeight;
// for the second half the threads are dealt out anew, kHeight to a row of y. Where the tile is not
// square it is stored as it was read, and the index is swapped on the way out.
//
// Expect: 32x32 has rows of 128 bytes both ways, but 1024 threads wait for each other. 64x8 reads
// 256 bytes at once and writes single sectors of 32. 8x8 has whole sectors both ways, but blocks of
// 64 threads, of which a GPU has to start very many. 8x4 writes half sectors.
template <int kWidth, int kHeight>
__global__ void __launch_bounds__(kWidth* kHeight)
    block_shape(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[kHeight][kWidth + 1];
  const int first_row = blockIdx.y * kHeight, first_column = blockIdx.x * kWidth;
  const int thread = threadIdx.x;
  {
    const int i = thread / kWidth, j = thread % kWidth;
    const int row = first_row + i, column = first_column + j;
    if (row < rows && column < columns) {
      tile[i][j] = x[static_cast<long long>(row) * columns + column];
    }
  }
  __syncthreads();
  {
    const int i = thread % kHeight, j = thread / kHeight;
    const int row = first_row + i, column = first_column + j;
    if (row < rows && column < columns) {
      y[static_cast<long long>(column) * rows + row] = tile[i][j];
    }
  }
}

// A single thread moves the whole matrix.
//
// Expect: the GPU at its worst, thousands of times slower than the rungs below. One thread has a
// few loads in flight, and each takes hundreds of cycles.
__global__ void serial(const float* x, float* y, int rows, int columns) {
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      y[static_cast<long long>(column) * rows + row] =
          x[static_cast<long long>(row) * columns + column];
    }
  }
}

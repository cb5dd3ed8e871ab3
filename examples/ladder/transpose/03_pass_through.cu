// Shared memory used only as something to pass through: each thread writes its element there and
// reads the same element back.
//
// Expect: no better than the first. Shared memory is not fast by being touched. It pays only where
// a thread takes out what another one has put in, which is the next rung's idea.
constexpr int kTile = 32;

__global__ void pass_through(const float* x, float* y, int rows, int columns) {
  // Volatile, or the compiler would see that the trip is for nothing and leave it out.
  __shared__ volatile float tile[kTile][kTile];
  const int column = blockIdx.x * kTile + threadIdx.x;
#pragma unroll
  for (int i = threadIdx.y; i < kTile; i += 8) {
    const int row = blockIdx.y * kTile + i;
    if (row < rows && column < columns) {
      tile[i][threadIdx.x] = x[static_cast<long long>(row) * columns + column];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.y; i < kTile; i += 8) {
    const int row = blockIdx.y * kTile + i;
    if (row < rows && column < columns) {
      y[static_cast<long long>(column) * rows + row] = tile[i][threadIdx.x];
    }
  }
}

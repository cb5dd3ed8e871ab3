// A block brings a tile of 32x32 to shared memory by rows, and takes it out by columns: now both
// the reads and the writes of a warp are runs of 128 bytes. Each thread moves four elements, so
// that four reads are under way at once.
//
// Expect: far faster. What is left over is the tile's columns: their 32 elements are 128 bytes
// apart, all in one of the 32 banks of shared memory, which gives them out one after the other.
constexpr int kTile = 32;

__global__ void tile(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[kTile][kTile];
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
#pragma unroll
  for (int i = threadIdx.y; i < kTile; i += 8) {
    const int row = first_row + i, column = first_column + threadIdx.x;
    if (row < rows && column < columns) {
      tile[i][threadIdx.x] = x[static_cast<long long>(row) * columns + column];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.y; i < kTile; i += 8) {
    const int row = first_row + threadIdx.x, column = first_column + i;
    if (row < rows && column < columns) {
      y[static_cast<long long>(column) * rows + row] = tile[threadIdx.x][i];
    }
  }
}

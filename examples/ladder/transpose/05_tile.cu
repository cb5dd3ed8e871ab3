// A block loads a tile of 32x32 into shared memory by rows and stores it by columns, so that both
// the reads and the writes of a warp are coalesced: 128 bytes each. With kThreadRows of 8 each
// thread has four loads in flight; with 32 it moves one element, and all 1024 threads of the block
// wait for each other.
//
// The layout of the tile decides about bank conflicts. In a plain tile the 32 elements of a column
// are 128 bytes apart, all in one of the 32 banks, which serves them one after the other. Padded by
// one element, a step down a column moves one bank on. Swizzled, row i stores its element j at
// j ^ i, so that a column and a row each take every bank once, and rows stay whole 128 bytes, as
// wide loads and TMA want them.
//
// Expect: plain, far faster than the naive rungs, with 31 conflicts per request for loads. Padded
// and swizzled, no conflicts and the memory's bandwidth, the swizzle for a few instructions more.
constexpr int kTile = 32;

struct Plain {
  static constexpr int kPitch = kTile;
  __device__ static int position(int, int column) { return column; }
};
struct Padded {
  static constexpr int kPitch = kTile + 1;
  __device__ static int position(int, int column) { return column; }
};
struct Swizzled {
  static constexpr int kPitch = kTile;
  __device__ static int position(int row, int column) { return column ^ row; }
};

template <class Layout, int kThreadRows>
__global__ void __launch_bounds__(kTile* kThreadRows)
    tile(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[kTile][Layout::kPitch];
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
#pragma unroll
  for (int step = 0; step < kTile; step += kThreadRows) {
    const int i = threadIdx.y + step;
    const int row = first_row + i, column = first_column + threadIdx.x;
    if (row < rows && column < columns) {
      tile[i][Layout::position(i, threadIdx.x)] = x[static_cast<long long>(row) * columns + column];
    }
  }
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kTile; step += kThreadRows) {
    const int i = threadIdx.y + step;
    const int row = first_row + threadIdx.x, column = first_column + i;
    if (row < rows && column < columns) {
      y[static_cast<long long>(column) * rows + row] =
          tile[threadIdx.x][Layout::position(threadIdx.x, i)];
    }
  }
}

// Each thread computes 4x4 elements: it takes four numbers of a and four of b from shared memory
// and multiplies each with each, 16 multiply-adds for 8 reads.
//
// Expect: several times the rung before. The tile of a lies in shared memory with k outermost, so
// that both operands are read along rows.
constexpr int kTile = 64, kDepth = 16, kEach = 4;
constexpr int kSide = kTile / kEach;  // Threads along a side of the tile.

template <typename T>
__global__ void __launch_bounds__(kSide* kSide)
    register_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
  __shared__ T a_tile[kDepth][kTile + 1], b_tile[kDepth][kTile];
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const int thread = threadIdx.x, x = thread % kSide, y = thread / kSide;
  T sums[kEach][kEach] = {};
  for (int first = 0; first < k; first += kDepth) {
#pragma unroll
    for (int start = 0; start < kTile * kDepth; start += kSide * kSide) {
      const int piece = start + thread;
      const int row = first_row + piece / kDepth, column = first + piece % kDepth;
      a_tile[piece % kDepth][piece / kDepth] =
          row < m && column < k ? a[static_cast<long long>(row) * k + column] : T(0);
    }
#pragma unroll
    for (int start = 0; start < kTile * kDepth; start += kSide * kSide) {
      const int piece = start + thread;
      const int row = first + piece / kTile, column = first_column + piece % kTile;
      b_tile[piece / kTile][piece % kTile] =
          row < k && column < n ? b[static_cast<long long>(row) * n + column] : T(0);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      T of_a[kEach], of_b[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        // A thread's elements are kSide apart, so that neighbours read neighbours.
        of_a[e] = a_tile[i][y + e * kSide];
        of_b[e] = b_tile[i][x + e * kSide];
      }
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int s = 0; s < kEach; ++s) sums[r][s] += of_a[r] * of_b[s];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      const int row = first_row + y + r * kSide, column = first_column + x + s * kSide;
      if (row < m && column < n) c[static_cast<long long>(row) * n + column] = sums[r][s];
    }
  }
}

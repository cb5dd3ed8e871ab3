// Everything moves in vectors of 16 bytes, and the next tile is loaded while this one is
// multiplied: into registers before the products, and into the second of two buffers after them, so
// that one barrier a tile is enough.
//
// A thread computes 8x8 elements of float32 (4x4 of float64) as four squares of a piece's width, a
// half tile apart, so that neighbours read neighbouring pieces.
//
// Expect: most of what multiply-adds without tensor cores can do.
constexpr int kThreads = 256, kDepth = 8;

template <typename T>
struct alignas(16) Piece {
  T values[16 / sizeof(T)];
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    double_buffered(const T* a, const T* b, T* c, int m, int n, int k) {
  constexpr int kPiece = 16 / sizeof(T), kTile = 32 * kPiece, kEach = 2 * kPiece;
  __shared__ alignas(16) T a_tiles[2][kDepth][kTile], b_tiles[2][kDepth][kTile];
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const int thread = threadIdx.x, x = thread % 16 * kPiece, y = thread / 16 * kPiece;

  // What this thread brings of each tile: one piece of a along k, one of b along its row.
  const int a_row = thread / (kDepth / kPiece), a_k = thread % (kDepth / kPiece) * kPiece;
  const int b_k = thread / 32, b_column = thread % 32 * kPiece;
  const bool in_a = first_row + a_row < m, in_b = first_column + b_column < n;
  const T* from_a = a + static_cast<long long>(first_row + a_row) * k + a_k;
  const T* from_b = b + static_cast<long long>(b_k) * n + first_column + b_column;

  Piece<T> next_a, next_b;
  const auto read = [&](int first) {
    next_a = next_b = {};
    if (in_a && first + a_k < k) next_a = *reinterpret_cast<const Piece<T>*>(from_a + first);
    if (in_b && first + b_k < k) {
      next_b = *reinterpret_cast<const Piece<T>*>(from_b + static_cast<long long>(first) * n);
    }
  };
  const auto put = [&](int buffer) {
#pragma unroll
    for (int e = 0; e < kPiece; ++e) a_tiles[buffer][a_k + e][a_row] = next_a.values[e];
    reinterpret_cast<Piece<T>&>(b_tiles[buffer][b_k][b_column]) = next_b;
  };

  T sums[kEach][kEach] = {};
  int buffer = 0;
  read(0);
  put(0);
  __syncthreads();
  for (int first = 0; first < k; first += kDepth) {
    read(first + kDepth);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      Piece<T> of_a[2], of_b[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int shift = half * kTile / 2;
        of_a[half] = reinterpret_cast<const Piece<T>&>(a_tiles[buffer][i][y + shift]);
        of_b[half] = reinterpret_cast<const Piece<T>&>(b_tiles[buffer][i][x + shift]);
      }
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int s = 0; s < kEach; ++s) {
          sums[r][s] += of_a[r / kPiece].values[r % kPiece] * of_b[s / kPiece].values[s % kPiece];
        }
      }
    }
    buffer ^= 1;
    put(buffer);
    __syncthreads();
  }

#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int row = first_row + y + r / kPiece * (kTile / 2) + r % kPiece;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = first_column + x + half * (kTile / 2);
      if (row >= m || column >= n) continue;
      Piece<T> piece;
#pragma unroll
      for (int e = 0; e < kPiece; ++e) piece.values[e] = sums[r][half * kPiece + e];
      *reinterpret_cast<Piece<T>*>(c + static_cast<long long>(row) * n + column) = piece;
    }
  }
}

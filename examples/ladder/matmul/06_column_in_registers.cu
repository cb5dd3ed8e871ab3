// Only a goes through shared memory. Each thread owns one column of c's tile, and has its part of
// the column of b in registers, where it needs no exchange: neighbours read neighbours of b
// straight from memory. All threads want the same element of a at the same time, which shared
// memory gives to a whole warp at once, 16 bytes in one read.
//
// Expect: half of what goes through shared memory is gone, and with it most of the barriers' cost.
// Each thread reads all of the tile of a, though: one read of 16 bytes for four multiply-adds.
constexpr int kColumns = 128, kDepth = 8;

template <typename T>
constexpr int kRows = 256 / sizeof(T);  // As many sums as fit the registers.

template <typename T>
struct alignas(16) Piece {
  T values[16 / sizeof(T)];
};

template <typename T>
__global__ void __launch_bounds__(kColumns)
    column_in_registers(const T* a, const T* b, T* c, int m, int n, int k) {
  constexpr int kPiece = 16 / sizeof(T);
  __shared__ alignas(16) T a_tile[kDepth][kRows<T>];
  const int first_row = blockIdx.y * kRows<T>, column = blockIdx.x * kColumns + threadIdx.x;
  T sums[kRows<T>] = {};
  for (int first = 0; first < k; first += kDepth) {
#pragma unroll
    for (int start = 0; start < kRows<T> * kDepth; start += kColumns) {
      const int piece = start + threadIdx.x;
      const int row = first_row + piece / kDepth, i = first + piece % kDepth;
      a_tile[piece % kDepth][piece / kDepth] =
          row < m && i < k ? a[static_cast<long long>(row) * k + i] : T(0);
    }
    T of_b[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const bool inside = first + i < k && column < n;
      of_b[i] = inside ? b[static_cast<long long>(first + i) * n + column] : T(0);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
#pragma unroll
      for (int r = 0; r < kRows<T>; r += kPiece) {
        const auto of_a = reinterpret_cast<const Piece<T>&>(a_tile[i][r]);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) sums[r + e] += of_a.values[e] * of_b[i];
      }
    }
    __syncthreads();
  }
  if (column >= n) return;
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    if (first_row + r < m) c[static_cast<long long>(first_row + r) * n + column] = sums[r];
  }
}

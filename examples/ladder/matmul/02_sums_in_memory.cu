// A block brings tiles of 32x32 of both operands to shared memory, and each thread adds its sum
// over the tile to its element of c in global memory: `c[i] += sum`.
//
// The `+=` reads c before anything has been written there. If nobody has cleared it, the result is
// the product plus whatever the memory held, which on a fresh allocation is often zero, so that the
// bug is not seen. Here c is an input of zeros whose buffer the output takes.
//
// Expect: right only thanks to the zeros, and slower than with the sum in a register, since every
// k-tile reads and writes all of c.
constexpr int kTile = 32;

template <typename T>
__global__ void __launch_bounds__(kTile* kTile)
    sums_in_memory(const T* a, const T* b, const T*, T* c, int m, int n, int k) {
  __shared__ T a_tile[kTile][kTile], b_tile[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, column = blockIdx.x * kTile + x;
  for (int first = 0; first < k; first += kTile) {
    const bool in_a = row < m && first + x < k, in_b = first + y < k && column < n;
    a_tile[y][x] = in_a ? a[static_cast<long long>(row) * k + first + x] : T(0);
    b_tile[y][x] = in_b ? b[static_cast<long long>(first + y) * n + column] : T(0);
    __syncthreads();
    T sum = 0;
#pragma unroll
    for (int i = 0; i < kTile; ++i) sum += a_tile[y][i] * b_tile[i][x];
    if (row < m && column < n) c[static_cast<long long>(row) * n + column] += sum;
    __syncthreads();
  }
}

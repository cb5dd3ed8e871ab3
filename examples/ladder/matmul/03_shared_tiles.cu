// A block of 32x32 threads brings tiles of 32x32 of both operands to shared memory, and each
// element that was brought is used 32 times.
//
// Expect: a step up, not the goal. Memory has 32 times less to do, but each multiply-add still
// reads two numbers, now from shared memory, which gives out 32 in a cycle where 128 could be
// multiplied.
constexpr int kTile = 32;

template <typename T>
__global__ void __launch_bounds__(kTile* kTile)
    shared_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
  __shared__ T a_tile[kTile][kTile], b_tile[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, column = blockIdx.x * kTile + x;
  T sum = 0;
  for (int first = 0; first < k; first += kTile) {
    // Zeros beyond the edges add nothing.
    const bool in_a = row < m && first + x < k, in_b = first + y < k && column < n;
    a_tile[y][x] = in_a ? a[static_cast<long long>(row) * k + first + x] : T(0);
    b_tile[y][x] = in_b ? b[static_cast<long long>(first + y) * n + column] : T(0);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile; ++i) sum += a_tile[y][i] * b_tile[i][x];
    __syncthreads();
  }
  if (row < m && column < n) c[static_cast<long long>(row) * n + column] = sum;
}

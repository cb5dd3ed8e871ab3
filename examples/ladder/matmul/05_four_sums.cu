// The shape that a paper on a GPU of 2008 computes float64 with: a tile of 64 rows by 32 columns,
// 512 threads with four accumulators each, and 16 of k at a time. A thread's accumulators are in
// one column, 16 rows apart, so it reads four numbers of a and one of b for four multiply-adds.
//
// Expect: 21 multiply-adds for each element that is loaded, by the formula 1 / (1/w + 1/h), and a
// share of the peak that shared memory limits: five loads for four multiply-adds.
constexpr int kRows = 64, kColumns = 32, kDepth = 16, kThreads = 512, kSums = 4;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    four_sums(const T* a, const T* b, T* c, int m, int n, int k) {
  __shared__ T a_tile[kRows][kDepth], b_tile[kDepth][kColumns];
  const int first_row = blockIdx.y * kRows, first_column = blockIdx.x * kColumns;
  const int thread = threadIdx.x, x = thread % kColumns, y = thread / kColumns;
  T sums[kSums] = {};
  for (int first = 0; first < k; first += kDepth) {
#pragma unroll
    for (int start = 0; start < kRows * kDepth; start += kThreads) {
      const int i = start + thread;
      const int row = first_row + i / kDepth, column = first + i % kDepth;
      a_tile[i / kDepth][i % kDepth] =
          row < m && column < k ? a[static_cast<long long>(row) * k + column] : T(0);
    }
    const int row = first + y, column = first_column + x;
    b_tile[y][x] = row < k && column < n ? b[static_cast<long long>(row) * n + column] : T(0);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s] += a_tile[y + s * 16][i] * b_tile[i][x];
    }
    __syncthreads();
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const int row = first_row + y + s * 16, column = first_column + x;
    if (row < m && column < n) c[static_cast<long long>(row) * n + column] = sums[s];
  }
}

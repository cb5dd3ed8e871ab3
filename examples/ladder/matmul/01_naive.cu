// Each thread computes one element of c, and reads its row of a and its column of b from memory.
//
// Expect: a tenth of the arithmetic or less. Each multiply-add takes two loads; neighbours in a
// warp share the element of a and read neighbours of b, so the caches serve what memory could not.
template <typename T>
__global__ void naive(const T* a, const T* b, T* c, int m, int n, int k) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= m || column >= n) return;
  T sum = 0;
  for (int i = 0; i < k; ++i) {
    sum += a[static_cast<long long>(row) * k + i] * b[static_cast<long long>(i) * n + column];
  }
  c[static_cast<long long>(row) * n + column] = sum;
}

// Each thread takes two rows by two columns and exchanges the middle pair in registers, so that
// both its reads and its writes are instructions of 8 bytes.
//
// Expect: half the instructions for an element. The warp, 4 threads by 8, writes runs of 64 bytes.
__global__ void two_by_two(const float2* x, float2* y, int rows, int columns) {
  const int row_pair = blockIdx.y * blockDim.y + threadIdx.y;
  const int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (2 * row_pair >= rows || 2 * pair >= columns) return;
  const float2* from = x + static_cast<long long>(2 * row_pair) * (columns / 2) + pair;
  const float2 upper = from[0], lower = from[columns / 2];
  float2* to = y + static_cast<long long>(2 * pair) * (rows / 2) + row_pair;
  to[0] = make_float2(upper.x, lower.x);
  to[rows / 2] = make_float2(upper.y, lower.y);
}

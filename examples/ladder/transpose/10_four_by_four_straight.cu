// Each thread makes a tile of 4x4. The four elements of a row of y are read one by one, and the
// float4 of them is written straight away: 16 reads of 4 bytes, 4 writes of 16.
//
// Expect: less than it looks. As far as the compiler knows y may overlap x, so no read may move up
// past a write before it, and a thread waits for memory four times.
__global__ void four_by_four_straight(const float* x, float4* y, int rows, int columns) {
  const int row = 4 * (blockIdx.y * blockDim.y + threadIdx.y);
  const int column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows || column >= columns) return;
  const long long pitch = columns;
  const float* from = x + row * pitch + column;
  float4* to = y + (static_cast<long long>(column) * rows + row) / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    to[j * static_cast<long long>(rows / 4)] =
        make_float4(from[j], from[pitch + j], from[2 * pitch + j], from[3 * pitch + j]);
  }
}

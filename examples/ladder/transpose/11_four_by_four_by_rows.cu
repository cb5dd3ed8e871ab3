// The other way around: a row of x is gathered as one float4 and written at once, as one element
// to each of four rows of y: 4 reads of 16 bytes, 16 writes of 4.
//
// Expect: whether it beats the rung before tells which is dearer, narrow reads or narrow writes. It
// waits four times as well: each row is read only when the one before has been written.
__global__ void four_by_four_by_rows(const float4* x, float* y, int rows, int columns) {
  const int row = 4 * (blockIdx.y * blockDim.y + threadIdx.y);
  const int column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows || column >= columns) return;
  const float4* from = x + (static_cast<long long>(row) * columns + column) / 4;
  const long long pitch = rows;
  float* to = y + column * pitch + row;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 gathered = from[i * static_cast<long long>(columns / 4)];
    to[i] = gathered.x;
    to[pitch + i] = gathered.y;
    to[2 * pitch + i] = gathered.z;
    to[3 * pitch + i] = gathered.w;
  }
}

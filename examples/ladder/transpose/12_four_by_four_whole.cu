// The whole tile of 4x4 is gathered before anything is written: 4 reads of 16 bytes, all under way
// at once, then 4 writes of 16. The transpose itself is which register is named where.
//
// Expect: the fastest without shared memory. A thread waits once for 64 bytes. The warp, 4 threads
// by 8, reads 16 runs of 64 bytes and writes 16 runs of 128.
__global__ void four_by_four_whole(const float4* x, float4* y, int rows, int columns) {
  const int row = 4 * (blockIdx.y * blockDim.y + threadIdx.y);
  const int column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows || column >= columns) return;
  const float4* from = x + (static_cast<long long>(row) * columns + column) / 4;
  const long long pitch = columns / 4;
  const float4 a = from[0], b = from[pitch], c = from[2 * pitch], d = from[3 * pitch];
  float4* to = y + (static_cast<long long>(column) * rows + row) / 4;
  const long long to_pitch = rows / 4;
  to[0] = make_float4(a.x, b.x, c.x, d.x);
  to[to_pitch] = make_float4(a.y, b.y, c.y, d.y);
  to[2 * to_pitch] = make_float4(a.z, b.z, c.z, d.z);
  to[3 * to_pitch] = make_float4(a.w, b.w, c.w, d.w);
}

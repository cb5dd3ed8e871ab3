// Each thread adds one element of two vectors.
//
// Expect: most of the memory's bandwidth. There is nothing to keep and nothing to share: the time
// is that of two reads and a write.
__global__ void vector(const float* x, const float* y, float* out, long long size) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < size) out[i] = x[i] + y[i];
}

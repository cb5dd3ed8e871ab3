// Each thread transposes a square of kWidth x kWidth elements in registers, and moves it by
// vectors: float2 for 2x2, float4 for 4x4. No shared memory is used.
//
// Three ways to write it. kStraight reads the elements of a row of y one by one, through pointers,
// and stores the vector at once. As far as the compiler knows y may overlap x, so no load moves up
// past a store, and a thread waits for memory kWidth times. kRowByRow loads all vectors first, then
// forms and stores a row at a time. kRowsFirst forms all rows before it stores any: the same
// registers under other names, so the same machine code.
//
// Expect: float4 by kRowByRow and kRowsFirst is the fastest without shared memory, because a thread
// has 64 bytes in flight, and kStraight is slower. Blocks of 4x64 threads write runs of 256 bytes.
enum Form { kStraight, kRowByRow, kRowsFirst };

template <int kWidth>
struct alignas(4 * kWidth) Vector {
  float at[kWidth];
};

template <int kWidth, Form kForm>
__global__ void vectors(const float* x, float* y, int rows, int columns) {
  const int row = kWidth * (blockIdx.y * blockDim.y + threadIdx.y);
  const int column = kWidth * (blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows || column >= columns) return;
  using Row = Vector<kWidth>;
  const float* from = x + static_cast<long long>(row) * columns + column;
  float* to = y + static_cast<long long>(column) * rows + row;
  const auto load = [&](int i) {
    return *reinterpret_cast<const Row*>(from + static_cast<long long>(i) * columns);
  };
  const auto store = [&](int j, const Row& values) {
    *reinterpret_cast<Row*>(to + static_cast<long long>(j) * rows) = values;
  };

  if constexpr (kForm == kStraight) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      Row out;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out.at[i] = from[static_cast<long long>(i) * columns + j];
      store(j, out);
    }
  } else {
    Row in[kWidth], out[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) in[i] = load(i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out[j].at[i] = in[i].at[j];
      if constexpr (kForm == kRowByRow) store(j, out[j]);
    }
    if constexpr (kForm == kRowsFirst) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) store(j, out[j]);
    }
  }
}

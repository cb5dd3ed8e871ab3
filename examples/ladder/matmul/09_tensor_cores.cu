// The products are the tensor cores': one instruction of a warp multiplies 16 rows by 8 columns
// over 8 of k. Tiles come by cp.async, which needs no registers on the way, into three stages: two
// k-tiles are in flight while one is multiplied.
//
// Expect: for float64 up to twice the rate of the CUDA cores. For float32 the operands are rounded
// to TF32, which has 10 bits after the point, and the rate is several times that of float32.
#include <tilekern/mma.cuh>
#include <tilekern/ptx.cuh>

using namespace tilekern;

constexpr int kThreads = 256, kStages = 3, kDepth = 16;

inline uint32 operand(float value) { return round_to_tf32(__float_as_uint(value)); }
inline double operand(double value) { return value; }

template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T first, second;
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    tensor_cores(const T* a, const T* b, T* c, int m, int n, int k) {
  constexpr int kPiece = 16 / sizeof(T), kTile = 32 * kPiece;
  // Eight warps, two by four, have a part of the tile each.
  constexpr int kWarpRows = kTile / 2, kWarpColumns = kTile / 4;
  // Rows of the tiles are padded so that the lanes of a warp find what they take in all banks.
  constexpr int kAPitch = kDepth + 4, kBPitch = kTile + 2 * kPiece;
  constexpr int kStage = kTile * kAPitch + kDepth * kBPitch;
  extern __shared__ int4 shared[];  // Aligned to 16 bytes, as cp.async writes.
  T* const stages = reinterpret_cast<T*>(shared);

  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const auto bring = [&](int stage, int first) {
    T* const a_tile = stages + stage * kStage;
    T* const b_tile = a_tile + kTile * kAPitch;
#pragma unroll
    for (int start = 0; start < kTile * kDepth / kPiece; start += kThreads) {
      const int piece = start + threadIdx.x;
      const int row = piece / (kDepth / kPiece), i = piece % (kDepth / kPiece) * kPiece;
      const bool inside = first_row + row < m && first + i < k;
      cp_async<16>(shared_address(a_tile + row * kAPitch + i),
                   a + static_cast<long long>(first_row + row) * k + first + i, inside);
    }
#pragma unroll
    for (int start = 0; start < kTile * kDepth / kPiece; start += kThreads) {
      const int piece = start + threadIdx.x;
      const int i = piece / 32, column = piece % 32 * kPiece;
      const bool inside = first + i < k && first_column + column < n;
      cp_async<16>(shared_address(b_tile + i * kBPitch + column),
                   b + static_cast<long long>(first + i) * n + first_column + column, inside);
    }
  };

  // Lane 4 * g + t has row or column g of an operand, and of k the elements t and 4 + t.
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int warp_row = warp / 4 * kWarpRows, warp_column = warp % 4 * kWarpColumns;
  T sums[kWarpRows / 16][kWarpColumns / 8][4] = {};
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    bring(stage, stage * kDepth);
    cp_async_commit();
  }
  int stage = 0;
  for (int first = 0; first < k; first += kDepth) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    bring((stage + kStages - 1) % kStages, first + (kStages - 1) * kDepth);
    cp_async_commit();

    const T* const a_tile = stages + stage * kStage;
    const T* const b_tile = a_tile + kTile * kAPitch;
#pragma unroll
    for (int step = 0; step < kDepth; step += 8) {
      using Operand = decltype(operand(T()));
      Operand of_b[kWarpColumns / 8][2];
#pragma unroll
      for (int j = 0; j < kWarpColumns / 8; ++j) {
        const T* from = b_tile + (step + t) * kBPitch + warp_column + 8 * j + g;
        of_b[j][0] = operand(from[0]);
        of_b[j][1] = operand(from[4 * kBPitch]);
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        const T* from = a_tile + (warp_row + 16 * i + g) * kAPitch + step + t;
        const Operand low[2] = {operand(from[0]), operand(from[4])};
        const Operand high[2] = {operand(from[8 * kAPitch]), operand(from[8 * kAPitch + 4])};
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) Mma<T, T>::run(sums[i][j], low, high, of_b[j]);
      }
    }
    stage = (stage + 1) % kStages;
  }
  cp_async_wait<0>();

#pragma unroll
  for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpColumns / 8; ++j) {
      const int column = first_column + warp_column + 8 * j + 2 * t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + warp_row + 16 * i + 8 * half + g;
        if (row >= m || column >= n) continue;
        *reinterpret_cast<Pair<T>*>(c + static_cast<long long>(row) * n + column) = {
            sums[i][j][2 * half], sums[i][j][2 * half + 1]};
      }
    }
  }
}

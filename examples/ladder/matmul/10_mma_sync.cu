// bfloat16 on the tensor cores, with the instructions of the GPU before Hopper: tiles come by
// cp.async into three stages, a warp reads them by ldmatrix, and mma.sync multiplies 16x16 by 16x8.
// Sums are float32 and are rounded once, at the end.
//
// Expect: well above TF32, and at best two thirds of what Hopper's tensor cores can do: mma.sync
// takes its operands from registers, and all of them have to be read from shared memory first.
#include <tilekern/mma.cuh>
#include <tilekern/ptx.cuh>

using namespace tilekern;

constexpr int kThreads = 256, kStages = 3, kTile = 128, kDepth = 64;
// Eight warps, two by four, have a part of the tile each.
constexpr int kWarpRows = kTile / 2, kWarpColumns = kTile / 4;
// Rows are padded by 16 bytes, so that the eight rows of a matrix lie in different banks.
constexpr int kAPitch = kDepth + 8, kBPitch = kTile + 8;
constexpr int kStage = kTile * kAPitch + kDepth * kBPitch;

__global__ void __launch_bounds__(kThreads, 2)
    mma_sync(const bfloat16* a, const bfloat16* b, bfloat16* c, int m, int n, int k) {
  extern __shared__ int4 shared[];
  bfloat16* const stages = reinterpret_cast<bfloat16*>(shared);
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  // What this thread copies of a k-tile: 16 bytes of every 32nd row of a, and of every 16th of b.
  const int a_row = threadIdx.x / 8, a_column = threadIdx.x % 8 * 8;
  const int b_row = threadIdx.x / 16, b_column = threadIdx.x % 16 * 8;
  const bfloat16* const from_a = a + static_cast<long long>(first_row + a_row) * k + a_column;
  const bfloat16* const from_b = b + static_cast<long long>(b_row) * n + first_column + b_column;
  const auto bring = [&](int stage, int first) {
    bfloat16* const a_tile = stages + stage * kStage;
    bfloat16* const b_tile = a_tile + kTile * kAPitch;
#pragma unroll
    for (int row = 0; row < kTile; row += 32) {
      cp_async<16>(shared_address(a_tile + (a_row + row) * kAPitch + a_column),
                   from_a + static_cast<long long>(row) * k + first,
                   first_row + a_row + row < m && first + a_column < k);
    }
#pragma unroll
    for (int row = 0; row < kDepth; row += 16) {
      cp_async<16>(shared_address(b_tile + (b_row + row) * kBPitch + b_column),
                   from_b + static_cast<long long>(first + row) * n,
                   first + b_row + row < k && first_column + b_column < n);
    }
  };

  // Lane 8 * i + r addresses row r of matrix i: for a two of rows by two of k, for b, which is read
  // transposed, two of k by two of columns.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / 4 * kWarpRows, warp_column = warp % 4 * kWarpColumns;
  const int down = lane / 8 % 2 * 8 + lane % 8, along = lane / 16 * 8;
  float sums[kWarpRows / 16][kWarpColumns / 8][4] = {};
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
    const uint32 a_tile = shared_address(stages + stage * kStage);
    const uint32 b_tile = a_tile + kTile * kAPitch * 2;
#pragma unroll
    for (int step = 0; step < kDepth; step += 16) {
      uint32 of_b[kWarpColumns / 16][4];
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j) {
        const int at = (step + down) * kBPitch + warp_column + 16 * j + along;
        ldmatrix_trans(of_b[j], b_tile + at * 2);
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        uint32 of_a[4];
        ldmatrix(of_a, a_tile + ((warp_row + 16 * i + down) * kAPitch + step + along) * 2);
        const uint32 low[2] = {of_a[0], of_a[2]}, high[2] = {of_a[1], of_a[3]};
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) {
          const uint32 rhs[2] = {of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]};
          Mma<bfloat16, bfloat16>::run(sums[i][j], low, high, rhs);
        }
      }
    }
    stage = (stage + 1) % kStages;
  }
  cp_async_wait<0>();

#pragma unroll
  for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpColumns / 8; ++j) {
      const int column = first_column + warp_column + 8 * j + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + warp_row + 16 * i + 8 * half + lane / 4;
        if (row >= m || column >= n) continue;
        uint32 pair[1];
        pack_pair(pair, c, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
        *reinterpret_cast<uint32*>(c + static_cast<long long>(row) * n + column) = pair[0];
      }
    }
  }
}

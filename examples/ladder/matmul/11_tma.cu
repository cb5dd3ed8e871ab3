// The tensor memory accelerator (TMA) brings the tiles. One thread requests a k-tile with a few
// instructions, an mbarrier counts the bytes as they arrive, and the other threads spend nothing on
// addresses, edges or copies. Rows are 128 bytes in shared memory, unpadded: TMA swizzles them, its
// 16-byte chunk p of row r at p ^ (r % 8), so that ldmatrix finds eight rows in different banks.
//
// Expect: a little above cp.async. The loop has fewer instructions to issue, and mma.sync still
// reads all of its operands through registers.
#include <tilekern/mbarrier.cuh>
#include <tilekern/mma.cuh>
#include <tilekern/ptx.cuh>
#include <tilekern/tma.cuh>

using namespace tilekern;

constexpr int kThreads = 256, kStages = 3, kTile = 128, kDepth = 64;
constexpr int kWarpRows = kTile / 2, kWarpColumns = kTile / 4;
// A tile of a has a row of 64 of k for each row; one of b has for each 64 columns a row for each k.
constexpr int kRowBytes = 128, kABytes = kTile * kRowBytes, kPanelBytes = kDepth * kRowBytes;
constexpr int kStageBytes = kABytes + kTile / 64 * kPanelBytes;

__global__ void __launch_bounds__(kThreads, 2)
    tma(const bfloat16*, const bfloat16*, bfloat16* c, const __grid_constant__ TensorMap a,
        const __grid_constant__ TensorMap b, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 stages = shared_address(shared), full = stages + kStages * kStageBytes;
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const int k_tiles = (k + kDepth - 1) / kDepth;
  const auto request = [&](int tile) {
    const uint32 to = stages + tile % kStages * kStageBytes;
    const uint32 barrier = full + tile % kStages * kBarrierBytes;
    mbarrier_arrive_expect_tx(barrier, kStageBytes);
    tma_load(to, a, {tile * kDepth, first_row, 0, 0, 0}, barrier);
    for (int panel = 0; panel < kTile / 64; ++panel) {
      tma_load(to + kABytes + panel * kPanelBytes, b,
               {first_column + 64 * panel, tile * kDepth, 0, 0, 0}, barrier);
    }
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(full + stage * kBarrierBytes, 1);
    fence_barrier_init();
    for (int tile = 0; tile < kStages && tile < k_tiles; ++tile) request(tile);
  }
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / 4 * kWarpRows, warp_column = warp % 4 * kWarpColumns;
  const int down = lane / 8 % 2 * 8 + lane % 8, along = lane / 16 * 8;
  // The address of the matrix row that this lane gives; rows are multiples of 8 apart but for it.
  const auto swizzled = [&](int row, int column) {
    return row * kRowBytes + (column * 2 ^ lane % 8 * 16);
  };
  float sums[kWarpRows / 16][kWarpColumns / 8][4] = {};
  PipelineState<kStages> ring;
  for (int tile = 0; tile < k_tiles; ++tile) {
    mbarrier_wait(full + ring.stage * kBarrierBytes, ring.parity);
    __syncthreads();  // All warps have read the k-tile before, whose stage is free now.
    const int next = tile - 1 + kStages;
    if (threadIdx.x == 0 && tile > 0 && next < k_tiles) request(next);
    const uint32 a_tile = stages + ring.stage * kStageBytes, b_tile = a_tile + kABytes;
#pragma unroll
    for (int step = 0; step < kDepth; step += 16) {
      uint32 of_b[kWarpColumns / 16][4];
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j) {
        const int column = warp_column + 16 * j + along;
        const uint32 panel = b_tile + column / 64 * kPanelBytes;
        ldmatrix_trans(of_b[j], panel + swizzled(step + down, column % 64));
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        uint32 of_a[4];
        ldmatrix(of_a, a_tile + swizzled(warp_row + 16 * i + down, step + along));
        const uint32 low[2] = {of_a[0], of_a[2]}, high[2] = {of_a[1], of_a[3]};
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) {
          const uint32 rhs[2] = {of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]};
          Mma<bfloat16, bfloat16>::run(sums[i][j], low, high, rhs);
        }
      }
    }
    ring.advance();
  }

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

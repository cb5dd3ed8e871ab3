// Ping-pong: each consumer has a tile of its own, 128x192, and they alternate. While one stores
// its tile, the other's MMAs keep the tensor cores busy. An ordered barrier passes the turn:
//
//   consumer 0 | MMAs of tile 0 | store 0        | MMAs of tile 2 | ...
//   consumer 1 |                | MMAs of tile 1 | store 1        | ...
//
// A wait for a stage is told a parity, which distinguishes only neighbouring rounds of the ring. A
// consumer skips the other's stages, so it must not wait for its own before the turn is its.
//
// Expect: a few per cent, more where k is short: the stores are hidden behind MMAs.
#include <tilekern/mbarrier.cuh>
#include <tilekern/ptx.cuh>
#include <tilekern/rasterization.cuh>
#include <tilekern/tma.cuh>
#include <tilekern/wgmma.cuh>

using namespace tilekern;

constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128, kGroup = 16;
constexpr int kStages = 4, kRows = 128, kColumns = 192, kDepth = 64;
constexpr int kRowBytes = 128, kABytes = kRows * kRowBytes, kPanelBytes = kDepth * kRowBytes;
constexpr int kStageBytes = kABytes + kColumns / 64 * kPanelBytes;
using Types = WgmmaTypes<bfloat16, bfloat16>;
using Flags = SignsAndOrders<true, false>;

__global__ void __launch_bounds__(kThreads, 1)
    ping_pong(const bfloat16*, const bfloat16*, bfloat16* c, const __grid_constant__ TensorMap a,
              const __grid_constant__ TensorMap b, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 stages = shared_address(shared), full = stages + kStages * kStageBytes;
  const uint32 empty = full + kStages * kBarrierBytes, turns = empty + kStages * kBarrierBytes;
  const int k_tiles = (k + kDepth - 1) / kDepth;
  const int tiles_m = (m + kRows - 1) / kRows, tiles_n = (n + kColumns - 1) / kColumns;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage * kBarrierBytes, 1);
      mbarrier_init(empty + stage * kBarrierBytes, 1);  // One consumer reads a stage.
    }
    for (int i = 0; i < kConsumers; ++i) mbarrier_init(turns + i * kBarrierBytes, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  PipelineState<kStages> ring;

  if (warpgroup == kConsumers) {
    warpgroup_reg_dealloc<24>();
    if (threadIdx.x % 128 != 0) return;
    for (int index = blockIdx.x; index < tiles_m * tiles_n; index += gridDim.x) {
      const TileCoordinates out = rasterized_tile(index, tiles_m, tiles_n, kGroup);
      for (int tile = 0; tile < k_tiles; ++tile) {
        const uint32 to = stages + ring.stage * kStageBytes;
        const uint32 barrier = full + ring.stage * kBarrierBytes;
        mbarrier_wait(empty + ring.stage * kBarrierBytes, ring.parity ^ 1);
        mbarrier_arrive_expect_tx(barrier, kStageBytes);
        tma_load(to, a, {tile * kDepth, out.m * kRows, 0, 0, 0}, barrier);
#pragma unroll 1
        for (int panel = 0; panel < kColumns / 64; ++panel) {
          tma_load(to + kABytes + panel * kPanelBytes, b,
                   {out.n * kColumns + 64 * panel, tile * kDepth, 0, 0, 0}, barrier);
        }
        ring.advance();
      }
    }
  } else {
    warpgroup_reg_alloc<240>();
    float sums[kRows / 64][kColumns / 2];
    const bool leader = threadIdx.x % 128 == 0;
    const int lane = threadIdx.x % 32;
    // The first turn of consumer 0 is nobody's to pass on.
    uint32 turn_parity = warpgroup == 0;
    ring.skip(warpgroup * k_tiles);
    for (int index = blockIdx.x + warpgroup * gridDim.x; index < tiles_m * tiles_n;
         index += kConsumers * gridDim.x) {
      mbarrier_wait(turns + warpgroup * kBarrierBytes, turn_parity);
      turn_parity ^= 1;
      int previous = 0;
      for (int tile = 0; tile < k_tiles; ++tile) {
        const uint32 a_tile = stages + ring.stage * kStageBytes;
        mbarrier_wait(full + ring.stage * kBarrierBytes, ring.parity);
        const uint64 lhs = matrix_descriptor(a_tile, 0);
        const uint64 rhs = matrix_descriptor(a_tile + kABytes, kPanelBytes);
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kDepth / 16; ++step) {
#pragma unroll
          for (int i = 0; i < kRows / 64; ++i) {
            multiply<Types, Flags>(
                sums[i], lhs + (i * 64 * kRowBytes + step * 32) / kDescriptorUnit,
                rhs + step * 16 * kRowBytes / kDescriptorUnit, tile > 0 || step > 0);
          }
        }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        if (tile > 0 && leader) mbarrier_arrive(empty + previous * kBarrierBytes);
        previous = ring.stage;
        ring.advance();
      }
      // All stages of this tile have come in: the turn is the other's.
      if (leader) mbarrier_arrive(turns + (warpgroup ^ 1) * kBarrierBytes);
      ring.skip(k_tiles);
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums[0]);
      warpgroup_fence_operand(sums[1]);
      if (leader) mbarrier_arrive(empty + previous * kBarrierBytes);

      const TileCoordinates out = rasterized_tile(index, tiles_m, tiles_n, kGroup);
#pragma unroll
      for (int i = 0; i < 2 * kRows / 64; ++i) {
        const int row =
            out.m * kRows + i / 2 * 64 + threadIdx.x / 32 % 4 * 16 + i % 2 * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          const int column = out.n * kColumns + 8 * j + lane % 4 * 2;
          if (row >= m || column >= n) continue;
          uint32 pair[1];
          pack_pair(pair, c, sums[i / 2][4 * j + i % 2 * 2], sums[i / 2][4 * j + i % 2 * 2 + 1]);
          *reinterpret_cast<uint32*>(c + static_cast<long long>(row) * n + column) = pair[0];
        }
      }
    }
  }
}

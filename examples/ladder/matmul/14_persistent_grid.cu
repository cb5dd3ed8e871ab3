// The grid is persistent: one block for each SM, which computes tile after tile. While
// the consumers store one, the producer already fills the ring for the next, and no block has to be
// started, nor barriers made, for it. Tiles are taken in groups of kGroup rows of tiles, so that
// blocks that run at the same time share rows of a and columns of b in the L2 cache.
//
// Expect: a few per cent, more where k is short: the loads of a tile's first stages are hidden, and
// less has to come from memory.
#include <tilekern/mbarrier.cuh>
#include <tilekern/ptx.cuh>
#include <tilekern/rasterization.cuh>
#include <tilekern/tma.cuh>
#include <tilekern/wgmma.cuh>

using namespace tilekern;

constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128, kGroup = 16;
constexpr int kStages = 4, kRows = 128, kColumns = 256, kDepth = 64;
constexpr int kRowBytes = 128, kABytes = kRows * kRowBytes, kPanelBytes = kDepth * kRowBytes;
constexpr int kStageBytes = kABytes + kColumns / 64 * kPanelBytes;
using Types = WgmmaTypes<bfloat16, bfloat16>;
using Flags = SignsAndOrders<true, false>;

__global__ void __launch_bounds__(kThreads, 1)
    persistent_grid(const bfloat16*, const bfloat16*, bfloat16* c,
                    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int m,
                    int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 stages = shared_address(shared), full = stages + kStages * kStageBytes;
  const uint32 empty = full + kStages * kBarrierBytes;
  const int k_tiles = (k + kDepth - 1) / kDepth;
  const int tiles_m = (m + kRows - 1) / kRows, tiles_n = (n + kColumns - 1) / kColumns;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage * kBarrierBytes, 1);
      mbarrier_init(empty + stage * kBarrierBytes, kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  // Producer and consumers walk through the same tiles, and the ring goes on from one to the next.
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
    float sums[kColumns / 2];
    const int lane = threadIdx.x % 32;
    for (int index = blockIdx.x; index < tiles_m * tiles_n; index += gridDim.x) {
      const TileCoordinates out = rasterized_tile(index, tiles_m, tiles_n, kGroup);
      int previous = 0;
      for (int tile = 0; tile < k_tiles; ++tile) {
        const uint32 a_tile = stages + ring.stage * kStageBytes;
        mbarrier_wait(full + ring.stage * kBarrierBytes, ring.parity);
        const uint64 lhs = matrix_descriptor(a_tile + warpgroup * 64 * kRowBytes, 0);
        const uint64 rhs = matrix_descriptor(a_tile + kABytes, kPanelBytes);
        warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kDepth / 16; ++step) {
          multiply<Types, Flags>(sums, lhs + step * 32 / kDescriptorUnit,
                                 rhs + step * 16 * kRowBytes / kDescriptorUnit,
                                 tile > 0 || step > 0);
        }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        if (tile > 0 && threadIdx.x % 128 == 0) mbarrier_arrive(empty + previous * kBarrierBytes);
        previous = ring.stage;
        ring.advance();
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      if (threadIdx.x % 128 == 0) mbarrier_arrive(empty + previous * kBarrierBytes);

      const int row = out.m * kRows + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int column = out.n * kColumns + 8 * j + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row + 8 * half >= m || column >= n) continue;
          uint32 pair[1];
          pack_pair(pair, c, sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
          *reinterpret_cast<uint32*>(c + static_cast<long long>(row + 8 * half) * n + column) =
              pair[0];
        }
      }
    }
  }
}

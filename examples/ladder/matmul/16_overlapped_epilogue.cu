// The results leave by TMA, in the background: a consumer rounds 64 rows by 64 columns, puts them
// in shared memory by stmatrix, in the swizzle that TMA takes, and goes on. TMA writes whole rows
// of 128 bytes and clips them at the edges. Each consumer has two such subtiles, so that one is
// filled while the other is read. From registers, a warp's store was 8 rows of 16 bytes: half
// sectors.
//
// Expect: the library's kernel but for its choice of tiles: half as many sectors to write, and a
// consumer is back at its MMAs before its tile has left.
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
constexpr int kSubtiles = 2, kSubtileBytes = 64 * kRowBytes;
using Types = WgmmaTypes<bfloat16, bfloat16>;
using Flags = SignsAndOrders<true, false>;

// A barrier of one consumer's 128 threads.
__device__ void sync_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
}

__global__ void __launch_bounds__(kThreads, 1)
    overlapped_epilogue(const bfloat16*, const bfloat16*, bfloat16*,
                        const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                        const __grid_constant__ TensorMap c, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 stages = shared_address(shared), subtiles = stages + kStages * kStageBytes;
  const uint32 full = subtiles + kConsumers * kSubtiles * kSubtileBytes;
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

      // Lane 8 * i + r gives row r of matrix i, of two of rows by two of columns of a warp's 16
      // rows.
      const int lane = threadIdx.x % 32;
      const int lane_row = threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8 + lane % 8;
      const int lane_offset = lane_row * kRowBytes + (lane / 16 ^ lane % 8) * 16;
      const TileCoordinates out = rasterized_tile(index, tiles_m, tiles_n, kGroup);
#pragma unroll
      for (int i = 0; i < kRows / 64 * (kColumns / 64); ++i) {
        const int row = i / (kColumns / 64) * 64, column = i % (kColumns / 64) * 64;
        const uint32 subtile = subtiles + (warpgroup * kSubtiles + i % kSubtiles) * kSubtileBytes;
        if (leader) tma_store_wait_read<kSubtiles - 1>();  // TMA has read what was here.
        sync_warpgroup(warpgroup);
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 16 columns at a time.
          const float* of = &sums[row / 64][column / 2 + 8 * j];
          uint32 words[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            pack_pair(reinterpret_cast<uint32(&)[1]>(words[w]), static_cast<bfloat16*>(nullptr),
                      of[2 * w], of[2 * w + 1]);
          }
          stmatrix(subtile + (lane_offset ^ j * 32), words);
        }
        fence_async_proxy();  // What threads have written becomes visible to TMA.
        sync_warpgroup(warpgroup);
        if (leader) {
          tma_store(c, {out.n * kColumns + column, out.m * kRows + row, 0, 0, 0}, subtile);
          tma_store_commit();
        }
      }
    }
    if (leader) tma_store_wait_read<0>();  // Shared memory must last until TMA has read it.
  }
}

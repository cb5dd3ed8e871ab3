// The products are Hopper's: wgmma is an instruction of a warpgroup, four warps, that multiplies 64
// rows by 256 columns over 16 of k and reads both operands straight from shared memory. It runs in
// the background. A descriptor tells it where a tile lies and how TMA swizzled it; a step along k
// is an addition to the descriptor.
//
// Two warpgroups have 64 rows each of a tile of 128x256, with 128 accumulators a thread.
//
// Expect: about twice mma.sync. No ldmatrix, no operands in registers, and a tile twice as large.
#include <tilekern/mbarrier.cuh>
#include <tilekern/ptx.cuh>
#include <tilekern/tma.cuh>
#include <tilekern/wgmma.cuh>

using namespace tilekern;

constexpr int kThreads = 256, kStages = 4, kRows = 128, kColumns = 256, kDepth = 64;
constexpr int kRowBytes = 128, kABytes = kRows * kRowBytes, kPanelBytes = kDepth * kRowBytes;
constexpr int kStageBytes = kABytes + kColumns / 64 * kPanelBytes;
using Types = WgmmaTypes<bfloat16, bfloat16>;
using Flags = SignsAndOrders<true, false>;  // a has its unit stride along k, and b has not.

__global__ void __launch_bounds__(kThreads, 1)
    wgmma(const bfloat16*, const bfloat16*, bfloat16* c, const __grid_constant__ TensorMap a,
          const __grid_constant__ TensorMap b, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32 stages = shared_address(shared), full = stages + kStages * kStageBytes;
  const int first_row = blockIdx.y * kRows, first_column = blockIdx.x * kColumns;
  const int k_tiles = (k + kDepth - 1) / kDepth;
  const auto request = [&](int tile) {
    const uint32 to = stages + tile % kStages * kStageBytes;
    const uint32 barrier = full + tile % kStages * kBarrierBytes;
    mbarrier_arrive_expect_tx(barrier, kStageBytes);
    tma_load(to, a, {tile * kDepth, first_row, 0, 0, 0}, barrier);
    for (int panel = 0; panel < kColumns / 64; ++panel) {
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

  const int warpgroup_row = threadIdx.x / 128 * 64;
  float sums[kColumns / 2];
  PipelineState<kStages> ring;
  for (int tile = 0; tile < k_tiles; ++tile) {
    const uint32 a_tile = stages + ring.stage * kStageBytes;
    mbarrier_wait(full + ring.stage * kBarrierBytes, ring.parity);
    const uint64 lhs = matrix_descriptor(a_tile + warpgroup_row * kRowBytes, 0);
    const uint64 rhs = matrix_descriptor(a_tile + kABytes, kPanelBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      // A step is 32 bytes of a row of a, and 16 rows of b. The first overwrites the sums.
      multiply<Types, Flags>(sums, lhs + step * 32 / kDescriptorUnit,
                             rhs + step * 16 * kRowBytes / kDescriptorUnit, tile > 0 || step > 0);
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();  // The MMAs of the k-tile before have retired,
    __syncthreads();     // and those of the other warpgroup too, so its stage is free.
    const int next = tile - 1 + kStages;
    if (threadIdx.x == 0 && tile > 0 && next < k_tiles) request(next);
    ring.advance();
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums);

  // Lane 4 * g + t has rows g and 8 + g of its warp's 16, in columns 2t and 2t + 1 of each eight.
  const int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int column = first_column + 8 * j + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= m || column >= n) continue;
      uint32 pair[1];
      pack_pair(pair, c, sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
      *reinterpret_cast<uint32*>(c + static_cast<long long>(row + 8 * half) * n + column) = pair[0];
    }
  }
}

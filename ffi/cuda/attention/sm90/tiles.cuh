// What the kernels of attention share on Hopper: tiles in shared memory, and their products.
//
// Arrays are (batch, length, heads, features). A tile has `rows` positions of a sequence by
// kFeatures features, in chunks of 64 features with TMA's 128-byte swizzle. The same tile is an
// operand whose contracted dimension is the features (k-major) or the positions (MN-major).
#pragma once

#include "attention/scores.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace tilekern {

inline constexpr int kChunkFeatures = 64;
inline constexpr int kRowBytes = 128;

template <int kRows, int kFeatures>
struct SequenceTile {
  static_assert(kFeatures % kChunkFeatures == 0);
  static constexpr int kChunks = kFeatures / kChunkFeatures;
  static constexpr int kChunkBytes = kRows * kRowBytes;
  static constexpr int kBytes = kChunks * kChunkBytes;

  // Features beyond the array's, and positions beyond the sequence, become zeros.
  static void load(uint32 to, const TensorMap& map, int position, int head, int batch,
                   uint32 barrier, int feature = 0) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      tma_load(to + chunk * kChunkBytes, map,
               {{feature + chunk * kChunkFeatures, position, head, batch, 0}}, barrier);
    }
  }

  // The descriptor of the rows from `row` on, a multiple of 8, and the offset of an MMA step of 16
  // features.
  static uint64 k_major(uint32 tile, int row) {
    return matrix_descriptor(tile + row * kRowBytes, kChunkBytes);
  }
  static constexpr uint64 feature_step(int step) {
    return (step / 4 * kChunkBytes + step % 4 * 32) / kDescriptorUnit;
  }

  // The descriptor with the positions contracted, and the offset of an MMA step of 16 positions.
  static uint64 mn_major(uint32 tile) { return matrix_descriptor(tile, kChunkBytes); }
  static constexpr uint64 position_step(int step) {
    return step * 16 * kRowBytes / kDescriptorUnit;
  }
};

// Issues sums = lhs rhs^T over the features of both, or adds it, as part of the current batch:
// `sums` has 64 rows of `lhs` by the rows of the tile `rhs`.
template <typename T, class Lhs, class Rhs, int kFeatures, int kCount>
inline void multiply_by_features(float (&sums)[kCount], uint32 lhs, int row, uint32 rhs,
                                 bool adds = false) {
  const uint64 left = Lhs::k_major(lhs, row), right = Rhs::k_major(rhs, 0);
#pragma unroll
  for (int step = 0; step < kFeatures / 16; ++step) {
    multiply<WgmmaTypes<T, T>, SignsAndOrders<true, true>>(
        sums, left + Lhs::feature_step(step), right + Rhs::feature_step(step), adds || step > 0);
  }
}

// Issues sums += weights rhs over the positions of the tile `rhs`.
template <typename T, class Rhs, int kCount, int kSteps>
inline void multiply_by_positions(float (&sums)[kCount], const uint32 (&weights)[kSteps][4],
                                  uint32 rhs) {
  const uint64 right = Rhs::mn_major(rhs);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    multiply<WgmmaTypes<T, T>, SignsAndOrders<true, false>>(sums, weights[step],
                                                            right + Rhs::position_step(step), 1);
  }
}

// A ring of stages in shared memory, each with a full and an empty barrier.
template <int kStages, int kStageBytes>
struct TileRing {
  using State = PipelineState<kStages>;
  static constexpr int kBarriersBytes = 2 * kStages * kBarrierBytes;

  uint32 stages, barriers;

  // One thread fills stages; `readers` release them.
  void init(int readers) const {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full(i), 1);
      mbarrier_init(full(i) + kBarrierBytes, readers);
    }
  }

  uint32 stage(const State& state) const { return stages + state.stage * kStageBytes; }
  uint32 full(int stage) const { return barriers + 2 * stage * kBarrierBytes; }
  uint32 full(const State& state) const { return full(state.stage); }

  // Waits until the stage is free, and expects its bytes.
  void acquire(const State& state, int bytes) const {
    mbarrier_wait(full(state) + kBarrierBytes, state.parity ^ 1);
    mbarrier_arrive_expect_tx(full(state), bytes);
  }
  void wait(const State& state) const { mbarrier_wait(full(state), state.parity); }
  // Called by all threads of a reader.
  void release(const State& state) const {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(full(state) + kBarrierBytes);
  }
};

}  // namespace tilekern

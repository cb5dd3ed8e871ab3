// The MMA policy of operands with a scale for each block.
#pragma once

#include "gemm/sm90/mma_policy.cuh"
#include "gemm/sm90/pipeline.cuh"
#include "ptx.cuh"
#include "tma.cuh"

namespace tilekern {

// Where the scales of an operand lie: strides in elements, 0 along what a scale is constant over.
// `plans/gemm/sm90/scaled.py` packs the same fields in the same order.
struct ScaleStrides {
  int64 batch[kMaxTmaBatchDims];
  // Strides of blocks of rows, and of k-tiles.
  int64 row;
  int64 k;
  // Rows of a block are 1 << block_log2.
  int32 block_log2;
  int32 padding;
};

struct ScaleParams {
  const float* lhs;
  const float* rhs;
  const ScaleStrides& lhs_strides;
  const ScaleStrides& rhs_strides;
  const WgmmaShape& shape;
};

inline const float* first_scale(const float* scales, const ScaleStrides& strides,
                                const int (&batch)[kMaxTmaBatchDims], int k_tile) {
#pragma unroll
  for (int dim = 0; dim < kMaxTmaBatchDims; ++dim) scales += batch[dim] * strides.batch[dim];
  return scales + k_tile * strides.k;
}

// Adds (scale of lhs * scale of rhs) * accumulators of each k-tile to the result, in float32
// arithmetic of the CUDA cores. A k-tile is multiplied by row blocks, whose MMAs have the same
// registers one after the other: while a consumer promotes a row block, the other one multiplies.
//
// A tile has one scale of rhs for a k-tile, or with kScaledColumns one for each column, adjacent in
// memory.
//
// Scales of rows are loaded while the MMAs of the k-tile before run: a load from L2 takes longer
// than the MMAs of a row block. There are two sets of them, because registers are named. Scales of
// columns are too many for registers: the producer copies them to the stage, and threads read a few
// at a time. Two copies of the loop's body would then spill, so there is one set of rows' scales,
// which a k-tile copies before it loads the next ones.
template <class Lhs, class Rhs, WgmmaConfig config, bool kScaledColumns>
class ScaledMma {
  using LhsTile = OperandTile<typename Lhs::Shared, true, config.block_m, config.block_k>;
  using RhsTile = OperandTile<typename Rhs::Shared, true, config.block_n, config.block_k>;
  using Types = WgmmaTypes<typename Lhs::Mma, typename Rhs::Mma>;
  static constexpr int kRowBlocks = config.consumer_m() / 64;
  static constexpr int kCount = config.block_n / 2;
  static_assert(config.lhs_k_major && config.rhs_k_major && config.parts == 1);
  static_assert(!config.pair && !config.lhs_pair);
  static_assert(config.block_k == 128, "the k of a scale is that of a k-tile");
  static_assert(config.consumer_m() % 64 == 0);
  // A quad of lanes has these rows. Each lane loads the scale of one of them.
  static constexpr int kQuadRows = 2 * kRowBlocks;
  static_assert(kQuadRows <= 4);
  // A thread has two adjacent columns of each 8, and reads the scales of so many pairs at a time.
  static constexpr int kColumnPairs = config.block_n / 8;
  static constexpr int kPairsAtOnce = min_of(4, kColumnPairs);

 public:
  using Accumulator = typename Types::Accumulator;
  using Coordinates = WgmmaCoordinates<false>;
  using Params = ScaleParams;
  static constexpr int kStageBytes = LhsTile::kBytes + RhsTile::kBytes;
  static constexpr int kScaleBytes = kScaledColumns ? config.block_n * 4 : 0;
  static constexpr bool kInPlace = false;
  static constexpr int kFragmentSets = kScaledColumns ? 1 : 2;
  static constexpr bool kRetireEachTile = true;
  // A consumer of a tile of 256x128 has 128 registers of results and 64 of accumulators.
  static constexpr bool kResultsMayWait = kRowBlocks == 1;

  ScaledMma(const Params& params, int row, int warp_row)
      : params_(params), warp_row_(warp_row), row_offset_(LhsTile::mn_offset(row)) {}

  // The array has scales up to a multiple of 4 columns.
  static int loaded_bytes(const Params& params, const WorkTile& work) {
    return min_of(config.block_n, (params.shape.n - work.n + 3) / 4 * 4) * 4;
  }
  static void load_scales(uint32 to, const Params& params, const WorkTile& work, int k_tile,
                          uint32 full) {
    const float* first = first_scale(params.rhs, params.rhs_strides, work.rhs_batch,
                                     work.k / config.block_k + k_tile);
    bulk_load(to, first + work.n, loaded_bytes(params, work), full);
  }

  Accumulator (&result()) [kRowBlocks][kCount] { return promoted_; }

  Coordinates coordinates(int i, const WorkTile& work, const WgmmaShape& shape,
                          const int& column_end, bool is_group) const {
    return {work, shape, warp_row_ + 64 * i, column_end, is_group};
  }

  void clear() {
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) promoted_[i][j] = 0;
    }
  }

  template <class Scheduler>
  void start(const Scheduler& scheduler) {
    const WorkTile work = scheduler.work_tile();
    const int lane = threadIdx.x % 32, k_tile = work.k / config.block_k;
    const ScaleStrides &of_lhs = params_.lhs_strides, &of_rhs = params_.rhs_strides;
    const int of_quad = lane % 4 % kQuadRows;
    const int row = work.m + warp_row_ + 64 * (of_quad / 2) +
                    Coordinates::Layout::row_of(lane / 4, of_quad % 2);
    lhs_ = first_scale(params_.lhs, of_lhs, work.lhs_batch, k_tile) +
           (min_of(row, params_.shape.m - 1) >> of_lhs.block_log2) * of_lhs.row;
    if constexpr (!kScaledColumns) {
      rhs_ = first_scale(params_.rhs, of_rhs, work.rhs_batch, k_tile);
    }
    if constexpr (!kScaledColumns) {
      rhs_ += (work.n >> of_rhs.block_log2) * of_rhs.row;
      // Not provably uniform: ptxas would move the scale to a uniform register, and wait for it.
      rhs_ += params_.shape.m < 0 ? lane : 0;
    }
    k_tiles_ = scheduler.k_tiles();
    if (k_tiles_ > 0) load_scales<0>();
  }

  template <int kSet>
  void load(uint32) {
    const float own = row_scale_[kSet] * all_columns_scale_[kSet];
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scales_[i][half] = __shfl_sync(~0u, own, 2 * i + half, 4);
    }
    // The last k-tile's are loaded again: a branch would wait for what it loads.
    const bool is_last = --k_tiles_ == 0;
    lhs_ += is_last ? 0 : params_.lhs_strides.k;
    if constexpr (!kScaledColumns) rhs_ += is_last ? 0 : params_.rhs_strides.k;
    load_scales<kFragmentSets - 1 - kSet>();
  }

  template <int, int kColumns>
  void issue(uint32 stage, int) {
    issue_row_block<kColumns>(stage, 0);
  }

  void retire(uint32 stage, uint32 scales) {
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      float columns[kPairsAtOnce][2];
      if constexpr (kScaledColumns) load_columns(columns, scales, 0);
      warpgroup_wait<0>();
      warpgroup_fence_operand(accumulators_);
      promote(i, columns, scales);
      if (i + 1 < kRowBlocks) issue_row_block<config.block_n>(stage, i + 1);
    }
    // The stage is released next, when all threads have read its scales.
    if constexpr (kScaledColumns) sync_consumer(1 + threadIdx.x / 128);
  }

 private:
  // Loads the scale of this lane's row of its quad, and the one of all columns.
  template <int kSet>
  void load_scales() {
    all_columns_scale_[kSet] = kScaledColumns ? 1 : load_global(rhs_);
    row_scale_[kSet] = load_global(lhs_);
  }

  template <int kColumns>
  void issue_row_block(uint32 stage, int i) {
    warpgroup_arrive();
    const uint64 lhs = LhsTile::descriptor(stage + row_offset_);
    const uint64 rhs = RhsTile::descriptor(stage + LhsTile::kBytes);
    auto& accumulators = reinterpret_cast<Accumulator(&)[kColumns / 2]>(accumulators_);
#pragma unroll
    for (int step = 0; step < kMmaStepsPerTile; ++step) {
      multiply<Types, Signs>(accumulators, lhs + LhsTile::offset(64 * i, step),
                             rhs + RhsTile::offset(0, step), step > 0);
    }
    warpgroup_commit_batch();
  }

  // Loads the scales of the thread's columns, from pair `first` on.
  void load_columns(float (&columns)[kPairsAtOnce][2], uint32 scales, int first) {
#pragma unroll
    for (int j = 0; j < kPairsAtOnce; ++j) {
      load_shared(columns[j], scales + threadIdx.x % 4 * 8 + 32 * (first + j));
    }
  }

  // `columns` has the scales of the first columns.
  void promote(int i, float (&columns)[kPairsAtOnce][2], uint32 scales) {
    if constexpr (kScaledColumns) {
#pragma unroll
      for (int first = 0; first < kColumnPairs; first += kPairsAtOnce) {
        if (first > 0) load_columns(columns, scales, first);
#pragma unroll
        for (int j = 0; j < kPairsAtOnce; ++j) promote_pair(i, first + j, columns[j]);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = scales_[i][half];
#pragma unroll
        for (int j = 0; j < kColumnPairs; ++j) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int at = 4 * j + 2 * half + k;
            promoted_[i][at] += accumulators_[at] * scale;
          }
        }
      }
    }
  }

  // Products of accumulators and one scale would take registers of their own.
  void promote_pair(int i, int pair, const float (&columns)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int at = 4 * pair + 2 * half + k;
        promoted_[i][at] += accumulators_[at] * (scales_[i][half] * columns[k]);
      }
    }
  }

  const Params& params_;
  int warp_row_;
  int row_offset_;
  // How many k-tiles have not been multiplied.
  int k_tiles_;
  // The scales of the k-tile that was loaded last.
  const float* lhs_;
  const float* rhs_;
  float row_scale_[2];
  float all_columns_scale_[2];
  float scales_[kRowBlocks][2];
  Accumulator accumulators_[kCount];
  Accumulator promoted_[kRowBlocks][kCount];
};

}  // namespace tilekern

// The MMA policy of operands with a scale for each block.
#pragma once

#include "gemm/sm90/mma_policy.cuh"
#include "ptx.cuh"

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
// A tile has one scale of rhs for a k-tile if kScaledColumns is 0. Otherwise it has one for each
// column, adjacent in memory, of which kScaledColumns are loaded at a time: pairs are aligned.
//
// Scales of rows are loaded while the MMAs of the k-tile before run: a load from L2 takes longer
// than the MMAs of a row block. There are two sets of them, because registers are named. Those of
// columns are too many for two sets: they are in L1 when they are loaded.
template <class Lhs, class Rhs, WgmmaConfig config, int kScaledColumns>
class ScaledMma {
  using LhsTile = OperandTile<typename Lhs::Shared, true, config.block_m, config.block_k>;
  using RhsTile = OperandTile<typename Rhs::Shared, true, config.block_n, config.block_k>;
  using Types = WgmmaTypes<typename Lhs::Mma, typename Rhs::Mma>;
  static constexpr int kRowBlocks = config.consumer_m() / 64;
  static constexpr int kCount = config.block_n / 2;
  static_assert(config.lhs_k_major && config.rhs_k_major && config.parts == 1);
  static_assert(!config.pair && !config.lhs_pair && config.terms == 1);
  static_assert(config.block_k == 128, "the k of a scale is that of a k-tile");
  static_assert(config.consumer_m() % 64 == 0 && kScaledColumns <= 2);
  // A thread has two adjacent columns of each 8.
  static constexpr int kColumnPairs = config.block_n / 8;

 public:
  using Accumulator = typename Types::Accumulator;
  using Coordinates = WgmmaCoordinates<false>;
  using Params = ScaleParams;
  static constexpr int kStageBytes = LhsTile::kBytes + RhsTile::kBytes;
  static constexpr bool kInPlace = false;
  static constexpr int kFragmentSets = 2;
  static constexpr bool kRetireEachTile = true;
  static constexpr bool kResultsMayWait = kRowBlocks == 1;

  ScaledMma(const Params& params, int row, int warp_row)
      : params_(params), warp_row_(warp_row), row_offset_(LhsTile::mn_offset(row)) {}

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
    lhs_ = first_scale(params_.lhs, of_lhs, work.lhs_batch, k_tile);
    rhs_ = first_scale(params_.rhs, of_rhs, work.rhs_batch, k_tile);
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = work.m + warp_row_ + 64 * i + Coordinates::Layout::row_of(lane / 4, half);
        rows_[i][half] =
            (min_of(row, params_.shape.m - 1) >> of_lhs.block_log2) * static_cast<int>(of_lhs.row);
      }
    }
    if constexpr (kScaledColumns > 0) {
      last_column_ = params_.shape.n - kScaledColumns - work.n;
      rhs_ += work.n + first_column();
      // Threads 0, 8, 16 and 24 of a warp have a first column of 0.
      const int column = threadIdx.x / 8 % 4 * 32;
      prefetched_column_ = min_of(column % config.block_n, last_column_ - first_column());
    } else {
      rhs_ += (work.n >> of_rhs.block_log2) * of_rhs.row;
      // Not provably uniform: ptxas would move the scale to a uniform register, and wait for it.
      rhs_ += params_.shape.m < 0 ? lane : 0;
    }
    k_tiles_ = scheduler.k_tiles();
    if (k_tiles_ > 0) load_rows<0>();
  }

  template <int kSet>
  void load(uint32) {
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scales_[i][half] = row_scales_[kSet][i][half] * all_columns_scale_[kSet];
    }
    if constexpr (kScaledColumns > 0) load_columns();
    // The last k-tile's are loaded again: a branch would wait for what it loads.
    const bool is_last = --k_tiles_ == 0;
    lhs_ += is_last ? 0 : params_.lhs_strides.k;
    rhs_ += is_last ? 0 : params_.rhs_strides.k;
    load_rows<1 - kSet>();
  }

  template <int, int kColumns>
  void issue(uint32 stage, int) {
    issue_row_block<kColumns>(stage, 0);
  }

  void retire(uint32 stage) {
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(accumulators_);
      promote(i);
      if (i + 1 < kRowBlocks) issue_row_block<config.block_n>(stage, i + 1);
    }
  }

 private:
  // The first of the thread's columns in the tile.
  static int first_column() { return threadIdx.x % 4 * 2; }

  // Loads the scales of rows and the one of all columns, or has L1 load those of columns.
  template <int kSet>
  void load_rows() {
    all_columns_scale_[kSet] = kScaledColumns == 0 ? load_global(rhs_) : 1;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        row_scales_[kSet][i][half] = load_global(lhs_ + rows_[i][half]);
    }
    if constexpr (kScaledColumns > 0) load_global(rhs_ + prefetched_column_);
  }

  void load_columns() {
    // Offsets from one address are part of the instructions.
    if (last_column_ >= config.block_n - kScaledColumns) {
      load_columns([](int column) { return column; });
    } else {
      load_columns([&](int column) { return min_of(column, last_column_ - first_column()); });
    }
  }

  // `clamped` moves a column, which is counted from the thread's first one, into the matrix.
  template <class Clamped>
  void load_columns(const Clamped& clamped) {
#pragma unroll
    for (int j = 0; j < kColumnPairs; ++j) {
      if constexpr (kScaledColumns == 2) {
        load_global(column_scales_[j], rhs_ + clamped(8 * j));
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) column_scales_[j][k] = load_global(rhs_ + clamped(8 * j + k));
      }
    }
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

  void promote(int i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = scales_[i][half];
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int at = 4 * j + 2 * half + k;
          if constexpr (kScaledColumns > 0) {
            // Products of scales would be computed before the MMAs, which waits for the scales.
            promoted_[i][at] += accumulators_[at] * scale * column_scales_[j][k];
          } else {
            promoted_[i][at] += accumulators_[at] * scale;
          }
        }
      }
    }
  }

  const Params& params_;
  int warp_row_;
  int row_offset_;
  // How many k-tiles have not been multiplied.
  int k_tiles_;
  // The scales of the k-tile that was loaded last; those of rows are at these offsets.
  const float* lhs_;
  const float* rhs_;
  int rows_[kRowBlocks][2];
  int last_column_;
  // A column of the tile, from the thread's first one on: the threads' have a cache line each.
  int prefetched_column_;
  float row_scales_[2][kRowBlocks][2];
  float all_columns_scale_[2];
  float scales_[kRowBlocks][2];
  float column_scales_[kScaledColumns > 0 ? kColumnPairs : 1][2];
  Accumulator accumulators_[kCount];
  Accumulator promoted_[kRowBlocks][kCount];
};

}  // namespace tilekern

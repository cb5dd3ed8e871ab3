// What a wgmma_matmul kernel is told at compile time and at run time.
#pragma once

#include "types.cuh"

namespace tilekern {

// Compile-time choices; `WgmmaInstance` in `plans/gemm/sm90/config.py` makes them.
struct WgmmaConfig {
  // The tile of accumulators of a CTA (of both consumers together, if they are cooperative), which
  // is the output tile but for pairs, and the k-tile, which is 128 bytes.
  int block_m;
  int block_n;
  int block_k;
  // Stages of the pipeline; each holds a k-tile of both operands.
  int stages;
  // Consumer (math) warpgroups; one more warpgroup is the producer.
  int consumers;
  // Whether the consumers share each output tile (cooperative), each having some of its rows,
  // rather than computing alternate tiles (ping-pong).
  bool cooperative;
  // CTAs of a cluster, which compute tiles below each other and multicast rhs to each other.
  int cluster;
  // Whether an operand has its unit stride along k, rather than along M or N.
  bool lhs_k_major;
  bool rhs_k_major;
  // Whether the output has its unit stride along m, rather than n.
  bool out_m_major;
  // Whether TMA stores the output, which takes strides that are multiples of 16 bytes.
  bool tma_store;
  // Whether the accumulators of each k-tile are added to promoted accumulators by the CUDA cores,
  // because the tensor cores' own additions keep fewer bits.
  bool promote;
  // Parts that an operand's elements are the sum of: 1, or 2 (high and low) of split-float16
  // emulation. The order of part i of lhs times part j of rhs is i + j; MMAs of orders below
  // `parts` are computed, the others are smaller than the parts' own rounding.
  int parts;
  // Whether rhs is a pair of matrices: the tile of rhs has the same columns of both, those of the
  // first before those of the second. The epilogue combines their accumulators, which each thread
  // has for the same elements, and the output tile has half as many columns.
  bool pair;
  // Whether lhs is a pair of matrices: the tile of lhs has, in blocks of 64 rows, rows of the first
  // and the same rows of the second. The output tile has half as many rows.
  bool lhs_pair;

  // Rows and columns of the output tile.
  constexpr int out_m() const { return lhs_pair ? block_m / 2 : block_m; }
  constexpr int out_n() const { return pair ? block_n / 2 : block_n; }
  constexpr int tile_consumers() const { return cooperative ? consumers : 1; }
  constexpr int consumer_m() const { return block_m / tile_consumers(); }
  constexpr int consumer_out_m() const { return out_m() / tile_consumers(); }
  constexpr int threads() const { return (consumers + 1) * 128; }
};

// Rows of a matrix of lhs, if it is a pair, that come before the same rows of the other: those of
// an MMA.
inline constexpr int kPairedRowBlock = 64;

inline constexpr int kMaxTmaBatchDims = 3;

// Run-time sizes; `launch_tiles` in `plans/gemm/sm90/tiling.py` packs the same fields in the same
// order.
struct WgmmaShape {
  // In elements, for outputs that TMA does not store.
  int64 out_batch_strides[kMaxTmaBatchDims];
  int64 out_stride;
  // Batch dimensions, outermost first; unused ones come first with size 1. An operand steps by 1
  // along those that it has, and by 0 along those that it is broadcast over.
  int32 batch[kMaxTmaBatchDims];
  int32 lhs_steps[kMaxTmaBatchDims];
  int32 rhs_steps[kMaxTmaBatchDims];
  int32 batches;
  int32 m;
  int32 n;
  // All k-tiles, and those of each split-K part, whose accumulators are an output of
  // their own.
  int32 k_tiles;
  int32 split_k_tiles;
  // Distance of an operand's high and low parts along k, in elements.
  int32 part_step;
  // The grid of cluster tiles, and the height of a group of the grouped (L2) rasterization.
  int32 tiles_m;
  int32 tiles_n;
  int32 raster_height;
  // Split-K parts times batches times cluster tiles.
  int32 work_tiles;
};

// One output tile, or one of a split-K part.
struct WorkTile {
  // Where it starts in the output.
  int m;
  int n;
  // Where its first k-tile starts.
  int k;
  // Positions of the operands and of the output in the batch dimensions.
  int lhs_batch[kMaxTmaBatchDims];
  int rhs_batch[kMaxTmaBatchDims];
  int out_batch[kMaxTmaBatchDims];
};

inline void set_batch(WorkTile& work, const WgmmaShape& shape, int batch) {
#pragma unroll
  for (int dim = kMaxTmaBatchDims - 1; dim >= 0; --dim) {
    const int position = batch % shape.batch[dim];
    batch /= shape.batch[dim];
    work.lhs_batch[dim] = position * shape.lhs_steps[dim];
    work.rhs_batch[dim] = position * shape.rhs_steps[dim];
    work.out_batch[dim] = position;
  }
}

// The inverse of set_batch(). A position is 0 in an operand that is broadcast over the dimension
// and in an output that all groups share, and otherwise the same in each, so the largest one is it.
inline int batch_number(const WorkTile& work, const WgmmaShape& shape) {
  int number = 0;
#pragma unroll
  for (int dim = 0; dim < kMaxTmaBatchDims; ++dim) {
    const int operands = max_of(work.lhs_batch[dim], work.rhs_batch[dim]);
    number = number * shape.batch[dim] + max_of(operands, work.out_batch[dim]);
  }
  return number;
}

}  // namespace tilekern

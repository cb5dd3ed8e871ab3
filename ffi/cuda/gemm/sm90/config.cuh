// What a wgmma_matmul kernel is told at compile time and at run time.
#pragma once

#include "types.cuh"

namespace tilekern {

// Compile-time choices; `WgmmaInstance` in `plans/gemm/sm90/config.py` makes them.
struct WgmmaConfig {
  // The tile of the output that is computed at a time, and what is taken of k, 128 bytes.
  int block_m;
  int block_n;
  int block_k;
  // Tiles of k in shared memory at a time.
  int stages;
  // Warpgroups that multiply; one more copies.
  int consumers;
  // Whether they share a tile, each having its rows, rather than taking turns at tiles.
  bool cooperative;
  // Blocks of a cluster, which have tiles below each other and share the copies of rhs.
  int cluster;
  // Whether an operand has its unit stride along k, rather than along its rows or columns.
  bool lhs_k_major;
  bool rhs_k_major;
  // Whether the output has its unit stride along m, rather than n.
  bool out_m_major;
  // Whether the copy engine stores the output; it takes strides of whole 16 bytes.
  bool out_boxes;
  // Whether the sums over each block_k are added up outside the tensor cores, whose own additions
  // keep fewer bits.
  bool promote;
  // Pieces that an operand's elements are the sum of. The order of piece i of lhs times piece j of
  // rhs is i + j; products of orders below `pieces` count, the others are smaller than the pieces'
  // own rounding.
  int pieces;

  constexpr int tile_consumers() const { return cooperative ? consumers : 1; }
  constexpr int consumer_m() const { return block_m / tile_consumers(); }
  constexpr int threads() const { return (consumers + 1) * 128; }
};

inline constexpr int kBoxBatchDims = 3;

// Run-time sizes; `launch_tiles` in `plans/gemm/sm90/launch.py` packs the same fields in the same
// order.
struct WgmmaShape {
  // In elements, for outputs that the copy engine does not store.
  int64 out_batch_strides[kBoxBatchDims];
  int64 out_stride;
  // Batch dimensions, outermost first; unused ones come first with size 1. An operand steps by 1
  // along those that it has, and by 0 along those that it is broadcast over.
  int32 batch[kBoxBatchDims];
  int32 lhs_steps[kBoxBatchDims];
  int32 rhs_steps[kBoxBatchDims];
  int32 batches;
  int32 m;
  int32 n;
  // Tiles of k, and of each split of k; the sums of a split are an output of their own.
  int32 k_tiles;
  int32 split_k_tiles;
  // Distance of an operand's pieces along k, in elements.
  int32 piece_step;
  // In tiles of clusters.
  int32 tiles_m;
  int32 tiles_n;
  int32 band;
  // Splits times batches times tiles.
  int32 items;
};

// One tile of the output, or of a split's.
struct WorkItem {
  int m;
  int n;
  // The first of k.
  int k;
  int lhs_batch[kBoxBatchDims];
  int rhs_batch[kBoxBatchDims];
  int out_batch[kBoxBatchDims];
};

// Sets the positions of operands and output in the batch dimensions.
inline void set_batch(WorkItem& work, const WgmmaShape& shape, int batch) {
#pragma unroll
  for (int dim = kBoxBatchDims - 1; dim >= 0; --dim) {
    const int position = batch % shape.batch[dim];
    batch /= shape.batch[dim];
    work.lhs_batch[dim] = position * shape.lhs_steps[dim];
    work.rhs_batch[dim] = position * shape.rhs_steps[dim];
    work.out_batch[dim] = position;
  }
}

}  // namespace tilekern

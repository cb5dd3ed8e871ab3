// Compile-time parameters of a product of small matrices.
#pragma once

#include "types.cuh"

namespace tilekern {

// How an operand lies in memory. Its rows are what is contiguous: along k if it is k-major, along m
// or n otherwise.
struct SmallOperandConfig {
  bool k_major;
  // Whether all rows start at the same distance from a multiple of 16 bytes in shared memory.
  bool uniform;
  // Bytes of a row that a lane reads from shared memory at once: as many as rows are aligned to,
  // but at least those of one element, and at most 16 along k or 4 across it.
  int load_bytes;
};

// Compile-time choices; `SmallInstance` in `plans/gemm/small/config.py` makes them.
struct SmallMatmulConfig {
  // Fragments of a warp: of 16 rows and of 8 columns.
  int fragments_m;
  int fragments_n;
  // The grid of warps that covers the CTA tile, and the warps that share the k of each part of it.
  int warps_m;
  int warps_n;
  int warps_k;
  // Chunks of k in shared memory at a time.
  int stages;
  // Whether 8-bit floats are widened to float16, where mma.sync has no 8-bit floats of its own.
  bool widen;
  // Whether float32 is multiplied on CUDA cores, without rounding to TF32.
  bool fma;
  SmallOperandConfig lhs;
  SmallOperandConfig rhs;

  constexpr int threads() const { return warps_m * warps_n * warps_k * 32; }
  constexpr int warp_m() const { return fragments_m * 16; }
  constexpr int warp_n() const { return fragments_n * 8; }
  constexpr int block_m() const { return warps_m * warp_m(); }
  constexpr int block_n() const { return warps_n * warp_n(); }
};

inline constexpr int kSmallBatchDims = 4;
// The rows of a group take a multiple of 64 bytes. With these after it, four groups are on
// different banks.
inline constexpr int kGroupPadding = 32;

// An array in memory and a tile of it in shared memory. Distances are in bytes.
struct SmallArrayShape {
  // Between matrices, the outermost batch dimension first.
  int64 batch_strides[kSmallBatchDims];
  // Between rows in memory.
  int64 stride;
  // Between rows in shared memory: `stride` if the rows are copied as one, or a multiple of 16.
  int32 pitch;
  // Rows of a group, after which kGroupPadding bytes follow in shared memory, or 0 without groups.
  int32 group_rows;
  // Whether the tile's rows follow each other in memory, and are copied as one.
  bool flat;
  // Whether rows of tiles start at multiples of 16 bytes.
  bool aligned;
  // A power of two that divides the number of threads.
  int32 threads_per_row;
};

// The sizes. They are constants of the kernel, since its time is much that of address arithmetic.
// `SmallInstance` in `plans/gemm/small/config.py` has the same fields in the same order.
struct SmallMatmulShape {
  SmallArrayShape lhs;
  SmallArrayShape rhs;
  SmallArrayShape out;
  // Sizes of the batch dimensions but for the first, which only the grid depends on.
  int32 batch[kSmallBatchDims];
  int32 batch_dims;
  int32 m;
  int32 n;
  int32 k;
  // The k of a stage.
  int32 chunk_k;
  int32 tiles_m;
  int32 tiles_n;
  int32 lhs_stage_bytes;
  int32 stage_bytes;
};

}  // namespace tilekern

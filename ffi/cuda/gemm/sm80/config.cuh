// Compile-time and run-time parameters of a matmul kernel.
#pragma once

#include "types.cuh"

namespace tilekern {

// Compile-time choices; `MatmulInstance` in `plans/gemm/sm80/config.py` makes them.
struct MatmulConfig {
  // The CTA tile, in elements; warps cover it in a grid of warps_m by warps_n.
  int block_m;
  int block_n;
  int block_k;
  int warps_m;
  int warps_n;
  // k-tiles in shared memory at a time.
  int stages;
  // CTAs per SM, which bounds the registers of a thread.
  int min_blocks;
  // Whether an operand has its unit stride along k, rather than along its rows or columns.
  bool lhs_k_major;
  bool rhs_k_major;
  // Bytes per copy to shared memory: 16, 8 or 4 by cp.async, or 1 for any alignment.
  int lhs_load_bytes;
  int rhs_load_bytes;
  // Whether accumulators are promoted to float32 registers after each block_k, because tensor cores
  // accumulate products of 8-bit floats with fewer bits than float32 has.
  bool promote;
  // Whether 8-bit floats are widened to float16, where mma.sync has no 8-bit floats of its own.
  // (For sm_90 and sm_100 ptxas would do the same, with an addition for each product.)
  bool widen;

  constexpr int threads() const { return warps_m * warps_n * 32; }
  constexpr int warp_m() const { return block_m / warps_m; }
  constexpr int warp_n() const { return block_n / warps_n; }
};

// Run-time sizes and strides; `pack_shape` in `plans/gemm/sm80/config.py` packs the same fields in
// the same order. Strides are in elements.
struct MatmulShape {
  // Strides of the batch dimensions, outermost first; unused ones come first with size 1.
  int64 lhs_batch_strides[kMaxBatchDims];
  int64 rhs_batch_strides[kMaxBatchDims];
  int64 out_batch_strides[kMaxBatchDims];
  // Leading dimensions: the stride of the dimension that is not contiguous.
  int64 lhs_stride;
  int64 rhs_stride;
  int64 out_stride;
  int32 batch[kMaxBatchDims];
  int32 m;
  int32 n;
  int32 k;
  int32 tiles_m;
  int32 tiles_n;
  int32 raster_height;  // tile rows per group of the rasterization
  // Whether every row of `out` consists of aligned 16-byte vectors.
  int32 out_vectors;
};

struct BatchOffsets {
  int64 lhs = 0;
  int64 rhs = 0;
  int64 out = 0;
};

inline BatchOffsets batch_offsets(const MatmulShape& shape, int index) {
  BatchOffsets offsets;
#pragma unroll
  for (int dim = kMaxBatchDims - 1; dim >= 0; --dim) {
    const int64 position = index % shape.batch[dim];
    index /= shape.batch[dim];
    offsets.lhs += position * shape.lhs_batch_strides[dim];
    offsets.rhs += position * shape.rhs_batch_strides[dim];
    offsets.out += position * shape.out_batch_strides[dim];
  }
  return offsets;
}

}  // namespace tilekern

// Completes the reductions of a product's rows (../row_reductions.cuh): combines the partial
// results of all tiles of a row, in a fixed order.
#pragma once

#include "convert.cuh"
#include "gemm/row_reductions.cuh"
#include "strided_rows.cuh"

namespace tilekern {

inline constexpr int kRowsPerBlock = 32;
// Threads that share the tiles of a row.
inline constexpr int kTileParts = 8;

// Run-time sizes; `RowTilesPass` in `plans/gemm/passes/reduce_row_tiles.py` packs the same fields
// in the same order.
struct RowTilesShape {
  // The elements of the result, which number the rows of all matrices.
  StridedRows rows;
  // Rows of a matrix, and tiles of a row.
  uint32 matrix_rows;
  uint32 tiles;
};

// A warp has a part of the tiles of 32 rows, and the first warp combines the parts.
template <class Reduction, typename Out>
__global__ void __launch_bounds__(kRowsPerBlock* kTileParts)
    reduce_row_tiles(const typename Reduction::Partial* __restrict__ partials, Out* out,
                     const __grid_constant__ RowTilesShape shape) {
  using Partial = typename Reduction::Partial;
  __shared__ Partial parts[kTileParts][kRowsPerBlock];
  const uint32 lane = threadIdx.x % kRowsPerBlock;
  const uint32 part = threadIdx.x / kRowsPerBlock;
  const uint32 row = blockIdx.x * kRowsPerBlock + lane;
  const bool inside = row < shape.rows.count;
  Reduction total;
  if (inside) {
    const uint32 matrix = row / shape.matrix_rows;
    partials +=
        static_cast<int64>(matrix) * shape.tiles * shape.matrix_rows + row % shape.matrix_rows;
    const uint32 count = (shape.tiles + kTileParts - 1) / kTileParts;
    const uint32 end = min_of((part + 1) * count, shape.tiles);
#pragma unroll 8
    for (uint32 tile = part * count; tile < end; ++tile) {
      total.merge(Reduction(partials[static_cast<int64>(tile) * shape.matrix_rows]));
    }
  }
  parts[part][lane] = total.partial();
  __syncthreads();
  if (part == 0 && inside) {
#pragma unroll
    for (int other = 1; other < kTileParts; ++other) total.merge(Reduction(parts[other][lane]));
    out[row_offset(shape.rows, row)] = from_float<Out>(total.value());
  }
}

}  // namespace tilekern

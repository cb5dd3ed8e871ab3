// Completes the reductions of a product's rows (../row_reductions.cuh): combines the partial
// results of all tiles of a row, in order.
#pragma once

#include "convert.cuh"
#include "gemm/row_reductions.cuh"
#include "strided_rows.cuh"

namespace tilekern {

inline constexpr int kRowTilesThreads = 128;

// Run-time sizes; `RowTilesPass` in `plans/gemm/passes/reduce_row_tiles.py` packs the same fields
// in the same order.
struct RowTilesShape {
  // The elements of the result, which number the rows of all matrices.
  StridedRows rows;
  // Rows of a matrix, and tiles of a row.
  uint32 matrix_rows;
  uint32 tiles;
};

template <class Reduction, typename Out>
__global__ void __launch_bounds__(kRowTilesThreads)
    reduce_row_tiles(const typename Reduction::Partial* __restrict__ partials, Out* out,
                     const __grid_constant__ RowTilesShape shape) {
  const uint32 row = blockIdx.x * kRowTilesThreads + threadIdx.x;
  if (row >= shape.rows.count) return;
  const uint32 matrix = row / shape.matrix_rows;
  partials +=
      static_cast<int64>(matrix) * shape.tiles * shape.matrix_rows + row % shape.matrix_rows;
  Reduction total(partials[0]);
#pragma unroll 8
  for (uint32 tile = 1; tile < shape.tiles; ++tile) {
    total.merge(Reduction(partials[static_cast<int64>(tile) * shape.matrix_rows]));
  }
  out[row_offset(shape.rows, row)] = from_float<Out>(total.value());
}

}  // namespace tilekern

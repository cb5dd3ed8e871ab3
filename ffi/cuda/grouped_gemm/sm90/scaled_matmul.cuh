// The kernel of grouped_gemm/sm90/matmul.cuh for 8-bit floats with scales of blocks.
#pragma once

#include "gemm/sm90/matmul.cuh"
#include "gemm/sm90/scaled_mma.cuh"
#include "grouped_gemm/sm90/tile_scheduler.cuh"

namespace tilekern {

// Ragged rows are rows here, or columns: then all of them have one scale. A group begins anywhere,
// so scales of columns would not be aligned.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config, Ragged ragged,
          int column_step, int tma_column_step, int tma_columns, bool scaled_columns>
__global__ void __launch_bounds__(config.threads(), 1)
    scaled_ragged_wgmma_matmul(const __grid_constant__ TensorMap lhs,
                               const __grid_constant__ TensorMap rhs,
                               const __grid_constant__ TensorMap out_map, Out* out,
                               const __grid_constant__ TensorMap rhs_step, const int32* bounds,
                               int32* claimed, const float* lhs_scales, const float* rhs_scales,
                               const __grid_constant__ WgmmaShape shape,
                               const __grid_constant__ GroupShape groups,
                               const __grid_constant__ ScaleStrides lhs_strides,
                               const __grid_constant__ ScaleStrides rhs_strides) {
  static_assert(ragged == Ragged::kM || (ragged == Ragged::kN && !scaled_columns));
  using Tiles = GroupedTiles<config, ragged, column_step, tma_column_step, tma_columns>;
  using Scheduler = DynamicPersistentScheduler<config, Tiles>;
  using Mma = ScaledMma<OperandTypes<Lhs>, OperandTypes<Rhs>, config, scaled_columns>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, IdentityEpilogue, Mma>(
      shape, {{shape, groups, bounds}, claimed}, {},
      {lhs_scales, rhs_scales, lhs_strides, rhs_strides, shape})
      .run({lhs, rhs, rhs_step}, {lhs, rhs, rhs_step}, out_map, out_map, out);
}

}  // namespace tilekern

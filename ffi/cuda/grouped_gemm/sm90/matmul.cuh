// Grouped GEMMs on Hopper's warpgroup tensor cores (sm_90a).
#pragma once

#include "gemm/sm90/matmul.cuh"
#include "grouped_gemm/sm90/tile_scheduler.cuh"

namespace tilekern {

// The GEMM of each group of rows, in one launch: the kernel of gemm/sm90/matmul.cuh with another
// tile scheduler. The groups are the last batch dimension. `rhs_step` is a tensor map of rhs with
// TMA tiles of tma_column_step columns.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config, Ragged ragged,
          int column_step, int tma_column_step, int tma_columns, class Epilogue = IdentityEpilogue,
          typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    ragged_wgmma_matmul(const __grid_constant__ TensorMap lhs,
                        const __grid_constant__ TensorMap rhs,
                        const __grid_constant__ TensorMap out_map, Out* out,
                        const __grid_constant__ TensorMap rhs_step, const int32* bounds,
                        int32* claimed, const __grid_constant__ WgmmaShape shape,
                        const __grid_constant__ GroupShape groups, Operands... operands) {
  using Tiles = GroupedTiles<config, ragged, column_step, tma_column_step, tma_columns>;
  using Scheduler = DynamicPersistentScheduler<config, Tiles>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {{shape, groups, bounds}, claimed}, Epilogue{operands...})
      .run({lhs, rhs, rhs_step}, {lhs, rhs, rhs_step}, out_map, out_map, out);
}

// Two products of one rhs: `second_lhs` has the strides of `lhs`, and the epilogue is a function of
// the accumulators of both. Ragged rows are columns here.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config, Ragged ragged,
          int column_step, int tma_column_step, int tma_columns, class Epilogue,
          typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    ragged_wgmma_matmul_of_pair(const __grid_constant__ TensorMap lhs,
                                const __grid_constant__ TensorMap rhs,
                                const __grid_constant__ TensorMap out_map, Out* out,
                                const __grid_constant__ TensorMap second_lhs,
                                const __grid_constant__ TensorMap rhs_step, const int32* bounds,
                                int32* claimed, const __grid_constant__ WgmmaShape shape,
                                const __grid_constant__ GroupShape groups, Operands... operands) {
  static_assert(config.lhs_pair);
  using Tiles = GroupedTiles<config, ragged, column_step, tma_column_step, tma_columns>;
  using Scheduler = DynamicPersistentScheduler<config, Tiles>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {{shape, groups, bounds}, claimed}, Epilogue{operands...})
      .run({lhs, rhs, rhs_step}, {second_lhs, rhs, rhs_step}, out_map, out_map, out);
}

}  // namespace tilekern

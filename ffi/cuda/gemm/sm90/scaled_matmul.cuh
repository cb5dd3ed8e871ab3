// The kernel of gemm/sm90/matmul.cuh for 8-bit floats with scales of blocks.
#pragma once

#include "gemm/sm90/matmul.cuh"
#include "gemm/sm90/scaled_mma.cuh"

namespace tilekern {

template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config, bool scaled_columns,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    scaled_wgmma_matmul(const __grid_constant__ TensorMap lhs,
                        const __grid_constant__ TensorMap rhs,
                        const __grid_constant__ TensorMap out_map, Out* out,
                        const float* lhs_scales, const float* rhs_scales,
                        const __grid_constant__ WgmmaShape shape,
                        const __grid_constant__ ScaleStrides lhs_strides,
                        const __grid_constant__ ScaleStrides rhs_strides,
                        const __grid_constant__ Operands... operands) {
  using Scheduler = StaticPersistentScheduler<config>;
  using Mma = ScaledMma<OperandTypes<Lhs>, OperandTypes<Rhs>, config, scaled_columns>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue, Mma>(
      shape, {shape}, Epilogue{operands...},
      {lhs_scales, rhs_scales, lhs_strides, rhs_strides, shape})
      .run({lhs, rhs, rhs}, {lhs, rhs, rhs}, out_map, out_map, out);
}

}  // namespace tilekern

// Grouped GEMMs of float32 on CUDA cores, by FFMA instructions.
#pragma once

#include "gemm/sm80/simt_matmul.cuh"
#include "grouped_gemm/sm80/matmul_block.cuh"

namespace tilekern {

template <typename Lhs, typename Rhs, typename Out, MatmulConfig config, bool kRaggedK,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), config.min_blocks)
    ragged_simt_matmul(const Lhs* lhs, const Rhs* rhs, const int32* bounds, Out* out,
                       const __grid_constant__ MatmulShape shape,
                       const __grid_constant__ GroupShape groups, Operands... operands) {
  ragged_matmul_tile<SimtEngine, config, kRaggedK>(lhs, rhs, bounds, out, shape, groups,
                                                   Epilogue{operands...});
}

}  // namespace tilekern

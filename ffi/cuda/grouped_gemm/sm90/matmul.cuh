// Ragged matrix products on Hopper's warpgroup tensor cores (sm_90a).
#pragma once

#include "gemm/sm90/matmul.cuh"
#include "grouped_gemm/sm90/tile_scheduler.cuh"

namespace tilekern {

// The product of each group of rows, in one launch; see gemm/sm90/matmul.cuh. The last batch
// dimension is the groups.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config, Ragged ragged,
          int line_step, int copy_step, int long_box_lines>
__global__ void __launch_bounds__(config.threads(), 1)
    ragged_wgmma_matmul(const __grid_constant__ TensorMap lhs,
                        const __grid_constant__ TensorMap rhs,
                        const __grid_constant__ TensorMap out_map, Out* out,
                        const __grid_constant__ TensorMap rhs_step, const int32* bounds,
                        int32* items_taken, const __grid_constant__ WgmmaShape shape,
                        const __grid_constant__ GroupShape groups) {
  using Items = RaggedItems<config, ragged, line_step, copy_step, long_box_lines>;
  WgmmaMatmul<Lhs, Rhs, Out, config, Items, NoFinish>(shape, {shape, groups, bounds, items_taken},
                                                      {})
      .run(lhs, rhs, rhs_step, out_map, out);
}

}  // namespace tilekern

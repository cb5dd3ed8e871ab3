// GEMM on Hopper (matmul.cuh) with a dynamic tile scheduler: for a GPU some of whose SMs are busy
// with something else, such as a collective operation, while the kernel runs.
#pragma once

#include "gemm/sm90/dynamic_tile_scheduler.cuh"
#include "gemm/sm90/matmul.cuh"

namespace tilekern {

// The tiles of a dense GEMM, for DynamicPersistentScheduler.
template <WgmmaConfig config>
class ClaimedDenseTiles {
 public:
  static constexpr bool kPartialM = false;
  static constexpr bool kPartialN = false;
  static constexpr bool kPartialK = false;
  static constexpr int kColumnStep = config.block_n;
  static constexpr int kTmaColumnStep = config.block_n;
  static constexpr int kTmaColumns = config.block_n;

  explicit ClaimedDenseTiles(const WgmmaShape& shape) : shape_(shape) {}

  void prepare(unsigned char*) const {}
  int count() const { return shape_.work_tiles; }
  int most() const { return shape_.work_tiles; }
  ScheduledTile find(int number) const {
    using Tiles = DenseTiles<config>;
    return {Tiles::work_tile(shape_, number, 0), 0, Tiles::k_tiles(shape_, number)};
  }

 private:
  const WgmmaShape& shape_;
};

// `claimed` counts the tiles that clusters have claimed; clear_claimed_tiles() runs before.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_matmul_dynamic(const __grid_constant__ TensorMap lhs,
                         const __grid_constant__ TensorMap rhs,
                         const __grid_constant__ TensorMap out_map, Out* out, int32* claimed,
                         const __grid_constant__ WgmmaShape shape,
                         const __grid_constant__ Operands... operands) {
  using Scheduler = DynamicPersistentScheduler<config, ClaimedDenseTiles<config>>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {ClaimedDenseTiles<config>(shape), claimed}, Epilogue{operands...})
      .run({lhs, rhs, rhs}, {lhs, rhs, rhs}, out_map, out_map, out);
}

}  // namespace tilekern

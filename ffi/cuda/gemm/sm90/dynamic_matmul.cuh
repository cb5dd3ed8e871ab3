// GEMM on Hopper (matmul.cuh) with a dynamic tile scheduler: for a GPU some of whose SMs are busy
// with something else, such as a collective operation, while the kernel runs.
#pragma once

#include "gemm/sm90/dynamic_tile_scheduler.cuh"
#include "gemm/sm90/matmul.cuh"

namespace tilekern {

// Tiles that are numbered, those of a dense GEMM or of a symmetric output, for
// DynamicPersistentScheduler.
template <WgmmaConfig config, class Tiles>
class ClaimedTiles {
 public:
  static constexpr bool kMirrors = Tiles::kMirrors;
  static constexpr bool kPartialM = false;
  static constexpr bool kPartialN = false;
  static constexpr bool kPartialK = false;
  static constexpr int kColumnStep = config.block_n;
  static constexpr int kTmaColumnStep = config.block_n;
  static constexpr int kTmaColumns = config.block_n;

  explicit ClaimedTiles(const WgmmaShape& shape) : shape_(shape) {}

  void prepare(unsigned char*) const {}
  int count() const { return shape_.work_tiles; }
  int most() const { return shape_.work_tiles; }
  ScheduledTile find(int number) const {
    return {Tiles::work_tile(shape_, number), 0, Tiles::k_tiles(shape_, number)};
  }

 private:
  const WgmmaShape& shape_;
};

// `claimed` counts the tiles that CTAs have claimed; clear_claimed_tiles() runs before.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_matmul_dynamic(const __grid_constant__ TensorMap lhs,
                         const __grid_constant__ TensorMap rhs,
                         const __grid_constant__ TensorMap out_map, Out* out, int32* claimed,
                         const __grid_constant__ WgmmaShape shape,
                         const __grid_constant__ Operands... operands) {
  using Tiles = ClaimedTiles<config, DenseTiles<config>>;
  using Scheduler = DynamicPersistentScheduler<config, Tiles>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {Tiles(shape), claimed}, Epilogue{operands...})
      .run({lhs, rhs, rhs}, {lhs, rhs, rhs}, out_map, out_map, out);
}

// As wgmma_matmul_of_pair().
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config, class Epilogue,
          typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_matmul_of_pair_dynamic(const __grid_constant__ TensorMap lhs,
                                 const __grid_constant__ TensorMap rhs,
                                 const __grid_constant__ TensorMap out_map, Out* out,
                                 const __grid_constant__ TensorMap second_rhs, int32* claimed,
                                 const __grid_constant__ WgmmaShape shape,
                                 const __grid_constant__ Operands... operands) {
  static_assert(config.pair);
  using Tiles = ClaimedTiles<config, DenseTiles<config>>;
  using Scheduler = DynamicPersistentScheduler<config, Tiles>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {Tiles(shape), claimed}, Epilogue{operands...})
      .run({lhs, rhs, rhs}, {lhs, second_rhs, second_rhs}, out_map, out_map, out);
}

// As wgmma_symmetric_matmul().
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_symmetric_matmul_dynamic(const __grid_constant__ TensorMap lhs,
                                   const __grid_constant__ TensorMap rhs,
                                   const __grid_constant__ TensorMap out_map, Out* out,
                                   const __grid_constant__ TensorMap mirror_map, int32* claimed,
                                   const __grid_constant__ WgmmaShape shape,
                                   const __grid_constant__ Operands... operands) {
  using Tiles = ClaimedTiles<config, SymmetricTiles<config>>;
  using Scheduler = DynamicPersistentScheduler<config, Tiles>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {Tiles(shape), claimed}, Epilogue{operands...})
      .run({lhs, rhs, rhs}, {lhs, rhs, rhs}, out_map, mirror_map, out);
}

}  // namespace tilekern

// The kernel of gemm/sm90/weight_only_matmul.cuh for groups of rows of x, each with a matrix of its
// own.
#pragma once

#include "gemm/sm90/weight_only_matmul.cuh"
#include "grouped_gemm/groups.cuh"

namespace tilekern {

// Tiles of the groups that have rows, dealt out to CTAs in turn. Matrices of others are not read.
// Rows of no group have tiles without k-tiles, which are zeros. Where a group has two matrices,
// tiles of the second one follow those of the first.
template <WgmmaConfig config>
class WeightOnlyGroups {
 public:
  static constexpr bool kMany = true;

  WeightOnlyGroups(const WeightOnlyShape& shape, const GroupShape& groups, const int32* bounds)
      : shape_(shape), groups_(groups), bounds_(bounds) {}

  // `shared` has room for the number of each span's first tile, and for where it begins.
  void prepare(unsigned char* shared) {
    const int spans = groups_.spans();
    first_tiles_ = reinterpret_cast<int32*>(shared);
    begins_ = first_tiles_ + spans + 1;
    for (int i = threadIdx.x; i <= spans; i += blockDim.x) {
      begins_[i] = i < spans ? span_at(groups_, bounds_, i).begin : groups_.rows;
    }
    number_tiles(groups_, bounds_, config.block_n, first_tiles_);
  }

  bool find(int number, WeightOnlyTile& tile) const {
    const int of_matrix = (shape_.n + config.block_m - 1) / config.block_m;
    const int rows = of_matrix * (shape_.columns / shape_.n);
    const int own = blockIdx.x + number * gridDim.x, of_tokens = own / rows;
    if (of_tokens >= first_tiles_[groups_.spans()]) return false;
    const int index = span_of_tile(first_tiles_, groups_.spans(), of_tokens);
    const int group = index - 1;
    const bool is_group = group >= 0 && group < groups_.groups;
    tile.second = own % rows >= of_matrix;
    tile.row = own % rows % of_matrix * config.block_m;
    tile.token = begins_[index] + (of_tokens - first_tiles_[index]) * config.block_n;
    tile.end = begins_[index + 1];
    tile.weights = is_group ? group : 0;
    tile.x = tile.out = tile.first_k_tile = 0;
    tile.k_tiles = is_group ? shape_.k_tiles : 0;
    return true;
  }

 private:
  const WeightOnlyShape& shape_;
  const GroupShape& groups_;
  const int32* bounds_;
  int32* first_tiles_ = nullptr;
  int32* begins_ = nullptr;
};

template <typename T, typename Scale, typename Zero, typename Out, typename Weight,
          WgmmaConfig config, int kGroup, bool kZeros, int kCtas>
__global__ void __launch_bounds__(weight_only_threads(config), kCtas)
    weight_only_ragged_matmul(const __grid_constant__ TensorMap weights,
                              const __grid_constant__ TensorMap x, const Scale* scales,
                              const Zero* zeros, const __grid_constant__ TensorMap second,
                              const Scale* second_scales, const Zero* second_zeros,
                              const int32* bounds, Out* out,
                              const __grid_constant__ WeightOnlyShape shape,
                              const __grid_constant__ GroupShape groups) {
  using Tiles = WeightOnlyGroups<config>;
  WeightOnlyMatmul<T, Scale, Zero, Out, Weight, config, kGroup, kZeros, Tiles>(
      shape, {shape, groups, bounds}, {scales, zeros}, {second_scales, second_zeros}, out)
      .run(weights, second, x, IdentityEpilogue{});
}

}  // namespace tilekern

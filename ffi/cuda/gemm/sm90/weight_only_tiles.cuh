// Which tiles of a product with small weights a CTA computes (`weight_only_matmul.cuh`).
#pragma once

#include "gemm/sm90/config.cuh"
#include "types.cuh"

namespace tilekern {

// Run-time sizes; `plans/gemm/sm90/weight_only_launches.py` packs the same fields in the same
// order.
struct WeightOnlyShape {
  int32 m;
  int32 n;
  // Elements along k of a group, and groups; rows of weights that share scales, and rows of scales.
  int32 group;
  int32 groups;
  int32 row_block;
  int32 row_blocks;
  // All k-tiles, and those of each split-K part, whose sums are an output of their own.
  int32 k_tiles;
  int32 split_k_tiles;
  int32 batches;
  // 1 for an operand that has the batch dimension, otherwise 0.
  int32 x_step;
  int32 weights_step;
  // Columns of the output, where products of two matrices lie side by side.
  int32 columns;
};

// What weights have beside their integers.
template <typename Scale, typename Zero>
struct WeightScales {
  const Scale* scales;
  const Zero* zeros;
};

struct WeightOnlyTile {
  // The first row of weights, and of x, which is a row of the output, too.
  int row;
  int token;
  // The row of x behind the last one that is the tile's.
  int end;
  // The matrices of each array.
  int weights;
  int x;
  int out;
  int first_k_tile;
  int k_tiles;
  // Whether the weights are those of a second array.
  bool second;
};

// The tiles of a CTA:
//   kMany                 whether it may have more than one
//   prepare(shared)       by all threads, before any is found
//   find(number, tile)    by any thread: the CTA's tile of a number, or false behind the last one
//
// Each CTA has one tile, of a matrix of a batch and of a part of k.
template <WgmmaConfig config>
class WeightOnlyGrid {
 public:
  static constexpr bool kMany = false;

  explicit WeightOnlyGrid(const WeightOnlyShape& shape) : shape_(shape) {}

  void prepare(unsigned char*) {}

  bool find(int number, WeightOnlyTile& tile) const {
    if (number > 0) return false;
    const int batch = blockIdx.z % shape_.batches, split = blockIdx.z / shape_.batches;
    tile.row = blockIdx.x * config.block_m;
    tile.token = blockIdx.y * config.block_n;
    tile.end = shape_.m;
    tile.weights = batch * shape_.weights_step;
    tile.x = batch * shape_.x_step;
    tile.out = split * shape_.batches + batch;
    tile.first_k_tile = split * shape_.split_k_tiles;
    tile.k_tiles = min_of(shape_.split_k_tiles, shape_.k_tiles - tile.first_k_tile);
    tile.second = false;
    return true;
  }

 private:
  const WeightOnlyShape& shape_;
};

}  // namespace tilekern

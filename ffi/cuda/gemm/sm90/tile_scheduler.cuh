// Which tiles of a dense product a block computes.
#pragma once

#include "gemm/sm90/config.cuh"
#include "rasterization.cuh"

namespace tilekern {

// The items of a block's cluster, from the first in steps. The copying thread and the multiplying
// warpgroups walk through the same ones, each for itself.
template <WgmmaConfig config>
class DenseItems {
 public:
  // Whether a tile may have fewer lines of rhs than there is room for, or foreign rows of k.
  static constexpr bool kPartialLines = false;
  static constexpr bool kPartialK = false;
  // Whether a thread has to find out what the items are, when it is asked to.
  static constexpr bool kScheduled = false;
  // Of which the lines of a partial tile are a multiple.
  static constexpr int kLineStep = config.block_n;

  struct Source {
    const WgmmaShape& shape;

    // By all threads of the block; `shared` is what the plan has set aside.
    void prepare(unsigned char*) const {}
  };

  DenseItems(const Source& source, int block)
      : shape_(source.shape), block_(block), item_(static_cast<int>(blockIdx.x) / config.cluster) {
    item_ -= step();
  }

  bool next() {
    item_ += step();
    return item_ < shape_.items;
  }

  // The splits of a product's outputs are stacked in the last batch dimension, with all batches.
  int k_tiles() const {
    const int split = item_ / (shape_.batches * shape_.tiles_m * shape_.tiles_n);
    return min_of(shape_.split_k_tiles, shape_.k_tiles - split * shape_.split_k_tiles);
  }

  WorkItem work() const {
    const int tiles = shape_.tiles_m * shape_.tiles_n;
    const int stacked = item_ / tiles;
    const TileCoordinates tile =
        banded_tile(item_ % tiles, shape_.tiles_m, shape_.tiles_n, shape_.band);
    WorkItem work;
    work.m = (tile.m * config.cluster + block_) * config.block_m;
    work.n = tile.n * config.block_n;
    work.k = stacked / shape_.batches * shape_.split_k_tiles * config.block_k;
    set_batch(work, shape_, stacked % shape_.batches);
    if (shape_.split_k_tiles < shape_.k_tiles) {
#pragma unroll
      for (int dim = 0; dim < kBoxBatchDims - 1; ++dim) work.out_batch[dim] = 0;
      work.out_batch[kBoxBatchDims - 1] = stacked;
    }
    return work;
  }

  // Of a partial tile: its lines of rhs, and the first of k that are not its own.
  int lines() const { return 0; }
  int foreign_k() const { return 0; }

  // By the copying thread: for the next item.
  void ask() const {}
  // After the last look at an item.
  void release() const {}

 private:
  static int step() { return static_cast<int>(gridDim.x) / config.cluster; }

  const WgmmaShape& shape_;
  int block_;
  int item_;
};

}  // namespace tilekern

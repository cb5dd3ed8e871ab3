// Which work tiles a CTA computes: the tile scheduler, its concept and the static persistent one.
//
// The CTAs of a grid stay on their SMs, and each computes work tile after work tile. Its producer
// thread and each of its consumers have a scheduler of their own, and all of them see the same
// tiles in the same order. A tile scheduler provides
//
//   struct Params                what all of a CTA's schedulers share; the kernel holds it
//     void prepare(shared)         by all threads, before a barrier of the cluster; `shared` is
//                                  the shared memory that the plan sets aside for it
//   Scheduler(params, cta)         `cta` is the rank in the cluster
//   bool next()                    moves on to the next work tile, the first one at first; false
//                                  after the last
//   WorkTile work_tile()           what it is
//   int k_tiles()                  how many k-tiles it has, 0 if it is zeros
//   int columns()                  how many columns of a partial tile are its own
//   int skipped_k()                how many elements of its first k-tile are not its own
//   void request()                 by the producer thread, once before each next(): the next work
//                                  tile will be needed soon
//   void release()                 by all consumer threads, after the last look at a work tile
//   static void schedule(params)   by one more thread of the cluster's first CTA, if kDynamic:
//                                  answers the requests
//   kDynamic                       whether a thread has to find the work tiles
//   kPartialN                      whether columns() counts: the tile may need a part of rhs
//   kPartialK                      whether skipped_k() counts, or k_tiles() may be 0
//   kColumnStep                    the producer loads and the consumers multiply columns of a
//                                  partial tile in multiples of it; otherwise it is block_n
//   kTmaColumnStep, kTmaColumns    if kPartialN: columns of a short and a long TMA tile of rhs
#pragma once

#include "gemm/sm90/config.cuh"
#include "rasterization.cuh"

namespace tilekern {

// The work tiles of a dense GEMM, which are numbered: all tiles of a matrix, then of the next
// batch, then of the next split-K part.
template <WgmmaConfig config>
struct DenseTiles {
  // The tile of a CTA of the cluster.
  static WorkTile work_tile(const WgmmaShape& shape, int number, int cta) {
    const int tiles = shape.tiles_m * shape.tiles_n;
    const int stacked = number / tiles;
    const TileCoordinates tile =
        rasterized_tile(number % tiles, shape.tiles_m, shape.tiles_n, shape.raster_height);
    WorkTile work;
    work.m = (tile.m * config.cluster + cta) * config.block_m;
    work.n = tile.n * config.out_n();
    work.k = stacked / shape.batches * shape.split_k_tiles * config.block_k;
    set_batch(work, shape, stacked % shape.batches);
    // The outputs of split-K parts are stacked in the last batch dimension, with all batches.
    if (shape.split_k_tiles < shape.k_tiles) {
#pragma unroll
      for (int dim = 0; dim < kMaxTmaBatchDims - 1; ++dim) work.out_batch[dim] = 0;
      work.out_batch[kMaxTmaBatchDims - 1] = stacked;
    }
    return work;
  }

  static int k_tiles(const WgmmaShape& shape, int number) {
    const int split = number / (shape.batches * shape.tiles_m * shape.tiles_n);
    return min_of(shape.split_k_tiles, shape.k_tiles - split * shape.split_k_tiles);
  }
};

// A cluster computes every gridDim-th work tile. Each scheduler counts for itself.
template <WgmmaConfig config>
class StaticPersistentScheduler {
  using Tiles = DenseTiles<config>;

 public:
  static constexpr bool kDynamic = false;
  static constexpr bool kPartialN = false;
  static constexpr bool kPartialK = false;
  static constexpr int kColumnStep = config.block_n;

  struct Params {
    const WgmmaShape& shape;

    void prepare(unsigned char*) const {}
  };

  StaticPersistentScheduler(const Params& params, int cta)
      : shape_(params.shape), cta_(cta), number_(static_cast<int>(blockIdx.x) / config.cluster) {
    number_ -= step();
  }

  bool next() {
    number_ += step();
    return number_ < shape_.work_tiles;
  }

  WorkTile work_tile() const { return Tiles::work_tile(shape_, number_, cta_); }
  int k_tiles() const { return Tiles::k_tiles(shape_, number_); }
  int columns() const { return 0; }
  int skipped_k() const { return 0; }

  void request() const {}
  void release() const {}

 private:
  static int step() { return static_cast<int>(gridDim.x) / config.cluster; }

  const WgmmaShape& shape_;
  int cta_;
  int number_;
};

}  // namespace tilekern

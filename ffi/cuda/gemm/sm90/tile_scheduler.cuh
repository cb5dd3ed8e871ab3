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
//   kMirrors                       whether the output is symmetric
//   is_mirrored(work)              whether a tile is stored transposed, too; false unless kMirrors
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
  static constexpr bool kMirrors = false;

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

  static bool is_mirrored(const WorkTile&) { return false; }
};

// The work tiles of a symmetric output: those of the blocks on and below its diagonal. A block is
// square, of one tile or two.
template <WgmmaConfig config>
struct SymmetricTiles {
  static constexpr bool kMirrors = true;
  static constexpr int kBlock = max_of(config.block_m, config.block_n);
  static constexpr int kTilesM = kBlock / config.block_m, kTilesN = kBlock / config.block_n;
  static_assert(config.cluster == 1 && !config.pair);
  static_assert(kTilesM * config.block_m == kBlock && kTilesN * config.block_n == kBlock);

  static WorkTile work_tile(const WgmmaShape& shape, int number, int) {
    const int rows = (shape.m + kBlock - 1) / kBlock;
    const int part = number % (kTilesM * kTilesN), block = number / (kTilesM * kTilesN);
    const int blocks = shape.work_tiles / (shape.batches * kTilesM * kTilesN);
    const TileCoordinates at = block_at(block % blocks, rows, shape.raster_height);
    WorkTile work;
    work.m = at.m * kBlock + part % kTilesM * config.block_m;
    work.n = at.n * kBlock + part / kTilesM * config.block_n;
    work.k = 0;
    set_batch(work, shape, block / blocks);
    return work;
  }

  static int k_tiles(const WgmmaShape& shape, int) { return shape.k_tiles; }
  static bool is_mirrored(const WorkTile& work) { return work.m / kBlock != work.n / kBlock; }

 private:
  // Block `number` of the triangle. Bands of `height` rows of blocks come one after the other. In a
  // band the columns do, each from the top, or from the diagonal.
  static TileCoordinates block_at(int number, int rows, int height) {
    // The row of the number, if rows came one after the other, is in the same band.
    int row = static_cast<int>((sqrtf(8.0f * number + 1.0f) - 1.0f) * 0.5f);
    while (before_row(row) > number) --row;
    while (before_row(row + 1) <= number) ++row;
    const int first = row / height * height;
    int within = number - static_cast<int>(before_row(first));
    int left = min_of(height, rows - first);
    if (within < (first + 1) * left) return {first + within % left, within / left};
    within -= (first + 1) * left;
    int column = first + 1;
    for (--left; within >= left; ++column, --left) within -= left;
    return {column + within, column};
  }
  static int64 before_row(int row) { return static_cast<int64>(row) * (row + 1) / 2; }
};

// A cluster computes every gridDim-th work tile. Each scheduler counts for itself.
template <WgmmaConfig config, class Tiles = DenseTiles<config>>
class StaticPersistentScheduler {
 public:
  static constexpr bool kMirrors = Tiles::kMirrors;
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
  static bool is_mirrored(const WorkTile& work) { return Tiles::is_mirrored(work); }

  void request() const {}
  void release() const {}

 private:
  static int step() { return static_cast<int>(gridDim.x) / config.cluster; }

  const WgmmaShape& shape_;
  int cta_;
  int number_;
};

}  // namespace tilekern

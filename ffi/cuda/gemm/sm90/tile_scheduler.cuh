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
//   int rows()                     how many rows are, of the CTA's tile; beyond it if all are
//   int skipped_k()                how many elements of its first k-tile are not its own
//   void request()                 by the producer thread, once before each next(): the next work
//                                  tile will be needed soon
//   void release()                 by all consumer threads, after the last look at a work tile
//   static void schedule(params)   by one more thread of the cluster's first CTA, if kDynamic:
//                                  answers the requests
//   kDynamic                       whether a thread has to find the work tiles
//   kPartialN                      whether columns() counts: the tile may need a part of rhs
//   kPartialM                      whether rows() counts, or k_tiles() may be 0
//   kPartialK                      whether skipped_k() counts, or k_tiles() may be 0
//   kMirrors                       whether the output is symmetric, and its tiles are those that
//                                  reach the diagonal or are below it
//   kColumnStep                    the producer loads and the consumers multiply columns of a
//                                  partial tile in multiples of it; otherwise it is block_n. Each
//                                  number of columns has code of its own and takes registers, so
//                                  steps are longer where accumulators are promoted
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
  static_assert(config.cluster == 1);

  static WorkTile work_tile(const WgmmaShape& shape, int number) {
    const int tiles = shape.tiles_m * shape.tiles_n;
    const int stacked = number / tiles;
    const TileCoordinates tile =
        rasterized_tile(number % tiles, shape.tiles_m, shape.tiles_n, shape.raster_height);
    WorkTile work;
    work.m = tile.m * config.out_m();
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

// The work tiles of a symmetric output: those with an element on or below its diagonal. TileStore
// mirrors what is below it.
template <WgmmaConfig config>
struct SymmetricTiles {
  static constexpr bool kMirrors = true;
  static_assert(config.cluster == 1 && !config.pair && !config.lhs_pair);

  static WorkTile work_tile(const WgmmaShape& shape, int number) {
    const int tiles = shape.work_tiles / shape.batches;
    const TileCoordinates at = tile_at(number % tiles, shape.tiles_m, shape.raster_height);
    WorkTile work;
    work.m = at.m * config.block_m;
    work.n = at.n * config.block_n;
    work.k = 0;
    set_batch(work, shape, number / tiles);
    return work;
  }

  static int k_tiles(const WgmmaShape& shape, int) { return shape.k_tiles; }

 private:
  // A column of tiles is kColumn / kRow rows of tiles wide.
  static constexpr int kDivisor = gcd(config.block_m, config.block_n);
  static constexpr int kRow = config.block_m / kDivisor, kColumn = config.block_n / kDivisor;

  // Groups of `height` rows of tiles come one after the other. In a group the columns do, each from
  // the top, or from the diagonal. Tiles of the last row that are beyond the output come last.
  static TileCoordinates tile_at(int number, int rows, int height) {
    // The row of the number, if rows came one after the other, is in the same group.
    int row = static_cast<int>(sqrtf(2.0f * kColumn / kRow * number));
    while (before_row(row) > number) --row;
    while (before_row(row + 1) <= number) ++row;
    const int first = row / height * height;
    int within = number - static_cast<int>(before_row(first));
    const int last = min_of(first + height, rows), whole_columns = columns_of(first);
    if (within < whole_columns * (last - first)) {
      return {first + within % (last - first), within / (last - first)};
    }
    within -= whole_columns * (last - first);
    for (int column = whole_columns;; ++column) {
      const int top = column * kColumn / kRow;
      if (within < last - top) return {top + within, column};
      within -= last - top;
    }
  }

  static int columns_of(int row) { return ((row + 1) * kRow + kColumn - 1) / kColumn; }

  // The number of tiles in rows before this one. kColumn rows on, a row has kRow more.
  static int64 before_row(int row) {
    const int64 periods = row / kColumn;
    int64 tiles = periods * (periods - 1) / 2 * kRow * kColumn;
#pragma unroll
    for (int i = 0; i < kColumn; ++i) {
      tiles += periods * columns_of(i);
      if (i < row % kColumn) tiles += periods * kRow + columns_of(i);
    }
    return tiles;
  }
};

// A CTA computes every gridDim-th work tile. Each scheduler counts for itself.
template <WgmmaConfig config, class Tiles = DenseTiles<config>>
class StaticPersistentScheduler {
 public:
  static constexpr bool kMirrors = Tiles::kMirrors;
  static constexpr bool kDynamic = false;
  static constexpr bool kPartialM = false;
  static constexpr bool kPartialN = false;
  static constexpr bool kPartialK = false;
  static constexpr int kColumnStep = config.block_n;

  struct Params {
    const WgmmaShape& shape;

    void prepare(unsigned char*) const {}
  };

  StaticPersistentScheduler(const Params& params, int)
      : shape_(params.shape), number_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {}

  bool next() {
    number_ += static_cast<int>(gridDim.x);
    return number_ < shape_.work_tiles;
  }

  WorkTile work_tile() const { return Tiles::work_tile(shape_, number_); }
  int k_tiles() const { return Tiles::k_tiles(shape_, number_); }
  int columns() const { return 0; }
  int rows() const { return config.out_m(); }
  int skipped_k() const { return 0; }

  void request() const {}
  void release() const {}

 private:
  const WgmmaShape& shape_;
  int number_;
};

}  // namespace tilekern

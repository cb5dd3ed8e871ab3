// Which work tiles a grouped GEMM has: only the device knows how many there are.
#pragma once

#include "gemm/sm90/dynamic_tile_scheduler.cuh"
#include "grouped_gemm/groups.cuh"

namespace tilekern {

// The ragged dimension, as the kernel has it: columns of the output, of which a tile takes as many
// as a group has for it, rows, of which a group's last tile stores its own, or the contracted one.
enum class Ragged { kM, kN, kK };

// The tiles of a dynamic scheduler (see gemm/sm90/dynamic_tile_scheduler.cuh), which differ in
// their work.
template <WgmmaConfig config, Ragged ragged, int column_step, int tma_column_step, int tma_columns>
class GroupedTiles {
  static constexpr int kClusterM = config.cluster * config.out_m();
  static_assert(column_step % tma_column_step == 0 && tma_columns % tma_column_step == 0);

 public:
  static constexpr bool kMirrors = false;
  static constexpr bool kPartialM = ragged == Ragged::kM;
  static constexpr bool kPartialN = ragged == Ragged::kN;
  static constexpr bool kPartialK = ragged == Ragged::kK;
  static constexpr int kColumnStep = column_step;
  static constexpr int kTmaColumnStep = tma_column_step;
  static constexpr int kTmaColumns = tma_columns;

  GroupedTiles(const WgmmaShape& shape, const GroupShape& groups, const int32* bounds)
      : shape_(shape), groups_(groups), bounds_(bounds) {}

  // `shared` has room for the number of each span's first tile.
  void prepare(unsigned char* shared) {
    first_tiles_ = reinterpret_cast<int32*>(shared);
    if (kPartialM) number_tiles(groups_, bounds_, kClusterM, first_tiles_);
    if (kPartialN) number_tiles(groups_, bounds_, config.block_n, first_tiles_);
  }

  int count() const {
    if constexpr (kPartialK) return shape_.batches * shape_.tiles_m * shape_.tiles_n;
    return first_tiles_[groups_.spans()] * tiles_across();
  }

  int most() const { return shape_.work_tiles; }

  ScheduledTile find(int number) const {
    if constexpr (kPartialK) {
      return tile_of_group(number);
    } else {
      return tile_of_span(number);
    }
  }

 private:
  // Every group has an output of its own.
  ScheduledTile tile_of_group(int number) const {
    ScheduledTile scheduled;
    WorkTile& work = scheduled.work;
    const int tiles = shape_.tiles_m * shape_.tiles_n;
    const int stacked = number / tiles;
    const TileCoordinates tile =
        rasterized_tile(number % tiles, shape_.tiles_m, shape_.tiles_n, shape_.raster_height);
    const Span span =
        group_span(groups_, bounds_, stacked / groups_.groups, stacked % groups_.groups);
    scheduled.k_tiles = (span.rows() + config.block_k - 1) / config.block_k;
    work.m = tile.m * kClusterM;
    work.n = tile.n * config.block_n;
    // The last k-tile ends where the group does, so the first one may begin before it.
    work.k = span.end - scheduled.k_tiles * config.block_k;
    scheduled.partial = span.begin - work.k;
    set_batch(work, shape_, stacked);
    return scheduled;
  }

  // The tiles side by side for each tile of ragged rows or columns.
  int tiles_across() const { return kPartialM ? shape_.tiles_n : shape_.tiles_m; }

  // All groups share the output.
  ScheduledTile tile_of_span(int number) const {
    ScheduledTile scheduled;
    WorkTile& work = scheduled.work;
    const int index = span_of_tile(first_tiles_, groups_.spans(), number / tiles_across());
    const int first = first_tiles_[index];
    const int tiles = first_tiles_[index + 1] - first;
    const TileCoordinates tile =
        rasterized_tile(number - first * tiles_across(), kPartialM ? tiles : shape_.tiles_m,
                        kPartialM ? shape_.tiles_n : tiles, shape_.raster_height);
    const Span span = span_at(groups_, bounds_, index);
    scheduled.k_tiles = span.is_group() ? shape_.k_tiles : 0;
    work.k = 0;
    if constexpr (kPartialM) {
      work.m = span.begin + tile.m * kClusterM;
      work.n = tile.n * config.block_n;
      scheduled.partial = span.end - work.m;
    } else {
      // The span's column steps are dealt out evenly to its tiles, so that none is left with few.
      const int steps = (span.rows() + kColumnStep - 1) / kColumnStep;
      const int before = tile.n * (steps / tiles) + min_of(tile.n, steps % tiles);
      const int own = steps / tiles + (tile.n < steps % tiles);
      work.m = tile.m * kClusterM;
      work.n = span.begin + before * kColumnStep;
      scheduled.partial = min_of(own * kColumnStep, span.end - work.n);
    }
    set_batch(work, shape_, span.batch * groups_.groups + max_of(span.group, 0));
    work.out_batch[kMaxTmaBatchDims - 1] = 0;
    return scheduled;
  }

  const WgmmaShape& shape_;
  const GroupShape& groups_;
  const int32* bounds_;
  int32* first_tiles_ = nullptr;
};

}  // namespace tilekern

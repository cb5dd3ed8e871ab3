// Tiled transposes of arrays of any size and alignment.
#pragma once

#include "transpose/items.cuh"

namespace tilekern {

// Compile-time choices; `tile_transpose` in `plans/transpose/candidate.py` makes them.
struct TileConfig {
  int item_bytes;
  // The tile, in items.
  int rows;
  int columns;
  // Whether all rows of the source are aligned to 16 bytes, and all rows of the result to a sector.
  bool source_aligned;
  bool result_aligned;
};

inline constexpr int kTileThreads = 256;
// The granularity of DRAM and L2 accesses.
inline constexpr int kSectorBytes = 32;

// `tile_transpose` packs the same fields. Strides are in bytes.
struct TileShape {
  TileGrid grid;
  // The distance between rows in shared memory.
  uint32 pitch;
  int64 rows;
  int64 columns;
  // The distance between rows of the source, and between rows of the result.
  int64 row_stride;
  int64 column_stride;
  // The size of the source.
  int64 source_bytes;
  OuterDims outer;
};

extern __shared__ __align__(128) unsigned char transpose_tiles_shared[];

// A CTA copies a tile to shared memory by asynchronous copies of aligned 16-byte chunks, and writes
// it in aligned 16-byte vectors, each gathered item by item. Where rows of the result are
// unaligned, the tile's rows shift from column to column, so that the tile is cut at sector
// boundaries: a sector that two CTAs or two instructions write in part costs L2 more than reading
// the `halo` of rows twice.
//
// The pitch of shared memory gives an item the same place in its chunk as in the source.
//
// An SM holds many CTAs, which overlap each other's loads and stores.
template <TileConfig config>
class TileTransposer {
  static constexpr int kItemBytes = config.item_bytes;
  static constexpr int kVectorItems = 16 / kItemBytes;
  static constexpr int kHalo = config.result_aligned ? 0 : kSectorBytes / kItemBytes - 1;
  static constexpr int kLoadedRows = config.rows + kHalo;
  static constexpr int kRowBytes = config.columns * kItemBytes;
  // Chunks of an aligned row; an unaligned row takes one more.
  static constexpr int kChunks = kRowBytes / 16;
  // Groups of eight vectors in a column.
  static constexpr int kEights = config.rows / kVectorItems / 8;
  static_assert(config.rows % (8 * kVectorItems) == 0 && config.columns % 4 == 0);
  static_assert(kTileThreads % kChunks == 0);

 public:
  TileTransposer(const char* source, char* result, const TileShape& shape) : shape_(shape) {
    const TilePosition at = tile_position(shape.grid, blockIdx.x);
    const OuterOffsets offsets = outer_offsets(shape.outer, at.outer);
    const int64 first_row = static_cast<int64>(at.row) * config.rows - kHalo;
    const int64 first_column = static_cast<int64>(at.column) * config.columns;
    begin_ = kHalo == 0 ? 0 : static_cast<int>(max_of<int64>(-first_row, 0));
    end_ = static_cast<int>(min_of<int64>(shape.rows - first_row, kLoadedRows));
    columns_ = static_cast<int>(min_of<int64>(config.columns, shape.columns - first_column));
    source_end_ = source + shape.source_bytes;
    source_ = source + offsets.source + first_row * shape.row_stride + first_column * kItemBytes;
    result_ = result + offsets.result + first_column * shape.column_stride + first_row * kItemBytes;
    misalignment_ = config.source_aligned ? 0 : misalignment(source_);
  }

  void run() const {
    load();
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    store();
  }

 private:
  // Returns the position of a row's first item in shared memory. Lanes gather vectors that start
  // kVectorItems rows apart. One chunk of padding there makes the distance an odd number of chunks,
  // so that eight vectors are in different banks; the pitch of unaligned rows is usually odd
  // anyway.
  uint32 row_start(uint32 row) const {
    constexpr uint32 kPitch = 16 * (kVectorItems == 1 ? kChunks + kChunks % 2 : kChunks);
    if constexpr (config.source_aligned) return row * kPitch + row / kVectorItems * 16;
    return misalignment_ + row * shape_.pitch;
  }

  bool is_row(int row) const { return row >= begin_ && row < end_; }

  void load() const {
    constexpr int kRowStep = kTileThreads / kChunks;
    const int first = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
#pragma unroll 4
    for (int step = 0; step < (kLoadedRows + kRowStep - 1) / kRowStep; ++step) {
      load(first + step * kRowStep, chunk);
    }
    if constexpr (!config.source_aligned) {
#pragma unroll 1
      for (int row = threadIdx.x; row < kLoadedRows; row += kTileThreads) load(row, kChunks);
    }
  }

  void load(int row, int chunk) const {
    const uint32 start = row_start(row);
    // The offset from the row's first item.
    const int offset = 16 * chunk - static_cast<int>(config.source_aligned ? 0 : start % 16);
    if (!is_row(row) || offset >= columns_ * kItemBytes) return;
    const uint32 destination = shared_address(transpose_tiles_shared) + start + offset;
    const char* source = source_ + row * shape_.row_stride + offset;
    if constexpr (config.source_aligned) {
      cp_async<16>(destination, source, true);
    } else {
      copy_chunk(destination, source, source_end_);
    }
  }

  void store() const {
    // A warp stores eight consecutive vectors in each of four rows of the result.
    constexpr uint32 kWarps = kTileThreads / 32, kGroups = kEights * (config.columns / 4);
    const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll max_of(1, kItemBytes / 2)
    for (uint32 step = 0; step < (kGroups + kWarps - 1) / kWarps; ++step) {
      const uint32 group = warp + step * kWarps;
      if (kGroups % kWarps == 0 || group < kGroups) {
        store(group % kEights * 8 + lane % 8, group / kEights * 4 + lane / 8);
      }
    }
  }

  void store(uint32 vector, int column) const {
    if (column >= columns_) return;
    char* result = result_ + column * shape_.column_stride;
    uint32 row = vector * kVectorItems;
    // The vector starts at the first whole sector.
    if constexpr (kHalo != 0)
      row += -static_cast<uint32>(reinterpret_cast<uint64>(result)) % kSectorBytes / kItemBytes;
    uint32 words[4];
    gather<kItemBytes>(words, transpose_tiles_shared + row_start(row) + column * kItemBytes,
                       [&](int i) { return row_start(row + i) - row_start(row); });
    result += row * kItemBytes;
    const int first = row;
    if (is_row(first) && first + kVectorItems <= end_) {
      store_words(result, words);
    } else if constexpr (kHalo != 0) {
      store_some<kItemBytes>(result, words, begin_ - first, end_ - first);
    }
  }

  const TileShape& shape_;
  const char* source_;
  const char* source_end_;
  char* result_;
  // The range of loaded rows that exist.
  int begin_;
  int end_;
  int columns_;
  uint32 misalignment_;
};

template <TileConfig config>
__global__ void __launch_bounds__(kTileThreads)
    transpose_tiles(const char* __restrict__ source, char* __restrict__ result,
                    const __grid_constant__ TileShape shape) {
  TileTransposer<config>(source, result, shape).run();
}

}  // namespace tilekern

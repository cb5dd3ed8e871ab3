// Transposes of arrays of any size, whose rows start anywhere.
#pragma once

#include "transpose/items.cuh"

namespace tilekern {

// Compile-time choices; `TileTranspose` in `plans/transpose/tiles.py` makes them.
struct TileConfig {
  int item_bytes;
  // Of a tile, in items.
  int rows;
  int columns;
  // Whether all rows of the source start at multiples of 16 bytes, and whether all those of the
  // result do at multiples of a sector.
  bool source_aligned;
  bool result_aligned;
};

inline constexpr int kTileThreads = 256;
// Of what memory reads and writes.
inline constexpr int kSectorBytes = 32;

// `TileTranspose` packs the same fields. Strides are in bytes.
struct TileShape {
  TileGrid grid;
  // Between rows in shared memory.
  uint32 pitch;
  int64 rows;
  int64 columns;
  // Between rows of the source, and between rows of the result.
  int64 row_stride;
  int64 column_stride;
  // Of all of the source.
  int64 source_bytes;
  OuterDims outer;
};

extern __shared__ __align__(128) unsigned char transpose_tiles_shared[];

// A block copies a tile to shared memory by the aligned 16-byte chunks that hold it, all at once
// and in the background, and writes it in aligned 16-byte vectors, each gathered item by item.
// Where rows of the result start anywhere, the tile's rows in that column shift, so that it is cut
// at the border of a sector: sectors that two blocks, or two instructions, write parts of cost the
// second-level cache more than the `halo` of rows that is read for it.
//
// Rows of shared memory are so far apart that an item has the same place in a chunk there as in the
// source.
//
// Blocks overlap each other's loads and stores, for which many fit on a multiprocessor.
template <TileConfig config>
class TileTransposer {
  static constexpr int kItemBytes = config.item_bytes;
  static constexpr int kVectorItems = 16 / kItemBytes;
  static constexpr int kHalo = config.result_aligned ? 0 : kSectorBytes / kItemBytes - 1;
  static constexpr int kLoadedRows = config.rows + kHalo;
  static constexpr int kRowBytes = config.columns * kItemBytes;
  // Of a row, without the one more that a row takes that starts anywhere.
  static constexpr int kChunks = kRowBytes / 16;
  // Vectors of a column, by eights.
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
  // Where a row's first item is in shared memory. Vectors that are gathered side by side start
  // kVectorItems rows apart. Another chunk is left out there, so that it is an odd number of chunks
  // and eight vectors are in different banks; where rows start anywhere it mostly is one anyway.
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
    // From the row's first item.
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
    // Of a warp's vectors, eight follow one another in each of four rows of the result.
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
    // The first whole sector.
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
  // Of the loaded rows, those that there are.
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

// Matrices and rows that an epilogue reads, through the stages of the mainloop's pipeline.
//
// After the k-tiles of a work tile, the producer loads the elements that the epilogue reads, by TMA
// and a few columns at a time. Their latency is hidden as that of operands is, and threads read
// them from shared memory in the layout of their accumulators. An epilogue with staged operands
// (epilogue.cuh: kStagedColumns is not 0) provides
//
//   kStagedColumns     columns of the output tile that a stage has
//   staged_bytes()     what they take
//   load(to, work, column, full)   by the producer thread: starts the loads of the columns from
//                      `column` of the work tile on, to a stage whose full barrier is `full`
//   prefetch(work, column)         by the producer thread: prefetches the same to L2
//
// and is called with StagedCoordinates, once for the columns of each stage.
#pragma once

#include "gemm/sm90/config.cuh"
#include "gemm/sm90/epilogue.cuh"
#include "ptx.cuh"
#include "tma.cuh"

namespace tilekern {

// Loads two adjacent elements.
template <typename T>
inline void load_pair(T* elements, uint32 address) {
  using Pair = Select<sizeof(T) == 1, uint16, Select<sizeof(T) == 2, uint32, uint64>>;
  const Pair pair = load_shared_as<Pair>(address);
  memcpy(elements, &pair, sizeof(pair));
}

// The elements of kRows rows and kColumns columns in shared memory: chunks of columns, each with a
// row of up to 128 bytes for each row of the matrix, in TMA's swizzle of so many bytes.
template <typename T, int kRows, int kColumns>
struct StagedTile {
  static constexpr int kRowBytes = min_of(128, kColumns* static_cast<int>(sizeof(T)));
  static constexpr int kChunkColumns = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kChunkBytes = kRows * kRowBytes;
  static constexpr int kBytes = kColumns / kChunkColumns * kChunkBytes;
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  static_assert(kColumns % kChunkColumns == 0 && kChunkBytes % 1024 == 0);

  static void load(uint32 to, const TensorMap& map, TmaCoordinates from, uint32 full) {
#pragma unroll 1
    for (int chunk = 0; chunk < kColumns / kChunkColumns; ++chunk) {
      tma_load(to, map, from, full);
      to += kChunkBytes;
      from.at[0] += kChunkColumns;
    }
  }

  static void prefetch(const TensorMap& map, TmaCoordinates from) {
#pragma unroll 1
    for (int chunk = 0; chunk < kColumns / kChunkColumns; ++chunk) {
      tma_prefetch(map, from);
      from.at[0] += kChunkColumns;
    }
  }

  // Reads the elements of accumulators `first` and on of an MMA whose rows in the tile begin at
  // `row`.
  template <class Layout, int kCount>
  static void read(T (&elements)[kCount], uint32 tile, int row, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      // Only bits within a row differ between the blocks of 8 columns that accumulators belong to.
      const int own = swizzled((row + Layout::row(lane, i)) * kRowBytes +
                               lane % 4 * 2 * static_cast<int>(sizeof(T)));
      const int byte = (first + i) / 4 * 8 * static_cast<int>(sizeof(T));
      const uint32 address = ((tile + own) ^ byte % kRowBytes) + byte / kRowBytes * kChunkBytes;
      load_pair(&elements[i], address);
    }
  }

 private:
  // A swizzle of 2^n rows of 16 bytes XORs bits 4 and on of an address with bits 7 and on.
  static constexpr int swizzled(int byte) { return byte ^ (byte >> 3 & (kRowBytes - 16)); }
};

// The elements of a row that all rows of the matrix share. kColumns is 256 at most.
template <typename T, int kColumns>
struct StagedRow {
  static constexpr int kBytes = kColumns * static_cast<int>(sizeof(T));
  static_assert(kColumns <= 256 && kBytes % 128 == 0);

  static void load(uint32 to, const TensorMap& map, const TmaCoordinates& from, uint32 full) {
    tma_load(to, map, from, full);
  }
  static void prefetch(const TensorMap& map, const TmaCoordinates& from) {
    tma_prefetch(map, from);
  }

  template <class Layout, int kCount>
  static void read(T (&elements)[kCount], uint32 tile, int, int first) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int column = (first + i) / 4 * 8 + threadIdx.x % 4 * 2;
      load_pair(&elements[i], tile + column * static_cast<int>(sizeof(T)));
      // Accumulators of the MMA's other rows are in the same columns.
      elements[i + 2] = elements[i];
      elements[i + 3] = elements[i + 1];
    }
  }
};

// The coordinates of the accumulators whose columns a stage has.
template <bool kPairedRows>
struct StagedCoordinates : WgmmaCoordinates<kPairedRows> {
  using Base = WgmmaCoordinates<kPairedRows>;

  // The first of these columns in the work tile.
  int first_column;
  uint32 stage;

  int column(int i) const { return first_column + Base::column(i); }

  // Reads the elements of a tile that is kOffset bytes behind the stage's first one.
  template <class Tile, int kOffset, typename T, int kCount>
  void read(T (&elements)[kCount], int first) const {
    Tile::template read<typename Base::Layout>(elements, stage + kOffset, this->tile_row, first);
  }
};

}  // namespace tilekern

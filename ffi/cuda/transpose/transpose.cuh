// Tiled transposes of arrays of any size and alignment. A permutation exchanges the dimension that
// is innermost in the result ("rows") with the one that is innermost in the source ("columns"); all
// others are "outer" dimensions. Items are uninterpreted bytes.
#pragma once

#include "ptx.cuh"

namespace tilekern {

inline constexpr int kTransposeThreads = 256;
inline constexpr int kMaxOuterDims = 6;
// The granularity of DRAM and L2 accesses.
inline constexpr int kSectorBytes = 32;

// `TransposeCandidate` in `plans/transpose/select.py` packs the same fields. Strides are in bytes.
struct TransposeShape {
  // The outer dimensions; unused ones come first with size 1.
  int64 source_strides[kMaxOuterDims];
  int64 result_strides[kMaxOuterDims];
  int64 rows;
  int64 columns;
  // The distance between rows of the source, and between rows of the result.
  int64 row_stride;
  int64 column_stride;
  int64 source_bytes;
  uint32 sizes[kMaxOuterDims];
  // Tiles of a matrix, and columns of tiles in a band.
  uint32 row_tiles;
  uint32 column_tiles;
  uint32 band;
  // The distance between unaligned rows in shared memory.
  uint32 pitch;
};

extern __shared__ __align__(128) unsigned char transpose_shared[];

// A CTA copies a tile to shared memory by asynchronous copies of aligned 16-byte chunks. Rows in
// shared memory have the source's distance modulo 16 bytes, so an item has the same place in its
// chunk in both. The CTA writes vectors of 16 bytes, gathered item by item. Vectors start at
// sectors of the result: the tile's rows shift from column to column, because a sector that two
// CTAs write in part costs L2 more than reading the `halo` of rows twice. kAligned says that all
// rows of the source start at multiples of 16 bytes.
template <int kItemBytes, bool kAligned>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_tiles(const char* __restrict__ source, char* __restrict__ result,
                    const __grid_constant__ TransposeShape shape) {
  using Item = WordOf<kItemBytes>;
  constexpr int kVectorItems = 16 / kItemBytes;
  constexpr int kRows = 256 / kItemBytes;
  constexpr int kColumns = min_of(kRows, 128);
  constexpr int kHalo = kSectorBytes / kItemBytes - 1;
  constexpr int kLoadedRows = kRows + kHalo;
  // A row that is not aligned touches one chunk more.
  constexpr int kChunks = kColumns * kItemBytes / 16 + (kAligned ? 0 : 1);

  // CTAs walk down bands of a few columns of tiles, so that concurrent CTAs write contiguous parts
  // of the result.
  const uint32 tiles = shape.row_tiles * shape.column_tiles;
  const uint32 tile = blockIdx.x % tiles;
  const uint32 first = tile / (shape.row_tiles * shape.band) * shape.band;
  const uint32 width = min_of(shape.band, shape.column_tiles - first);
  const uint32 in_band = tile - first * shape.row_tiles;
  const int64 first_row = static_cast<int64>(in_band / width) * kRows - kHalo;
  const int64 first_column = static_cast<int64>(first + in_band % width) * kColumns;

  const char* const source_end = source + shape.source_bytes;
  source += first_row * shape.row_stride + first_column * kItemBytes;
  result += first_column * shape.column_stride + first_row * kItemBytes;
  uint32 rest = blockIdx.x / tiles;
#pragma unroll 1
  for (int dim = kMaxOuterDims - 1; rest > 0; --dim) {
    const int64 index = rest % shape.sizes[dim];
    source += index * shape.source_strides[dim];
    result += index * shape.result_strides[dim];
    rest /= shape.sizes[dim];
  }

  // The range of loaded rows that exist, and the number of columns.
  const int begin = static_cast<int>(max_of<int64>(-first_row, 0));
  const int end = static_cast<int>(min_of<int64>(shape.rows - first_row, kLoadedRows));
  const int columns = static_cast<int>(min_of<int64>(kColumns, shape.columns - first_column));
  const uint32 misalignment = static_cast<uint32>(reinterpret_cast<uint64>(source)) % 16;
  const auto row_start = [&](uint32 row) {
    // Lanes gather vectors that start kVectorItems rows apart. A chunk of padding there puts eight
    // vectors of aligned rows into different banks; the pitch of others is usually odd anyway.
    if constexpr (kAligned) return row * kColumns * kItemBytes + row / kVectorItems * 16;
    return misalignment + row * shape.pitch;
  };

#pragma unroll 4
  for (int i = threadIdx.x; i < kLoadedRows * kChunks; i += kTransposeThreads) {
    const int row = i / kChunks;
    const uint32 start = row_start(row);
    // The offset of the chunk from the row's first item.
    const int offset = i % kChunks * 16 - static_cast<int>(start % 16);
    if (row < begin || row >= end || offset >= columns * kItemBytes) continue;
    const char* chunk = source + row * shape.row_stride + offset;
    cp_async_partly(shared_address(transpose_shared) + start + offset, chunk,
                    static_cast<int>(min_of<int64>(source_end - chunk, 16)));
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  // A warp stores eight consecutive vectors in each of four rows of the result.
  constexpr uint32 kEights = kRows / kVectorItems / 8;
  const uint32 lane = threadIdx.x % 32;
#pragma unroll max_of(1, kItemBytes / 2)
  for (uint32 group = threadIdx.x / 32; group < kEights * (kColumns / 4);
       group += kTransposeThreads / 32) {
    const int column = group / kEights * 4 + lane / 8;
    if (column >= columns) continue;
    char* to = result + column * shape.column_stride;
    const uint32 before = -static_cast<uint32>(reinterpret_cast<uint64>(to)) % kSectorBytes;
    const int row = (group % kEights * 8 + lane % 8) * kVectorItems + before / kItemBytes;
    to += row * kItemBytes;
    const auto item = [&](int i) {
      const uint32 start = row_start(row + i) + column * kItemBytes;
      return *reinterpret_cast<const Item*>(transpose_shared + start);
    };
    if (row >= begin && row + kVectorItems <= end) {
      alignas(16) Item items[kVectorItems];
#pragma unroll
      for (int i = 0; i < kVectorItems; ++i) items[i] = item(i);
      *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(items);
    } else {
#pragma unroll 1
      for (int i = max_of(begin - row, 0); i < min_of(end - row, kVectorItems); ++i) {
        reinterpret_cast<Item*>(to)[i] = item(i);
      }
    }
  }
}

}  // namespace tilekern

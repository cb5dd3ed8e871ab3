// Copies a strided operand to where every row of k starts on 128 bytes, for tensor maps, which do
// not take every stride.
#pragma once

#include "register_transpose.cuh"
#include "strided_rows.cuh"

namespace tilekern {

// Compile-time choices; `PackPass` in `plans/gemm/passes/pack_operand.py` makes them.
struct PackConfig {
  int item_bytes;
  // Whether the source's unit stride is along k, rather than along its lines.
  bool k_major;
};

inline constexpr int kPackThreads = 256;

// Run-time sizes; `PackPass` packs the same fields in the same order. Strides are in bytes.
struct PackShape {
  // What the packed rows are copied from, in their order. Lines are among the rows of a k-major
  // source only.
  StridedRows rows;
  // Between steps of k, unless k-major.
  int64 k_stride;
  RowTiling tiling;
  uint32 lines;
  uint32 k;
  // 16-byte vectors of a packed row.
  uint32 vectors;
  // Tiles of a matrix, unless k-major.
  uint32 tiles_lines;
  uint32 tiles_k;
};

// Each thread copies up to kCopies vectors of a row, the lanes of the row side by side.
template <PackConfig config>
class RowPacker {
 public:
  static constexpr int kCopies = 4;

  static void run(const char* source, uint4* packed, const PackShape& shape) {
    const RowPosition at = row_position<kPackThreads>(shape.tiling);
    if (at.row >= shape.rows.count) return;
    const char* row = source + row_offset(shape.rows, at.row);
    const char* end = row + static_cast<int64>(shape.k) * config.item_bytes;
    const int64 first = static_cast<int64>(at.segment) * kCopies * at.lanes + at.lane;

    Window<16, config.item_bytes> windows[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) windows[i].fetch(row + 16 * (first + i * at.lanes), end);
    packed += static_cast<int64>(at.row) * shape.vectors;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int64 vector = first + i * at.lanes;
      if (vector >= shape.vectors) break;
      uint32 words[4];
      windows[i].cut(words);
      keep_bytes(words, end - row - 16 * vector);
      store_global(packed + vector, words);
    }
  }
};

// Each thread transposes a few lines by as many steps of k as 16 bytes hold, in registers: it reads
// 16 bytes along lines (8 of 1-byte items, whose 16 steps would take all registers), and writes 16
// along k. Of a warp, neighbours along lines read 64 bytes in a row, and neighbours along k write
// 128 (64 of 1-byte items); the block's warps are a grid of 4 along lines and 2 along k.
template <PackConfig config>
class TilePacker {
  static constexpr int kReadBytes = config.item_bytes == 1 ? 8 : 16;
  static constexpr int kLines = kReadBytes / config.item_bytes;
  static constexpr int kSteps = 16 / config.item_bytes;
  static constexpr int kLineLanes = 64 / kReadBytes;
  static constexpr int kStepLanes = 32 / kLineLanes;
  static constexpr int kLineWarps = 4;
  static constexpr int kStepWarps = kPackThreads / 32 / kLineWarps;
  static constexpr int kTileLines = kLineWarps * kLineLanes * kLines;
  static constexpr int kTileVectors = kStepWarps * kStepLanes;

 public:
  static void run(const char* source, uint4* packed, const PackShape& shape) {
    const uint32 tiles = shape.tiles_lines * shape.tiles_k;
    const uint32 matrix = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32 line = tile / shape.tiles_k * kTileLines +
                        (warp % kLineWarps * kLineLanes + lane % kLineLanes) * kLines;
    const uint32 vector =
        tile % shape.tiles_k * kTileVectors + warp / kLineWarps * kStepLanes + lane / kLineLanes;
    if (line >= shape.lines || vector >= shape.vectors) return;
    const uint32 k = vector * kSteps;
    source += row_offset(shape.rows, matrix) + k * shape.k_stride;
    const int64 first = static_cast<int64>(line) * config.item_bytes;
    const int64 end = static_cast<int64>(shape.lines) * config.item_bytes;

    Window<kReadBytes, config.item_bytes> windows[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      // Beyond k is nothing to read, which gives zeros.
      const char* row = source + i * shape.k_stride;
      windows[i].fetch(row + first, row + (k + i < shape.k ? end : 0));
    }
    uint32 along_lines[kSteps][kReadBytes / 4], along_k[kLines][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) windows[i].cut(along_lines[i]);
    transpose<config.item_bytes>(along_k, along_lines);

    packed += (static_cast<int64>(matrix) * shape.lines + line) * shape.vectors + vector;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (line + i >= shape.lines) break;
      store_global(packed + static_cast<int64>(i) * shape.vectors, along_k[i]);
    }
  }
};

template <PackConfig config>
__global__ void __launch_bounds__(kPackThreads)
    pack_operand(const char* source, uint4* packed, const __grid_constant__ PackShape shape) {
  Select<config.k_major, RowPacker<config>, TilePacker<config>>::run(source, packed, shape);
}

}  // namespace tilekern

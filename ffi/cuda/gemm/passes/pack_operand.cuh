// Copies a strided operand to a workspace in which every row of k is aligned to 128 bytes, because
// tensor maps do not support every stride.
#pragma once

#include "register_transpose.cuh"
#include "strided_rows.cuh"

namespace tilekern {

// Compile-time choices; `PackPass` in `plans/gemm/passes/pack_operand.py` makes them.
struct PackConfig {
  int item_bytes;
  // Whether the source is contiguous along k, rather than along MN.
  bool k_major;
};

inline constexpr int kPackThreads = 256;

// Run-time sizes; `PackPass` packs the same fields in the same order. Strides are in bytes.
struct PackShape {
  // The sources of the packed rows, in their order. MN is among the dimensions of the rows of a
  // k-major source only.
  StridedRows rows;
  // The distance between elements along k, unless k-major.
  int64 k_stride;
  RowTiling tiling;
  uint32 mn;
  uint32 k;
  // 16-byte vectors per packed row.
  uint32 vectors;
  // Tiles per matrix, unless k-major.
  uint32 tiles_mn;
  uint32 tiles_k;
};

// Each thread copies up to kCopies vectors of a row; the lanes of a row are side by side.
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

// Each thread transposes a matrix of a few elements of MN by 16 bytes of k in registers. It reads
// 16 bytes along MN (8 for 1-byte items, whose 16 rows would take all registers), and writes 16
// along k. The lanes of a warp read 64 contiguous bytes along MN and write 128 along k (64 for
// 1-byte items). The warps of a CTA form a grid of 4 along MN by 2 along k.
template <PackConfig config>
class TilePacker {
  static constexpr int kReadBytes = config.item_bytes == 1 ? 8 : 16;
  static constexpr int kMn = kReadBytes / config.item_bytes;
  static constexpr int kSteps = 16 / config.item_bytes;
  static constexpr int kMnLanes = 64 / kReadBytes;
  static constexpr int kVectorLanes = 32 / kMnLanes;
  static constexpr int kMnWarps = 4;
  static constexpr int kVectorWarps = kPackThreads / 32 / kMnWarps;
  static constexpr int kTileMn = kMnWarps * kMnLanes * kMn;
  static constexpr int kTileVectors = kVectorWarps * kVectorLanes;

 public:
  static void run(const char* source, uint4* packed, const PackShape& shape) {
    const uint32 tiles = shape.tiles_mn * shape.tiles_k;
    const uint32 matrix = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32 mn =
        tile / shape.tiles_k * kTileMn + (warp % kMnWarps * kMnLanes + lane % kMnLanes) * kMn;
    const uint32 vector =
        tile % shape.tiles_k * kTileVectors + warp / kMnWarps * kVectorLanes + lane / kMnLanes;
    if (mn >= shape.mn || vector >= shape.vectors) return;
    const uint32 k = vector * kSteps;
    source += row_offset(shape.rows, matrix) + k * shape.k_stride;
    const int64 first = static_cast<int64>(mn) * config.item_bytes;
    const int64 end = static_cast<int64>(shape.mn) * config.item_bytes;

    Window<kReadBytes, config.item_bytes> windows[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      // Rows beyond k are zeros.
      const char* row = source + i * shape.k_stride;
      windows[i].fetch(row + first, row + (k + i < shape.k ? end : 0));
    }
    uint32 along_mn[kSteps][kReadBytes / 4], along_k[kMn][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) windows[i].cut(along_mn[i]);
    transpose<config.item_bytes>(along_k, along_mn);

    packed += (static_cast<int64>(matrix) * shape.mn + mn) * shape.vectors + vector;
#pragma unroll
    for (int i = 0; i < kMn; ++i) {
      if (mn + i >= shape.mn) break;
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

// One operand of a wgmma_matmul block: its tile in shared memory, and how products read it.
#pragma once

#include "ptx.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace tilekern {

inline constexpr int kTileRowBytes = 128;
inline constexpr int kStepBytes = 32;
inline constexpr int kStepsPerTile = kTileRowBytes / kStepBytes;

// "Lines" are rows of lhs or columns of rhs: the dimension that is not k. The tile has a row of 128
// bytes for each line, or unless k-major a row for each k in each chunk of lines; the copy engine
// swizzles it.
template <typename T, bool kMajorK, int kLines, int kBlockK>
struct WgmmaTile {
  static constexpr int kBytes = kLines * kTileRowBytes;
  static constexpr int kChunkLines = kMajorK ? kLines : kTileRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kChunks = kLines / kChunkLines;
  static constexpr int kChunkBytes = kBytes / kChunks;
  static constexpr int kStep = kStepBytes / static_cast<int>(sizeof(T));
  static_assert(kLines % kChunkLines == 0 && kBlockK * sizeof(T) == kTileRowBytes);

  // Where the box of chunk `chunk` of the lines from `line` on begins.
  static BoxOrigin box(int chunk, int line, int k, const int (&batch)[3]) {
    const int first = line + chunk * kChunkLines;
    return {{kMajorK ? k : first, kMajorK ? first : k, batch[2], batch[1], batch[0]}};
  }

  // The tile from a line on, for products; offset() selects a part by addition.
  static uint64 descriptor(uint32 line_address) {
    return operand_descriptor(line_address, kChunkBytes);
  }

  // To what a product reads from a line on in step `step` along k.
  static constexpr uint64 offset(int line, int step) {
    return (line_offset(line) + (kMajorK ? step * kStepBytes : step * kStep * kTileRowBytes)) /
           kDescriptorUnit;
  }

  // Of a line in the tile, in bytes.
  static constexpr int line_offset(int line) {
    return kMajorK ? line * kTileRowBytes : line / kChunkLines * kChunkBytes;
  }
};

// The lhs of a product from a tile that is not k-major, of a type of which wgmma reads only k-major
// tiles from shared memory. Rows 2g and 2g+1 of the warp's 16, side by side in memory, are taken as
// the product's rows g and 8+g.
template <typename T, class Tile>
class TransposedLhs {
 public:
  // `first_line` is the warp's first line in the tile.
  TransposedLhs(int first_line, int lane) {
    const int byte = first_line * static_cast<int>(sizeof(T));
    const int chunk = byte / kTileRowBytes * Tile::kChunkBytes;
    if constexpr (sizeof(T) == 1) {
      // Each of four 8x8 matrices of pairs of lines has eight rows of k. Lane t of a row gets
      // k = 4t to 4t+3 from two of them, for which the first two lanes get k = 4t, 4t+1 and the
      // others 4t+2, 4t+3 from the first matrix: then its rows are on eight different swizzles.
      const int matrix = lane / 8 % 2, row = lane % 8, t = row / 2;
      const int k = 16 * (lane / 16) + 4 * t + row % 2 + 2 * (matrix ^ t / 2);
      offset_ = chunk + swizzled(k, byte % kTileRowBytes);
      selector_ = lane % 4 < 2 ? 0x6420 : 0x2064;
    } else {
      const int g = lane / 4, t = lane % 4;
      offset_ = chunk + swizzled(t, byte % kTileRowBytes + 8 * g);
      selector_ = 0;
    }
  }

  // Loads the lines `line` behind the first ones, a multiple of 64.
  void load(uint32 (&words)[4], uint32 tile, int line, int step) const {
    // On bits that the unswizzled offset leaves 0.
    const uint32 lane_offset = offset_ ^ line * static_cast<int>(sizeof(T)) % kTileRowBytes;
    tile += line * static_cast<int>(sizeof(T)) / kTileRowBytes * Tile::kChunkBytes;
    if constexpr (sizeof(T) == 1) {
      uint32 pairs[4];
      load_matrices_transposed(pairs, tile + lane_offset + step * Tile::kStep * kTileRowBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        words[2 * half] = permute_bytes(pairs[2 * half], pairs[2 * half + 1], selector_);
        words[2 * half + 1] =
            permute_bytes(pairs[2 * half], pairs[2 * half + 1], selector_ + 0x1111);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Rows 4 apart differ in the swizzle's bit of 64 bytes.
        uint32 pair[2];
        load_shared(pair,
                    tile + (offset_ ^ 64 * half) + (step * Tile::kStep + 4 * half) * kTileRowBytes);
        // TF32 already: the type of the operand's tensor map has the copy engine round float32.
        words[2 * half] = pair[0];
        words[2 * half + 1] = pair[1];
      }
    }
  }

 private:
  static_assert(sizeof(T) == 1 || sizeof(T) == 4);
  static constexpr int swizzled(int row, int byte) {
    return row * kTileRowBytes + (byte ^ row % 8 * 16);
  }

  int offset_;
  uint32 selector_;
};

}  // namespace tilekern

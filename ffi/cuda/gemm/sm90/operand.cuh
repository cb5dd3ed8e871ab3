// Operands of the Hopper mainloop: their types on the way to the tensor cores, their tiles in
// shared memory, and fragments of lhs in registers.
#pragma once

#include "ptx.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace tilekern {

// The three types that an operand has on its way to the tensor cores. Each part of the mainloop
// reads the one that concerns it, and asserts what it needs of the others:
//   Storage  in global memory. The tensor map describes it; a producer by TMA copies bits, so there
//            Shared is the same. A producer that converts would write another Shared.
//   Shared   in a stage of the pipeline. The tile's layout in shared memory is of this type.
//   Mma      of the wgmma instruction. An operand that is read from shared memory has the same
//   Shared;
//            a fragment loader may convert an lhs that passes through registers.
template <typename StorageType, typename SharedType = StorageType, typename MmaType = SharedType>
struct OperandTypes {
  using Storage = StorageType;
  using Shared = SharedType;
  using Mma = MmaType;
};

inline constexpr int kTileRowBytes = 128;
// The k of one MMA.
inline constexpr int kMmaStepBytes = 32;
inline constexpr int kMmaStepsPerTile = kTileRowBytes / kMmaStepBytes;

// A k-tile of an operand in shared memory, of type T, with TMA's 128-byte swizzle. "MN" is M of lhs
// or N of rhs. A k-major tile has a row of 128 bytes for each position in MN. An MN-major one
// consists of chunks of 128 bytes of MN, and each chunk has a row for each k.
template <typename T, bool kMajorK, int kExtentMN, int kBlockK>
struct OperandTile {
  static constexpr int kBytes = kExtentMN * kTileRowBytes;
  static constexpr int kChunkMN = kMajorK ? kExtentMN : kTileRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kChunks = kExtentMN / kChunkMN;
  static constexpr int kChunkBytes = kBytes / kChunks;
  // The k of one MMA, in elements.
  static constexpr int kMmaStep = kMmaStepBytes / static_cast<int>(sizeof(T));
  static_assert(kExtentMN % kChunkMN == 0);
  static_assert(kBlockK * sizeof(T) == kTileRowBytes,
                "a narrower row has another swizzle, descriptor and MMA step");

  // Where TMA finds chunk `chunk` of the tile that starts at `mn`.
  static TmaCoordinates coordinates(int chunk, int mn, int k, const int (&batch)[3]) {
    const int first = mn + chunk * kChunkMN;
    return {{kMajorK ? k : first, kMajorK ? first : k, batch[2], batch[1], batch[0]}};
  }

  // The descriptor of the tile from `address` on; offset() is added to it.
  static uint64 descriptor(uint32 address) { return matrix_descriptor(address, kChunkBytes); }

  // The offset in a descriptor of what an MMA reads from `mn` on in MMA step `step`.
  static constexpr uint64 offset(int mn, int step) {
    return (mn_offset(mn) + (kMajorK ? step * kMmaStepBytes : step * kMmaStep * kTileRowBytes)) /
           kDescriptorUnit;
  }

  // In bytes.
  static constexpr int mn_offset(int mn) {
    return kMajorK ? mn * kTileRowBytes : mn / kChunkMN * kChunkBytes;
  }
};

// Loads fragments of lhs from an M-major tile of a type that wgmma reads from shared memory only if
// it is k-major. Rows 2g and 2g+1 of the warp's 16 rows, which are adjacent in memory, become rows
// g and 8+g of the MMA: the accumulators have paired rows (WgmmaCoordinates).
template <class Types, class Tile>
class TransposedLhsLoader {
  using T = typename Types::Shared;
  static_assert(sizeof(T) == 1 || sizeof(T) == 4);
  static_assert(kSame<T, typename Types::Mma>, "this loader does not convert");

 public:
  // `first_row` is the warp's first row in the tile.
  TransposedLhsLoader(int first_row, int lane) {
    const int byte = first_row * static_cast<int>(sizeof(T));
    const int chunk = byte / kTileRowBytes * Tile::kChunkBytes;
    if constexpr (sizeof(T) == 1) {
      // Each of four 8x8 matrices of pairs of rows of lhs has eight rows of k. Lane t of a row gets
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

  // Loads the fragment `row` rows below the first one, a multiple of 64.
  void load(uint32 (&words)[4], uint32 tile, int row, int step) const {
    // The XOR changes bits that are 0 in the unswizzled offset.
    const uint32 lane_offset = offset_ ^ row * static_cast<int>(sizeof(T)) % kTileRowBytes;
    tile += row * static_cast<int>(sizeof(T)) / kTileRowBytes * Tile::kChunkBytes;
    if constexpr (sizeof(T) == 1) {
      uint32 pairs[4];
      ldmatrix_trans(pairs, tile + lane_offset + step * Tile::kMmaStep * kTileRowBytes);
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
        load_shared(pair, tile + (offset_ ^ 64 * half) +
                              (step * Tile::kMmaStep + 4 * half) * kTileRowBytes);
        // These are TF32 already: the type of the operand's tensor map has TMA round float32.
        words[2 * half] = pair[0];
        words[2 * half + 1] = pair[1];
      }
    }
  }

 private:
  static constexpr int swizzled(int row, int byte) {
    return row * kTileRowBytes + (byte ^ row % 8 * 16);
  }

  int offset_;
  uint32 selector_;
};

}  // namespace tilekern

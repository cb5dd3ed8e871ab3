// One operand of a warp's MMAs: from a tile in shared memory to registers.
#pragma once

#include "gemm/sm80/shared_tile.cuh"
#include "ptx.cuh"

namespace tilekern {

// MN is the dimension that is not k: rows of lhs or columns of rhs. A warp's kWarp rows of MN form
// core matrices of 8, in which lane 4 * g + t holds row g (mma.cuh). Where memory is contiguous
// along MN (k-major is false) and ldmatrix cannot transpose the type, a lane reads kInterleave
// adjacent elements at once and distributes them to as many core matrices, so row g of core matrix
// c is not 8 * c + g of the tile but mn_index(c, g). For the output this is a permutation of rows
// or columns that the epilogue's addresses undo.
template <typename T, bool kLhs, bool kMajorK, int kBlock, int kBlockK, int kWarp>
class MmaOperand {
  enum class Access { kMatrices, kMatricesTransposed, kBytes, kFloats, kDoublesAlongK, kDoubles };

  static constexpr Access choose_access() {
    if (kMajorK) return sizeof(T) == 8 ? Access::kDoublesAlongK : Access::kMatrices;
    switch (sizeof(T)) {
      case 1:
        return Access::kBytes;
      case 2:
        return Access::kMatricesTransposed;
      case 4:
        return Access::kFloats;
      default:
        return Access::kDoubles;
    }
  }
  static constexpr Access kAccess = choose_access();

  static constexpr int kRowBytes = (kMajorK ? kBlockK : kBlock) * static_cast<int>(sizeof(T));

  static constexpr Swizzle choose_swizzle() {
    switch (kAccess) {
      case Access::kBytes:
        return swizzle_for_row_quads(4);
      case Access::kFloats:
        return swizzle_for_row_quads(1);
      case Access::kDoubles:
        return swizzle_for_row_quads(2);
      case Access::kDoublesAlongK:
        return kSwizzleForRowPairs;
      default:
        return swizzle_for_core_matrices(kRowBytes);
    }
  }

  static constexpr int choose_interleave() {
    switch (kAccess) {
      case Access::kBytes:
        return min_of(8, kCoreMatrices);
      case Access::kFloats:
        // The MMA needs two core matrices of lhs in adjacent registers, but the halves of one core
        // matrix of rhs, which are rows apart: wider loads would cost as many moves.
        return kLhs ? 2 : 1;
      case Access::kDoubles:
        return 2;
      default:
        return 1;
    }
  }

 public:
  static constexpr int kCoreMatrices = kWarp / 8;
  static constexpr int kInterleave = choose_interleave();
  // Elements of k that one MMA consumes.
  static constexpr int kStep = (sizeof(T) == 8 ? 64 : 32) / static_cast<int>(sizeof(T));

  using Tile = SharedTile<kMajorK ? kBlock : kBlockK, kRowBytes, choose_swizzle()>;
  using Register = Select<sizeof(T) == 8, double, uint32>;
  // The registers of each core matrix, for the two halves of a step.
  using Fragment = Register[kCoreMatrices][2];

  static_assert(kCoreMatrices % 2 == 0 && kBlock % kWarp == 0 && kBlockK % kStep == 0);
  static_assert(kAccess != Access::kBytes || kCoreMatrices >= 4,
                "bytes are transposed four by four");

  static constexpr int mn_index(int core, int g) {
    return core / kInterleave * (8 * kInterleave) + kInterleave * g + core % kInterleave;
  }

  // `first_mn` is the warp's first row of MN in the tile.
  MmaOperand(int first_mn, int lane) {
    const int g = lane / 4, t = lane % 4;
    const int first_byte = first_mn * static_cast<int>(sizeof(T));
    switch (kAccess) {
      case Access::kMatrices:
        lane_offset_ =
            Tile::offset(first_mn + matrix_core(lane) * 8 + lane % 8, matrix_half(lane) * 16);
        break;
      case Access::kMatricesTransposed:
        lane_offset_ =
            Tile::offset(matrix_half(lane) * 8 + lane % 8, first_byte + matrix_core(lane) * 16);
        break;
      case Access::kBytes:
        lane_offset_ = Tile::offset(4 * t, first_byte + kInterleave * g);
        break;
      case Access::kFloats:
        lane_offset_ = Tile::offset(t, first_byte + 4 * kInterleave * g);
        break;
      case Access::kDoubles:
        lane_offset_ = Tile::offset(2 * t, first_byte + 16 * g);
        break;
      case Access::kDoublesAlongK:
        lane_offset_ = Tile::offset(first_mn + g, 16 * t);
        break;
    }
  }

  // Loads the fragment of one step of the tile at `tile`, in memory's order until prepare().
  void load(Fragment& fragment, uint32 tile, int step) const {
    if constexpr (kAccess == Access::kMatrices) {
#pragma unroll
      for (int core = 0; core < kCoreMatrices; core += 2) {
        uint32 words[4];
        ldmatrix(words, at(tile, 32 * step) + 8 * core * kRowBytes);
        place_matrices(fragment, core, words);
      }
    } else if constexpr (kAccess == Access::kMatricesTransposed) {
#pragma unroll
      for (int core = 0; core < kCoreMatrices; core += 2) {
        uint32 words[4];
        ldmatrix_trans(words, at(tile, 16 * core) + kStep * step * kRowBytes);
        place_matrices(fragment, core, words);
      }
    } else if constexpr (kAccess == Access::kBytes) {
      load_bytes(fragment, tile, step);
    } else if constexpr (kAccess == Access::kFloats) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 row = tile + (kStep * step + 4 * half) * kRowBytes;
#pragma unroll
        for (int core = 0; core < kCoreMatrices; core += kInterleave) {
          uint32 words[kInterleave];
          load_shared(words, at(row, 32 * core));
#pragma unroll
          for (int i = 0; i < kInterleave; ++i) fragment[core + i][half] = words[i];
        }
      }
    } else if constexpr (kAccess == Access::kDoubles) {
      // Lane t takes k = 2t and 2t+1 for its halves, as it does along k below. The order of k is
      // free as long as both operands agree.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 row = tile + (kStep * step + half) * kRowBytes;
#pragma unroll
        for (int core = 0; core < kCoreMatrices; core += 2) {
          double pair[2];
          load_shared(pair, at(row, 64 * core));
          fragment[core][half] = pair[0];
          fragment[core + 1][half] = pair[1];
        }
      }
    } else {
#pragma unroll
      for (int core = 0; core < kCoreMatrices; ++core) {
        load_shared(fragment[core], at(tile, 64 * step) + 8 * core * kRowBytes);
      }
    }
  }

  // Brings a loaded fragment into the form that the product takes.
  static void prepare(Fragment& fragment) {
    if constexpr (kAccess == Access::kBytes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int core = 0; core < kCoreMatrices; core += 4) {
          transpose_bytes(fragment[core][half], fragment[core + 1][half], fragment[core + 2][half],
                          fragment[core + 3][half]);
        }
      }
    } else if constexpr (kSame<T, float>) {
#pragma unroll
      for (int core = 0; core < kCoreMatrices; ++core) {
        fragment[core][0] = round_to_tf32(fragment[core][0]);
        fragment[core][1] = round_to_tf32(fragment[core][1]);
      }
    }
  }

 private:
  // The lane's address plus `distance` bytes, whose bits are 0 in its unswizzled offset.
  uint32 at(uint32 tile, int distance) const { return tile + (lane_offset_ ^ distance); }

  // ldmatrix loads two halves of k of two core matrices into adjacent registers, in the MMA's
  // order: for lhs the first halves of both and then the second halves, for rhs both halves of
  // each. `lane` addresses a row of matrix lane / 8.
  static constexpr int matrix_core(int lane) { return kLhs ? lane / 8 % 2 : lane / 16; }
  static constexpr int matrix_half(int lane) { return kLhs ? lane / 16 : lane / 8 % 2; }

  static void place_matrices(Fragment& fragment, int core, const uint32 (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragment[core + matrix_core(8 * i)][matrix_half(8 * i)] = words[i];
    }
  }

  // A lane reads rows 4t to 4t+3 of k, in words of four elements of MN. The word of row 4t+r stays
  // in the register of core matrix r until prepare() transposes the 4x4 bytes of four core
  // matrices.
  void load_bytes(Fragment& fragment, uint32 tile, int step) const {
    constexpr int kWords = kInterleave / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 rows = tile + (kStep * step + 16 * half) * kRowBytes;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int core = 0; core < kCoreMatrices; core += kInterleave) {
          uint32 words[kWords];
          load_shared(words, at(rows, r * kRowBytes + 8 * core));
#pragma unroll
          for (int w = 0; w < kWords; ++w) fragment[core + 4 * w + r][half] = words[w];
        }
      }
    }
  }

  static void transpose_bytes(uint32& a, uint32& b, uint32& c, uint32& d) {
    const uint32 ab_low = permute_bytes(a, b, 0x5140), cd_low = permute_bytes(c, d, 0x5140);
    const uint32 ab_high = permute_bytes(a, b, 0x7362), cd_high = permute_bytes(c, d, 0x7362);
    a = permute_bytes(ab_low, cd_low, 0x5410);
    b = permute_bytes(ab_low, cd_low, 0x7632);
    c = permute_bytes(ab_high, cd_high, 0x5410);
    d = permute_bytes(ab_high, cd_high, 0x7632);
  }

  uint32 lane_offset_;
};

}  // namespace tilekern

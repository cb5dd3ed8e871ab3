// One operand of a warp's tensor-core product: from a tile in shared memory to registers.
#pragma once

#include "gemm/sm80/shared_tile.cuh"
#include "ptx.cuh"

namespace tilekern {

// "Lines" are rows of lhs or columns of rhs: the dimension that is not k. A warp's kWarp lines are
// taken as octets, of which lane 4 * g + t holds line g (mma.cuh). Where memory has lines side by
// side (k-major is false) and ldmatrix cannot transpose the type, a lane reads kInterleave
// adjacent lines at once and deals them out to as many octets, so line g of octet o is not
// 8 * o + g of the tile but line(o, g). For the output this is a permutation of rows or columns
// that the epilogue undoes by where it stores.
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
        return swizzle_for_row_octets(kRowBytes);
    }
  }

  static constexpr int choose_interleave() {
    switch (kAccess) {
      case Access::kBytes:
        return min_of(8, kOctets);
      case Access::kFloats:
        // The product wants two octets of lhs in adjacent registers, but the halves of one octet of
        // rhs, which are rows apart: wider loads would cost as many moves.
        return kLhs ? 2 : 1;
      case Access::kDoubles:
        return 2;
      default:
        return 1;
    }
  }

 public:
  static constexpr int kOctets = kWarp / 8;
  static constexpr int kInterleave = choose_interleave();
  // What one product consumes of k, in elements.
  static constexpr int kStep = (sizeof(T) == 8 ? 64 : 32) / static_cast<int>(sizeof(T));

  using Tile = SharedTile<kMajorK ? kBlock : kBlockK, kRowBytes, choose_swizzle()>;
  using Register = Select<sizeof(T) == 8, double, uint32>;
  // An octet's registers for the two halves of a step.
  using Fragment = Register[kOctets][2];

  static_assert(kOctets % 2 == 0 && kBlock % kWarp == 0 && kBlockK % kStep == 0);
  static_assert(kAccess != Access::kBytes || kOctets >= 4, "bytes are transposed four by four");

  static constexpr int line(int octet, int g) {
    return octet / kInterleave * (8 * kInterleave) + kInterleave * g + octet % kInterleave;
  }

  // `first_line` is the warp's first line in the tile.
  MmaOperand(int first_line, int lane) {
    const int g = lane / 4, t = lane % 4;
    const int first_byte = first_line * static_cast<int>(sizeof(T));
    switch (kAccess) {
      case Access::kMatrices:
        lane_offset_ =
            Tile::offset(first_line + matrix_octet(lane) * 8 + lane % 8, matrix_half(lane) * 16);
        break;
      case Access::kMatricesTransposed:
        lane_offset_ =
            Tile::offset(matrix_half(lane) * 8 + lane % 8, first_byte + matrix_octet(lane) * 16);
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
        lane_offset_ = Tile::offset(first_line + g, 16 * t);
        break;
    }
  }

  // Loads the fragment of one step of the tile at `tile`. It is as memory has it until prepare().
  void load(Fragment& fragment, uint32 tile, int step) const {
    if constexpr (kAccess == Access::kMatrices) {
#pragma unroll
      for (int octet = 0; octet < kOctets; octet += 2) {
        uint32 words[4];
        ldmatrix(words, at(tile, 32 * step) + 8 * octet * kRowBytes);
        place_matrices(fragment, octet, words);
      }
    } else if constexpr (kAccess == Access::kMatricesTransposed) {
#pragma unroll
      for (int octet = 0; octet < kOctets; octet += 2) {
        uint32 words[4];
        ldmatrix_trans(words, at(tile, 16 * octet) + kStep * step * kRowBytes);
        place_matrices(fragment, octet, words);
      }
    } else if constexpr (kAccess == Access::kBytes) {
      load_bytes(fragment, tile, step);
    } else if constexpr (kAccess == Access::kFloats) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 row = tile + (kStep * step + 4 * half) * kRowBytes;
#pragma unroll
        for (int octet = 0; octet < kOctets; octet += kInterleave) {
          uint32 words[kInterleave];
          load_shared(words, at(row, 32 * octet));
#pragma unroll
          for (int i = 0; i < kInterleave; ++i) fragment[octet + i][half] = words[i];
        }
      }
    } else if constexpr (kAccess == Access::kDoubles) {
      // Lane t takes k = 2t and 2t+1 for its halves, as it does along k below. The order of k is
      // free as long as both operands agree.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 row = tile + (kStep * step + half) * kRowBytes;
#pragma unroll
        for (int octet = 0; octet < kOctets; octet += 2) {
          double pair[2];
          load_shared(pair, at(row, 64 * octet));
          fragment[octet][half] = pair[0];
          fragment[octet + 1][half] = pair[1];
        }
      }
    } else {
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        load_shared(fragment[octet], at(tile, 64 * step) + 8 * octet * kRowBytes);
      }
    }
  }

  // Brings a loaded fragment into the form that the product takes.
  static void prepare(Fragment& fragment) {
    if constexpr (kAccess == Access::kBytes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int octet = 0; octet < kOctets; octet += 4) {
          transpose_bytes(fragment[octet][half], fragment[octet + 1][half],
                          fragment[octet + 2][half], fragment[octet + 3][half]);
        }
      }
    } else if constexpr (kSame<T, float>) {
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        fragment[octet][0] = round_to_tf32(fragment[octet][0]);
        fragment[octet][1] = round_to_tf32(fragment[octet][1]);
      }
    }
  }

 private:
  // The lane's address moved by `distance` bytes, on bits that its unswizzled offset leaves 0.
  uint32 at(uint32 tile, int distance) const { return tile + (lane_offset_ ^ distance); }

  // ldmatrix loads two halves of k of two octets, into adjacent registers in the order in which
  // the product wants them adjacent: of lhs, both octets' first halves and then the second ones;
  // of rhs, both halves of an octet. `lane` addresses a row of matrix lane / 8.
  static constexpr int matrix_octet(int lane) { return kLhs ? lane / 8 % 2 : lane / 16; }
  static constexpr int matrix_half(int lane) { return kLhs ? lane / 16 : lane / 8 % 2; }

  static void place_matrices(Fragment& fragment, int octet, const uint32 (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragment[octet + matrix_octet(8 * i)][matrix_half(8 * i)] = words[i];
    }
  }

  // A lane reads rows 4t to 4t+3 of k, in words of four lines. The word of row 4t+r waits in the
  // register of octet r until prepare() transposes the 4x4 bytes of four octets.
  void load_bytes(Fragment& fragment, uint32 tile, int step) const {
    constexpr int kWords = kInterleave / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 rows = tile + (kStep * step + 16 * half) * kRowBytes;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int octet = 0; octet < kOctets; octet += kInterleave) {
          uint32 words[kWords];
          load_shared(words, at(rows, r * kRowBytes + 8 * octet));
#pragma unroll
          for (int w = 0; w < kWords; ++w) fragment[octet + 4 * w + r][half] = words[w];
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

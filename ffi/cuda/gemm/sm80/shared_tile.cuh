// Tiles in shared memory, and the swizzles that keep their accesses free of bank conflicts.
#pragma once

#include "types.cuh"

namespace tilekern {

// A permutation of the 16-byte chunks of each 128-byte line: a chunk's index is XORed with
// ((row >> shift) & mask) << lift, which is constant within a line.
struct Swizzle {
  int shift;
  int mask;
  int lift;
};

// A tile with rows of kRowBytes each (a power of two, at least 32).
template <int kRows_, int kRowBytes_, Swizzle kSwizzle>
struct SharedTile {
  static constexpr int kRows = kRows_;
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kBytes = kRows * kRowBytes;
  // The period of the swizzle, in rows.
  static constexpr int kPeriod = (kSwizzle.mask + 1) << kSwizzle.shift;

  static_assert((kRowBytes & (kRowBytes - 1)) == 0 && kRowBytes >= 32);
  static_assert(kBytes % 128 == 0, "tiles follow one another on 128-byte lines");
  static_assert((kSwizzle.mask << kSwizzle.lift) < 8, "a chunk stays in its 128-byte line");
  static_assert((kRowBytes << kSwizzle.shift) >= 128, "a line sees a single value");

  // The offset of a byte of a row. Adding a multiple of a power of two to `byte` or `row`, where
  // that power exceeds the present value, XORs the result with the same distance.
  static constexpr int offset(int row, int byte) {
    const int chunk = ((row >> kSwizzle.shift) & kSwizzle.mask) << kSwizzle.lift;
    return (row * kRowBytes + byte) ^ (chunk << 4);
  }
};

// Accesses along a row need no swizzle.
inline constexpr Swizzle kNoSwizzle = {0, 0, 0};

// ldmatrix accesses one chunk of 8 consecutive rows, a core matrix, at once.
constexpr Swizzle swizzle_for_core_matrices(int row_bytes) {
  const int rows_per_line = row_bytes < 128 ? 128 / row_bytes : 1;
  return {log2_of(rows_per_line), 8 / rows_per_line - 1, 0};
}

// This serves accesses to 32 bytes of four rows at once, `distance` rows apart.
constexpr Swizzle swizzle_for_row_quads(int distance) { return {log2_of(distance), 3, 1}; }

// This serves accesses to 64 bytes of two consecutive rows at once.
inline constexpr Swizzle kSwizzleForRowPairs = {0, 1, 2};

}  // namespace tilekern

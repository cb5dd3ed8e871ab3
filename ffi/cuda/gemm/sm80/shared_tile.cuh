// Tiles in shared memory, and the swizzles that keep their accesses free of bank conflicts.
#pragma once

#include "types.cuh"

namespace tilekern {

// Which 16-byte chunk of its 128-byte line a chunk moves to: its number there is XORed with
// ((row >> shift) & mask) << lift. As every line sees a single value, chunks only trade places.
struct Swizzle {
  int shift;
  int mask;
  int lift;
};

// A tile of rows of kRowBytes each (a power of two, at least 32).
template <int kRows_, int kRowBytes_, Swizzle kSwizzle>
struct SharedTile {
  static constexpr int kRows = kRows_;
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kBytes = kRows * kRowBytes;
  // Rows after which the swizzle repeats.
  static constexpr int kPeriod = (kSwizzle.mask + 1) << kSwizzle.shift;

  static_assert((kRowBytes & (kRowBytes - 1)) == 0 && kRowBytes >= 32);
  static_assert(kBytes % 128 == 0, "tiles follow one another on 128-byte lines");
  static_assert((kSwizzle.mask << kSwizzle.lift) < 8, "a chunk stays in its 128-byte line");
  static_assert((kRowBytes << kSwizzle.shift) >= 128, "a line sees a single value");

  // Where a byte of a row lies. Adding to `byte` or `row` a multiple of a power of two that
  // exceeds what is there already is an XOR of the result with the same distance.
  static constexpr int offset(int row, int byte) {
    const int chunk = ((row >> kSwizzle.shift) & kSwizzle.mask) << kSwizzle.lift;
    return (row * kRowBytes + byte) ^ (chunk << 4);
  }
};

// For accesses along a row only.
inline constexpr Swizzle kNoSwizzle = {0, 0, 0};

// For accesses to one chunk of 8 consecutive rows at once, as ldmatrix makes them.
constexpr Swizzle swizzle_for_row_octets(int row_bytes) {
  const int rows_per_line = row_bytes < 128 ? 128 / row_bytes : 1;
  return {log2_of(rows_per_line), 8 / rows_per_line - 1, 0};
}

// For accesses to 32 bytes of four rows at once, namely of rows `distance` apart.
constexpr Swizzle swizzle_for_row_quads(int distance) { return {log2_of(distance), 3, 1}; }

// For accesses to 64 bytes of two consecutive rows at once.
inline constexpr Swizzle kSwizzleForRowPairs = {0, 1, 2};

}  // namespace tilekern

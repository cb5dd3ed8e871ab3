// What the kernels of a transpose share: a permutation moves the dimension that is innermost in the
// result ("rows") and the one that is innermost in the source ("columns"), and carries along all
// others ("outer" dimensions). Items are bytes of no meaning.
#pragma once

#include "ptx.cuh"

namespace tilekern {

inline constexpr int kMaxOuterDims = 6;

// A number that others, below 2^31, are divided by; `divisor` in `plans/transpose/shape.py` packs
// the same fields. The quotient is exact, by Granlund and Montgomery, "Division by invariant
// integers using multiplication" (1994).
struct Divisor {
  uint32 value;
  uint32 multiplier;
  uint32 shift;
};

struct Quotient {
  uint32 quotient;
  uint32 remainder;
};

inline Quotient divide(uint32 number, const Divisor& divisor) {
  const uint32 quotient =
      static_cast<uint32>(static_cast<uint64>(number) * divisor.multiplier >> divisor.shift);
  return {quotient, number - quotient * divisor.value};
}

// `OuterDims` in `plans/transpose/shape.py` packs the same fields. Strides are in bytes; unused
// dimensions come first with size 1.
struct OuterDims {
  int64 source_strides[kMaxOuterDims];
  int64 result_strides[kMaxOuterDims];
  Divisor sizes[kMaxOuterDims];
};

struct OuterOffsets {
  int64 source = 0;
  int64 result = 0;
};

inline OuterOffsets outer_offsets(const OuterDims& dims, uint32 index) {
  OuterOffsets offsets;
  // Dimensions are merged and most often few.
#pragma unroll 1
  for (int dim = kMaxOuterDims - 1; index != 0; --dim) {
    const Quotient at = divide(index, dims.sizes[dim]);
    offsets.source += at.remainder * dims.source_strides[dim];
    offsets.result += at.remainder * dims.result_strides[dim];
    index = at.quotient;
  }
  return offsets;
}

// Tiles of matrices, walked down in bands of a few columns: blocks that run at the same time write
// whole pieces of the result, and what the tiles of a band share of the source's sectors is read
// once. `TileGrid` in `plans/transpose/shape.py` packs the same fields.
struct TileGrid {
  uint32 columns;
  // Tiles of a matrix, and of a band.
  Divisor matrix;
  Divisor band;
  // Columns of a band, and of the last one.
  Divisor width;
  Divisor last_width;
};

struct TilePosition {
  uint32 row;
  uint32 column;
  uint32 outer;
};

inline TilePosition tile_position(const TileGrid& grid, uint32 tile) {
  const Quotient matrix = divide(tile, grid.matrix);
  const Quotient band = divide(matrix.remainder, grid.band);
  const uint32 first = band.quotient * grid.width.value;
  const bool last = first + grid.width.value > grid.columns;
  // Field by field: a choice between two structs becomes a load from a computed address.
  const Divisor width = {last ? grid.last_width.value : grid.width.value,
                         last ? grid.last_width.multiplier : grid.width.multiplier,
                         last ? grid.last_width.shift : grid.width.shift};
  const Quotient row = divide(band.remainder, width);
  return {row.quotient, first + row.remainder, matrix.quotient};
}

template <int kBytes>
struct ItemType;
template <>
struct ItemType<1> {
  using Type = unsigned char;
};
template <>
struct ItemType<2> {
  using Type = uint16;
};
template <>
struct ItemType<4> {
  using Type = uint32;
};
template <>
struct ItemType<8> {
  using Type = uint2;
};
template <>
struct ItemType<16> {
  using Type = uint4;
};
template <int kBytes>
using Item = typename ItemType<kBytes>::Type;

}  // namespace tilekern

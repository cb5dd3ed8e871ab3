// Shared definitions of the transpose kernels. A permutation exchanges the dimension that is
// innermost in the result ("rows") with the one that is innermost in the source ("columns"); all
// others are "outer" dimensions. Items are uninterpreted bytes.
#pragma once

#include "ptx.cuh"

namespace tilekern {

inline constexpr int kMaxOuterDims = 6;

// A divisor of numbers below 2^31; `divisor` in `plans/transpose/shape.py` packs the same fields.
// The quotient is exact, by Granlund and Montgomery, "Division by invariant integers using
// multiplication" (1994).
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
  // The plan merges dimensions, so there are usually few.
#pragma unroll 1
  for (int dim = kMaxOuterDims - 1; index != 0; --dim) {
    const Quotient at = divide(index, dims.sizes[dim]);
    offsets.source += at.remainder * dims.source_strides[dim];
    offsets.result += at.remainder * dims.result_strides[dim];
    index = at.quotient;
  }
  return offsets;
}

// Grouped rasterization of a matrix's tiles: CTAs walk down groups (bands) of a few columns of
// tiles, so that concurrent CTAs write contiguous parts of the result, and L2 serves the source
// sectors that tiles of a group share. `TileGrid` in `plans/transpose/shape.py` packs the same
// fields.
struct TileGrid {
  uint32 columns;
  // Tiles per matrix, and per group.
  Divisor matrix;
  Divisor band;
  // Columns of a group, and of the last one.
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
  // The fields are selected one by one; selecting a struct becomes a load from a computed address.
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

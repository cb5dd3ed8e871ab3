// The coordinates of a consumer's accumulators for epilogues (epilogue.cuh), and the epilogue of
// split-float16 emulation.
#pragma once

#include "epilogue.cuh"
#include "gemm/sm90/config.cuh"

namespace tilekern {

// The layout of a warp's accumulators of one MMA of 16 rows: accumulator i of lane 4g + t. Where
// lhs passed through registers from an M-major tile (TransposedLhsLoader), rows are paired: the
// MMA's rows g and 8+g are rows 2g and 2g+1.
template <bool kPaired>
struct WgmmaAccumulatorLayout {
  static constexpr bool kPairedRows = kPaired;
  static constexpr int row_of(int g, int half) { return kPairedRows ? 2 * g + half : 8 * half + g; }
  static constexpr int row(int lane, int i) { return row_of(lane / 4, i / 2 % 2); }
  static constexpr int column(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }
};

// The coordinates of a thread's accumulators of one MMA. Epilogues of this kernel alone may also
// use the work tile.
template <bool kPairedRows>
struct WgmmaCoordinates {
  using Layout = WgmmaAccumulatorLayout<kPairedRows>;
  static constexpr int kAdjacentColumns = 2;
  static constexpr bool kConverged = true;
  static constexpr bool kQuads = true;
  static constexpr int kRowSlots = 2;
  static constexpr int kRowLanes = 4;

  const WorkTile& work;
  const WgmmaShape& shape;
  // The first of the warp's rows in the work tile.
  int tile_row;
  // Where the work tile's columns end at the latest.
  const int& column_end;
  bool is_group;

  int row(int i) const { return work.m + tile_row + Layout::row(threadIdx.x % 32, i); }
  int column(int i) const { return work.n + Layout::column(threadIdx.x % 32, i); }
  int rows() const { return shape.m; }
  int columns() const { return column_end; }
  int batch(int) const { return batch_number(work, shape); }
  bool in_group() const { return is_group; }

  static constexpr int row_slot(int i) { return i / 2 % 2; }
  int slot_row(int slot) const {
    return work.m + tile_row + Layout::row_of(threadIdx.x % 32 / 4, slot);
  }
  int tile_column() const { return work.n; }
  int first_row() const { return work.m + tile_row; }
};

// Batch strides of the exponents, in elements; those of a matrix's rows or columns are adjacent.
struct PartStrides {
  int64 lhs_batch[kMaxTmaBatchDims];
  int64 rhs_batch[kMaxTmaBatchDims];
};

// Multiplies by the powers of two that split_float32() has taken out of each row of lhs and each
// column of rhs.
struct ScaleByExponents {
  const int32* lhs_exponents;
  const int32* rhs_exponents;
  const PartStrides& strides;

  template <int kCount, class Coordinates>
  void operator()(float (&accumulators)[kCount], const Coordinates& at) const {
    const int32* lhs = lhs_exponents;
    const int32* rhs = rhs_exponents;
#pragma unroll
    for (int dim = 0; dim < kMaxTmaBatchDims; ++dim) {
      lhs += at.work.lhs_batch[dim] * strides.lhs_batch[dim];
      rhs += at.work.rhs_batch[dim] * strides.rhs_batch[dim];
    }
    // Accumulators 0 to 3 are in two rows, the same as of all others, and in two columns.
    int row_exponents[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_exponents[half] = lhs[min_of(at.row(2 * half), at.rows() - 1)];
    }
#pragma unroll
    for (int first = 0; first < kCount; first += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column_exponent = rhs[min_of(at.column(first + i), at.columns() - 1)];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& accumulator = accumulators[first + 2 * half + i];
          accumulator = scaled(accumulator, row_exponents[half] + column_exponent);
        }
      }
    }
  }

 private:
  // The scale is applied in two steps: a power may lie beyond float32 where the result does not.
  static float scaled(float value, int exponent) {
    const int clamped = max_of(-252, min_of(252, exponent));
    const int half = clamped / 2;
    return value * power_of_two(half) * power_of_two(clamped - half);
  }
  static float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }
};

}  // namespace tilekern

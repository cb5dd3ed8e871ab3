// What is done to a consumer's sums before they are stored.
#pragma once

#include "gemm/sm90/config.cuh"

namespace tilekern {

struct NoFinish {
  template <typename Sum, int kCount>
  void apply(Sum (&)[kCount], const WorkItem&, int, const WgmmaShape&) const {}
};

// Batch strides of the exponents, in elements; those of a matrix's lines are adjacent.
struct PieceStrides {
  int64 lhs_batch[kBoxBatchDims];
  int64 rhs_batch[kBoxBatchDims];
};

// Multiplies by the powers of two that split_float32() has taken out of each line.
struct ScaleByExponents {
  const int32* lhs_exponents;
  const int32* rhs_exponents;
  const PieceStrides& strides;

  // `warp_row` is the warp's first row in the tile; sums are as in wgmma.cuh.
  template <int kCount>
  void apply(float (&sums)[kCount], const WorkItem& work, int warp_row,
             const WgmmaShape& shape) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int32* lhs = lhs_exponents;
    const int32* rhs = rhs_exponents;
#pragma unroll
    for (int dim = 0; dim < kBoxBatchDims; ++dim) {
      lhs += work.lhs_batch[dim] * strides.lhs_batch[dim];
      rhs += work.rhs_batch[dim] * strides.rhs_batch[dim];
    }
    int rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = lhs[min_of(work.m + warp_row + g + 8 * half, shape.m - 1)];
    }
#pragma unroll
    for (int octet = 0; octet < kCount / 4; ++octet) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = rhs[min_of(work.n + 8 * octet + 2 * t + i, shape.n - 1)];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& sum = sums[4 * octet + 2 * half + i];
          sum = scaled(sum, rows[half] + column);
        }
      }
    }
  }

 private:
  // In two steps: a power may lie beyond float32 where the result does not.
  static float scaled(float sum, int exponent) {
    const int clamped = max_of(-252, min_of(252, exponent));
    const int half = clamped / 2;
    return sum * power_of_two(half) * power_of_two(clamped - half);
  }
  static float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }
};

}  // namespace tilekern

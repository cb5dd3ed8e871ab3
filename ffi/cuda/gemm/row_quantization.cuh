// Quantises rows of a product in an epilogue (`plans/gemm/epilogue_text.py` writes the epilogue).
//
// A thread has 64 accumulators of two rows and 128 columns, which are a block of 1x128 in either
// row. The four lanes that share the rows combine their maxima, and each stores 8 adjacent bytes of
// 32 columns.
//
// The coordinates of the accumulators provide what epilogue.cuh lists, kQuads among it.
#pragma once

#include "block_scale.cuh"
#include "gemm/epilogue_arrays.cuh"

namespace tilekern {

// Values of a thread that are quantised together, and the columns that they are in.
inline constexpr int kQuantizedValues = 64;
inline constexpr int kQuantizedColumns = 128;

// Quantises the values of the accumulators from `first` on. Those beyond the matrix are zeros. With
// kAligned, rows of `matrix` consist of 8 elements whose address is a multiple of 8.
template <bool kPowerOfTwo, bool kAligned, typename Q, class Coordinates>
inline void quantize_rows(const float (&values)[kQuantizedValues], Q* matrix, int64 row_stride,
                          float* scales, int64 scale_row_stride, int64 block_stride,
                          const Coordinates& at, int first) {
  static_assert(Coordinates::kQuads && Coordinates::kConverged);
  constexpr int kPerRow = kQuantizedValues / 2;
  const int lane = static_cast<int>(threadIdx.x) % 4;
  const int block_column = at.column(first) - 2 * lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto value = [&](int i) { return values[i / 2 * 4 + 2 * half + i % 2]; };
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerRow; ++i) largest = max_or_nan(largest, fabsf(value(i)));
    // Infinities and NaN are no part of a block's largest magnitude.
    const bool special = !is_finite(largest);
    if (special) {
      largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerRow; ++i) {
        if (is_finite(value(i))) largest = fmaxf(largest, fabsf(value(i)));
      }
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    }
    const BlockScale of_block = block_scale<Q, kPowerOfTwo>(largest);
    const int row = at.row(first + 2 * half);
    const bool in_rows = row < at.rows();
    if (lane == 0 && in_rows && block_column < at.columns()) {
      scales[row * scale_row_stride + block_column / kQuantizedColumns * block_stride] =
          of_block.scale;
    }
    Q* const elements = matrix + row * row_stride;
#pragma unroll
    for (int chunk = 0; chunk < kPerRow; chunk += 8) {
      uint32 pairs[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = value(chunk + 4 * i + j) * of_block.factor;
        const uint32 word = quantized<Q>(x, special);
        pairs[2 * i] = word & 0xffff;
        pairs[2 * i + 1] = word >> 16;
      }
      transpose_in_quad(pairs);
      const int column = block_column + 4 * chunk + 8 * lane;
      const uint32 words[2] = {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
      if (!in_rows) continue;
      if constexpr (kAligned) {
        if (column < at.columns()) {
          *reinterpret_cast<uint2*>(elements + column) = {words[0], words[1]};
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (column + i < at.columns()) {
            elements[column + i].bits = static_cast<uint8>(words[i / 4] >> 8 * (i % 4));
          }
        }
      }
    }
  }
}

}  // namespace tilekern

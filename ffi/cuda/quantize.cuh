// Quantises matrices to 8-bit floats with a scale for each block.
//
// A CTA reads a tile once, of 128x128, or of 32x128 where no block has several rows. It writes the
// tile quantised in blocks along rows, and with kTransposed also the transpose of the tile
// quantised in blocks along columns.
#pragma once

#include "block_scale.cuh"
#include "vector_loads.cuh"

namespace tilekern {

inline constexpr int kQuantizeTile = 128;
// A thread has 8 rows by 8 columns.
inline constexpr int kQuantizePatch = 8;

// Run-time sizes; `plans/quantize.py` packs the same fields in the same order.
struct QuantizeShape {
  int64 matrices;
  int32 rows;
  int32 columns;
  int32 row_tiles;
  int32 column_tiles;
};

// kSquare blocks are 128x128, others 1x128. With kAligned, 8 adjacent elements of `x`, of `values`
// and of `transposed` have one alignment, and rows consist of them. A thread then has adjacent rows
// and columns. Otherwise it has each 16th column, and each 16th row of 128 or each 4th of 32, so
// that threads load and store adjacent elements.
template <typename T, typename Q, bool kSquare, bool kTransposed, bool kPowerOfTwo, bool kAligned>
class QuantizeTile {
 public:
  static constexpr int kThreads = kSquare || kTransposed ? 256 : 64;

 private:
  static constexpr int kPatch = kQuantizePatch;
  static constexpr int kVectorBytes = kAligned ? min_of<int>(16, kPatch * sizeof(T)) : sizeof(T);
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kParts = kQuantizeTile / kPatch, kRowParts = kThreads / kParts;
  // From the first row or column of a part's thread to that of the next part, and from one of a
  // thread to its next one.
  static constexpr int kOfPart = kAligned ? kPatch : 1;
  static constexpr int kNext = kAligned ? 1 : kParts, kNextRow = kAligned ? 1 : kRowParts;

 public:
  // Eight quantised bytes.
  struct alignas(8) Bytes {
    uint32 words[2];
  };
  struct Shared {
    // The transpose. The place of bytes in a row is XORed with the part of the threads that write
    // the row, against bank conflicts.
    Bytes bytes[kTransposed ? kQuantizeTile : 1][kTransposed ? kParts : 1];
    float largest[kWarps][kSquare ? 1 : kQuantizeTile];
    float factors[kSquare ? 1 : kQuantizeTile];
  };

  QuantizeTile(Shared& shared, const QuantizeShape& shape)
      : shared_(shared),
        shape_(shape),
        matrix_(blockIdx.x / (shape.row_tiles * shape.column_tiles)),
        tile_row_(blockIdx.x / shape.column_tiles % shape.row_tiles),
        tile_column_(blockIdx.x % shape.column_tiles),
        row_(tile_row_ * kRowParts * kPatch + threadIdx.x / kParts * kOfPart),
        column_(tile_column_ * kQuantizeTile + threadIdx.x % kParts * kOfPart) {}

  void run(const T* x, Q* values, float* scales, Q* transposed, float* transposed_scales) {
    load(x + matrix_ * shape_.rows * shape_.columns);
    float largest[kPatch];
    largest_of_rows<false>(largest);
    float all = 0;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) all = max_or_nan(all, largest[i]);
    // Infinities and NaN are no part of a block's largest magnitude.
    if (__syncthreads_or(!is_finite(all))) {
      largest_of_rows<true>(largest);
      quantize<true>(largest, values, scales, transposed, transposed_scales);
    } else {
      quantize<false>(largest, values, scales, transposed, transposed_scales);
    }
  }

 private:
  void load(const T* x) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int j = 0; j < kPatch; j += kVector) {
        const int row = row_ + i * kNextRow, column = column_ + j * kNext;
        if (row < shape_.rows && column < shape_.columns) {
          vectors_[i][j / kVector] =
              load_once<kVectorBytes>(x + static_cast<int64>(row) * shape_.columns + column);
        } else {
          vectors_[i][j / kVector] = {};
        }
      }
    }
  }

  // A column of the thread in the tile.
  static int own_column(int j) { return threadIdx.x % kParts * kOfPart + j * kNext; }

  float element_at(int i, int j) const {
    return element<T, float>(vectors_[i][j / kVector], j % kVector);
  }

  // Has the compiler convert elements again, rather than keep them as floats.
  void forget() {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (auto& vector : vectors_[i]) {
#pragma unroll
        for (uint32& word : vector.words) asm volatile("" : "+r"(word));
      }
    }
  }

  template <bool kSpecial>
  float magnitude(int i, int j) const {
    const float x = fabsf(element_at(i, j));
    return !kSpecial || is_finite(x) ? x : 0.0f;
  }

  template <bool kSpecial>
  void largest_of_rows(float (&largest)[kPatch]) const {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      largest[i] = magnitude<kSpecial>(i, 0);
#pragma unroll
      for (int j = 1; j < kPatch; ++j) {
        largest[i] = max_or_nan(largest[i], magnitude<kSpecial>(i, j));
      }
    }
  }

  template <bool kSpecial>
  void quantize(float (&largest)[kPatch], Q* values, float* scales, Q* transposed,
                float* transposed_scales) {
    const int64 elements = static_cast<int64>(shape_.rows) * shape_.columns;
    values += matrix_ * elements;
    transposed += matrix_ * elements;
    if constexpr (kSquare) {
      const int64 blocks = static_cast<int64>(shape_.row_tiles) * shape_.column_tiles;
      const float factor =
          factor_of_tile(largest, scales + matrix_ * blocks, transposed_scales + matrix_ * blocks);
      store_rows<kSpecial>(values, [&](int) { return factor; });
      if constexpr (kTransposed) {
        stage_columns<kSpecial>([&](int) { return factor; });
        __syncthreads();
        store_columns(transposed);
      }
    } else {
      float factors[kPatch];
      factors_of_rows(largest, scales + matrix_ * shape_.column_tiles * shape_.rows, factors);
      store_rows<kSpecial>(values, [&](int i) { return factors[i]; });
      if constexpr (kTransposed) {
        forget();
        factors_of_columns<kSpecial>(transposed_scales +
                                     matrix_ * shape_.row_tiles * shape_.columns);
        stage_columns<kSpecial>([&](int j) { return shared_.factors[own_column(j)]; });
        __syncthreads();
        store_columns(transposed);
      }
    }
  }

  // The scale of the tile, at its places in both arrays of scales.
  float factor_of_tile(const float (&largest)[kPatch], float* scales, float* transposed) {
    float all = 0;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) all = fmaxf(all, largest[i]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      all = fmaxf(all, __shfl_xor_sync(0xffffffff, all, lanes));
    }
    if (threadIdx.x % 32 == 0) shared_.largest[threadIdx.x / 32][0] = all;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) all = fmaxf(all, shared_.largest[i][0]);
    const BlockScale of_tile = block_scale<Q, kPowerOfTwo>(all);
    if (threadIdx.x == 0) {
      scales[tile_row_ * shape_.column_tiles + tile_column_] = of_tile.scale;
      if (kTransposed) transposed[tile_column_ * shape_.row_tiles + tile_row_] = of_tile.scale;
    }
    return of_tile.factor;
  }

  // The scales of the rows, which are adjacent in memory. 16 lanes have a row: of 8 of them, each
  // gets the largest magnitude of one row.
  void factors_of_rows(float (&largest)[kPatch], float* scales, float (&factors)[kPatch]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = kPatch / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const bool upper = lane & half;
        const float mine = upper ? largest[i + half] : largest[i];
        const float other = upper ? largest[i] : largest[i + half];
        largest[i] = fmaxf(mine, __shfl_xor_sync(0xffffffff, other, half));
      }
    }
    const float row = fmaxf(largest[0], __shfl_xor_sync(0xffffffff, largest[0], kPatch));
    const BlockScale of_row = block_scale<Q, kPowerOfTwo>(row);
    const int own = row_ + lane % kPatch * kNextRow;
    if (lane % 16 < kPatch && own < shape_.rows) {
      scales[static_cast<int64>(tile_column_) * shape_.rows + own] = of_row.scale;
    }
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      factors[i] = __shfl_sync(0xffffffff, of_row.factor, lane / 16 * 16 + i);
    }
  }

  template <bool kSpecial>
  void factors_of_columns(float* scales) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      float column = magnitude<kSpecial>(0, j);
#pragma unroll
      for (int i = 1; i < kPatch; ++i) column = fmaxf(column, magnitude<kSpecial>(i, j));
      column = fmaxf(column, __shfl_xor_sync(0xffffffff, column, 16));
      if (lane < 16) shared_.largest[threadIdx.x / 32][own_column(j)] = column;
    }
    __syncthreads();
    if (threadIdx.x < kQuantizeTile) {
      float column = shared_.largest[0][threadIdx.x];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) column = fmaxf(column, shared_.largest[i][threadIdx.x]);
      const BlockScale of_column = block_scale<Q, kPowerOfTwo>(column);
      shared_.factors[threadIdx.x] = of_column.factor;
      const int own = tile_column_ * kQuantizeTile + threadIdx.x;
      if (own < shape_.columns) {
        scales[static_cast<int64>(tile_row_) * shape_.columns + own] = of_column.scale;
      }
    }
    __syncthreads();
  }

  template <bool kSpecial, class Scaled>
  static Bytes rounded(const Scaled& scaled) {
    Bytes bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = scaled(4 * half + i);
      bytes.words[half] = quantized<Q>(x, kSpecial);
    }
    return bytes;
  }

  template <bool kSpecial, class Factor>
  void store_rows(Q* values, const Factor& factor) const {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      const Bytes bytes = rounded<kSpecial>([&](int j) { return element_at(i, j) * factor(i); });
      const int row = row_ + i * kNextRow;
      if (row >= shape_.rows) continue;
      store_bytes(values + static_cast<int64>(row) * shape_.columns, column_, shape_.columns,
                  bytes);
    }
  }

  // Writes the transpose of the patch to shared memory.
  template <bool kSpecial, class Factor>
  void stage_columns(const Factor& factor) {
    const int chunk = (threadIdx.x / kParts) ^ (threadIdx.x % kParts);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      const float by = factor(j);
      shared_.bytes[own_column(j)][chunk] =
          rounded<kSpecial>([&](int i) { return element_at(i, j) * by; });
    }
  }

  // 16 lanes store a row of the transpose.
  void store_columns(Q* transposed) const {
    const int part = threadIdx.x % kParts, first = tile_row_ * kQuantizeTile + part * kOfPart;
#pragma unroll
    for (int i = 0; i < kQuantizeTile; i += kRowParts) {
      const int row = threadIdx.x / kParts + i, column = tile_column_ * kQuantizeTile + row;
      if (column >= shape_.columns) break;
      const int writer = row / kOfPart % kParts;
      store_bytes(transposed + static_cast<int64>(column) * shape_.rows, first, shape_.rows,
                  shared_.bytes[row][part ^ writer]);
    }
  }

  // Stores those of a thread's bytes of a row, the first one at `column`, that are before `end`.
  static void store_bytes(Q* row, int column, int end, const Bytes& bytes) {
    if constexpr (kAligned) {
      if (column < end) *reinterpret_cast<Bytes*>(row + column) = bytes;
    } else {
#pragma unroll
      for (int j = 0; j < kPatch; ++j) {
        if (column + j * kNext < end) {
          row[column + j * kNext].bits = static_cast<uint8>(bytes.words[j / 4] >> 8 * (j % 4));
        }
      }
    }
  }

  Shared& shared_;
  const QuantizeShape& shape_;
  int64 matrix_;
  int tile_row_;
  int tile_column_;
  // The first row and column of the thread.
  int row_;
  int column_;
  Bits<kVectorBytes> vectors_[kPatch][kPatch / kVector];
};

// Scales of 1x128 blocks are written with those of adjacent rows, or columns, adjacent; those of
// square blocks are row-major.
template <typename T, typename Q, bool kSquare, bool kTransposed, bool kPowerOfTwo, bool kAligned>
__global__ void __launch_bounds__(
    QuantizeTile<T, Q, kSquare, kTransposed, kPowerOfTwo, kAligned>::kThreads,
    512 / QuantizeTile<T, Q, kSquare, kTransposed, kPowerOfTwo, kAligned>::kThreads)
    quantize(const T* x, Q* values, float* scales, Q* transposed, float* transposed_scales,
             const __grid_constant__ QuantizeShape shape) {
  using Tile = QuantizeTile<T, Q, kSquare, kTransposed, kPowerOfTwo, kAligned>;
  __shared__ typename Tile::Shared shared;
  Tile(shared, shape).run(x, values, scales, transposed, transposed_scales);
}

}  // namespace tilekern

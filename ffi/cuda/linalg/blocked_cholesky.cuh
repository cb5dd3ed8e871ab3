// Cholesky factors of large float32 matrices, A = L L^T, in blocks of 128 columns.
//
// A block of all matrices of a batch takes one launch. Each CTA factors the 128 rows on the
// diagonal of a matrix's block, all CTAs of the matrix the same ones, and solves for rows of its
// own below. It also writes the hi and lo float16 parts of these rows, which the products between
// blocks multiply (`gemm/passes/split_float32.cuh`). No element of a row of L exceeds the root of
// the row's element on the diagonal of A. So a row has one power of two for the parts of all its
// elements, which is known before the first block.
#pragma once

#include "gemm/passes/split_float32.cuh"
#include "linalg/blocked_cholesky_panel.cuh"

namespace tilekern {

// Loads a panel's columns, in rows from the panel's own to `end`. A warp takes 8 rows by 64 bytes
// at a time.
template <int kPanel>
struct CholeskyPanelLoad {
  using Vector = MatrixVector<float, 4>;
  static constexpr int kFirst = kPanel * kCholeskyPanel;
  // Vectors of a thread, which are in flight together.
  static constexpr int kCount =
      (CholeskyTile::kAllRows - kFirst) * kCholeskyPanel / 4 / kCholeskyThreads;

  Vector vectors[kCount];

  static int row(int i) { return kFirst + (threadIdx.x / 64 + 4 * i) * 8 + threadIdx.x % 32 / 4; }
  static int column() { return kFirst + threadIdx.x / 32 % 2 * 16 + threadIdx.x % 4 * 4; }

  template <typename Source>
  void load(int end, Source source) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row(i) < end) vectors[i] = *reinterpret_cast<const Vector*>(source(row(i), column()));
    }
  }
  void store(CholeskyTile& tile, int end) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row(i) >= end) break;
#pragma unroll
      for (int e = 0; e < 4; ++e) tile.at(row(i), column() + e) = vectors[i].items[e];
    }
  }
};

// Factors 128 columns of matrices, from the element on the diagonal at `first`; what is left of
// them has been eliminated. A CTA writes 32 of the rows below to `factors`, matrices of `size`
// rows, and to `all_parts`. The rows on the diagonal are divided among the CTAs of a matrix.
//
// Matrices and parts have rows of `stride` elements, as many as there are rows. A row of parts has
// the hi parts, and then the lo parts. What is above the 32x32 matrices on the diagonal is not
// read.
__global__ void __launch_bounds__(kCholeskyThreads)
    blocked_cholesky(const float* matrices, float* factors, float16* all_parts,
                     const int32* all_exponents, int first, int size, int stride) {
  const int64 number = blockIdx.y, square = int64(stride) * stride;
  const float* matrix = matrices + number * square;
  float* factor = factors + number * size * size;
  float16* parts = all_parts + number * kHalves * square;
  const int32* exponents = all_exponents + number * stride;
  using Vector = MatrixVector<float, 4>;
  constexpr int kBlock = kCholeskyBlock, kPanel = kCholeskyPanel;
  static_assert(kBlock == 4 * kPanel);
  extern __shared__ float4 shared[];
  auto& tile = *reinterpret_cast<CholeskyTile*>(shared);
  const int end = first + kBlock < stride ? CholeskyTile::kAllRows : kBlock;
  const auto row_of = [&](int row) {
    return first + (row < kBlock ? row : row + kCholeskyRows * static_cast<int>(blockIdx.x));
  };
  const auto source = [&](int row, int column) {
    return matrix + int64(row_of(row)) * stride + first + column;
  };
  launch_dependents();
  wait_for_prerequisites();
  {
    CholeskyPanelLoad<0> panel_0;
    CholeskyPanelLoad<1> panel_1;
    CholeskyPanelLoad<2> panel_2;
    CholeskyPanelLoad<3> panel_3;
    panel_0.load(end, source);
    panel_1.load(end, source);
    panel_2.load(end, source);
    panel_3.load(end, source);
    panel_0.store(tile, end);
    panel_1.store(tile, end);
    panel_2.store(tile, end);
    panel_3.store(tile, end);
  }
  __syncthreads();
#pragma unroll 1
  for (int panel = 0; panel < kBlock; panel += kPanel) {
    if (panel > 0) {
      update_panel(tile, panel, end);
      __syncthreads();
    }
    factor_panel(tile, panel, end);
    __syncthreads();
  }
  // A warp stores 8 rows by 64 bytes at a time.
  const bool has_vectors = size % 4 == 0;
  const int warp_row = threadIdx.x % 32 / 4;
  const int tile_column = threadIdx.x / 32 * 16 + threadIdx.x % 4 * 4, column = first + tile_column;
  const auto store = [&](int tile_row) {
    const int row = row_of(tile_row);
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.items[i] = tile.at(tile_row, tile_column + i);
    float* to = factor + int64(row) * size + column;
    if (row < size && has_vectors) {
      if (column < size) *reinterpret_cast<Vector*>(to) = v;
    } else if (row < size) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < size) to[i] = v.items[i];
      }
    }
    return v;
  };
  for (int row = 8 * blockIdx.x; row < kBlock; row += 8 * gridDim.x) {
    // Above the 32x32 matrices on the diagonal the tile has nothing.
    if (tile_column / kPanel <= row / kPanel) store(row + warp_row);
  }
#pragma unroll
  for (int tile_row = kBlock + warp_row; tile_row < end; tile_row += 8) {
    Vector v = store(tile_row);
    const int row = row_of(tile_row);
    const float scale = power_of_two(-exponents[row]);
#pragma unroll
    for (int i = 0; i < 4; ++i) v.items[i] *= scale;
    float16* halves = parts + int64(row) * kHalves * stride + column;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32 words[2];
      take_half(words, v.items);
      store_global(halves + half * stride, words);
    }
  }
}

// Copies the lower triangles of matrices of `size` rows, or of half their sum with their
// transposes, into those of `stride` rows, whose other rows are those of an identity. Writes zeros
// above the diagonals of the factors, and an exponent for the parts of each row.
//
// A CTA has 32x32 elements of the lower triangle, and those of the upper one that mirror them. In
// the larger matrix, those above the diagonal are not written but for the 32x32 matrices on it.
template <bool kSymmetrize>
__global__ void __launch_bounds__(256)
    cholesky_begin(const float* matrices, float* larger, float* factors, int32* all_exponents,
                   int size, int stride) {
  const int64 matrix = blockIdx.y;
  const float* from = matrices + matrix * size * size;
  float* to = larger + matrix * stride * stride;
  float* factor = factors + matrix * size * size;
  int32* exponents = all_exponents + matrix * stride;
  __shared__ float transposed[32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, number = blockIdx.x;
  // CTAs are numbered along the rows of the lower triangle.
  int tile = static_cast<int>((sqrtf(8.0f * number + 1) - 1) / 2);
  while (tile * (tile + 1) / 2 > number) --tile;
  while ((tile + 1) * (tile + 2) / 2 <= number) ++tile;
  const int first_row = 32 * tile, first_column = 32 * (number - tile * (tile + 1) / 2);
  const auto element = [&](int row, int column) {
    if (row >= size || column >= size) return row == column ? 1.0f : 0.0f;
    return from[int64(row) * size + column];
  };
  float values[4], mirrored[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = element(first_row + warp + 8 * i, first_column + lane);
    if constexpr (kSymmetrize) {
      mirrored[i] = element(first_column + warp + 8 * i, first_row + lane);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kSymmetrize) transposed[warp + 8 * i][lane] = mirrored[i];
    const int row = first_column + warp + 8 * i, column = first_row + lane;
    if (row < column && column < size) factor[int64(row) * size + column] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + warp + 8 * i, column = first_column + lane;
    if constexpr (kSymmetrize) values[i] = (values[i] + transposed[lane][warp + 8 * i]) / 2;
    to[int64(row) * stride + column] = values[i];
    if (row == column) {
      // The root is below 2^(exponent + 15). A pivot that is infinite would not be seen afterwards.
      const uint32 root = __float_as_uint(sqrtf(values[i]));
      const bool positive = root > 0 && root < kInfinity;
      exponents[row] = positive ? floor_log2(root) - 14 : 0;
      if (root == kInfinity) to[int64(row) * stride + column] = values[i] - values[i];
    }
  }
}

// If a matrix was not positive definite, the last pivot is NaN. Then the triangle becomes NaN.
__global__ void __launch_bounds__(256) cholesky_end(float* factors, int size) {
  wait_for_prerequisites();
  float* factor = factors + int64(blockIdx.y) * size * size;
  const float last = factor[int64(size) * size - 1];
  if (last == last) return;
  for (int row = blockIdx.x; row < size; row += gridDim.x) {
    for (int i = threadIdx.x; i <= row; i += 256) factor[int64(row) * size + i] = last;
  }
}

}  // namespace tilekern

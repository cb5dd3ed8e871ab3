// Cholesky factors of a large float32 matrix, A = L L^T, in blocks of 128 columns.
//
// A block takes one launch. Each CTA factors the block's 128 rows on the diagonal, all CTAs the
// same ones, and solves for rows of its own below. It also writes the hi and lo float16 parts of
// these rows, which the products between blocks multiply (`gemm/passes/split_float32.cuh`). No
// element of a row of L exceeds the root of the row's element on the diagonal of A. So a row has
// one power of two for the parts of all its elements, which is known before the first block.
#pragma once

#include "gemm/passes/split_float32.cuh"
#include "linalg/matrix_copy.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace tilekern {

inline constexpr int kCholeskyBlock = 128;
// Columns of a block are factored a panel at a time, and those of a panel a strip at a time.
inline constexpr int kCholeskyPanel = 32;
inline constexpr int kCholeskyStrip = 8;
inline constexpr int kCholeskyThreads = 256;
// Rows of a CTA below those on the diagonal.
inline constexpr int kCholeskyRows = 32;

// The rows of a CTA in shared memory, column by column: the 128 rows on the diagonal, then its own
// below. `plans/linalg/blocked_cholesky.py` computes the size too.
struct CholeskyTile {
  static constexpr int kAllRows = kCholeskyBlock + kCholeskyRows;

  alignas(16) float elements[kCholeskyBlock * kAllRows];
  // Reciprocals of the roots of a panel's pivots.
  float reciprocals[kCholeskyPanel];

  // Lanes of a warp access 8 rows of each of 4 columns, either adjacent columns or every fourth.
  // The rows of each column are permuted so that these are in different banks. 8 rows stay
  // together.
  static int offset(int row, int column) {
    return column * kAllRows + (row ^ 8 * ((column ^ column >> 2) & 3));
  }
  float& at(int row, int column) { return elements[offset(row, column)]; }
  // Elements of 8 rows, from a multiple of 8.
  void load_rows(float (&to)[kCholeskyStrip], int row, int column) {
    const auto* from = reinterpret_cast<const MatrixVector<float, 4>*>(&at(row, column));
    *reinterpret_cast<MatrixVector<float, 4>*>(to) = from[0];
    *reinterpret_cast<MatrixVector<float, 4>*>(to + 4) = from[1];
  }
};

// The hi and lo TF32 parts of values.
struct Tf32Parts {
  uint32 hi[2], lo[2];

  explicit Tf32Parts(const float (&values)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      hi[i] = round_to_tf32(__float_as_uint(values[i]));
      lo[i] = round_to_tf32(__float_as_uint(values[i] - __uint_as_float(hi[i])));
    }
  }
};

// Subtracts from a panel's columns, in rows from the panel's own to `end`, what the columns before
// it contribute. Warps take 16 rows each.
inline void update_panel(CholeskyTile& tile, int panel, int end) {
  using Tf32 = Mma<float, float>;
  constexpr int kFragments = kCholeskyPanel / 8;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int row = panel + 16 * warp; row < end; row += kCholeskyThreads / 32 * 16) {
    float sums[kFragments][4] = {};
#pragma unroll 2
    for (int k = 0; k < panel; k += 8) {
      const auto values = [&](int line) {
        return Tf32Parts({tile.at(line + g, k + t), tile.at(line + g, k + 4 + t)});
      };
      const Tf32Parts low = values(row), high = values(row + 8);
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const Tf32Parts rhs = values(panel + 8 * j);
        Tf32::run(sums[j], low.lo, high.lo, rhs.hi);
        Tf32::run(sums[j], low.hi, high.hi, rhs.lo);
        Tf32::run(sums[j], low.hi, high.hi, rhs.hi);
      }
    }
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        tile.at(row + i / 2 * 8 + g, panel + 8 * j + 2 * t + i % 2) -= sums[j][i];
      }
    }
  }
}

// Factors the columns from `strip` on of a panel's 32 rows on the diagonal, of which each lane of a
// warp has one, `x`. Each lane factors the 8x8 matrix on the diagonal, which is shorter than a
// broadcast for each column.
inline void factor_strip(CholeskyTile& tile, int panel, int strip, float (&x)[kCholeskyPanel],
                         int lane) {
  constexpr int kStrip = kCholeskyStrip;
  const int first = panel + strip;
  float diagonal[kStrip][kStrip];  // of each column
#pragma unroll
  for (int c = 0; c < kStrip; ++c) tile.load_rows(diagonal[c], first, first + c);
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kStrip; ++c) {
    const float pivot = diagonal[c][c];
    // NaN or infinite unless the pivot is positive. Then its root is NaN.
    const float reciprocal = rsqrtf(pivot), estimate = pivot * reciprocal;
    const float root = estimate + 0.5f * reciprocal * (pivot - estimate * estimate);
    const float element = x[strip + c] * reciprocal;
    x[strip + c] = lane > strip + c ? element : lane == strip + c ? root : 0;
    if (lane == 0) tile.reciprocals[strip + c] = reciprocal;
#pragma unroll
    for (int row = c + 1; row < kStrip; ++row) diagonal[c][row] *= reciprocal;
#pragma unroll
    for (int other = c + 1; other < kStrip; ++other) {
#pragma unroll
      for (int row = other; row < kStrip; ++row) {
        diagonal[other][row] -= diagonal[c][row] * diagonal[c][other];
      }
      x[strip + other] -= x[strip + c] * diagonal[c][other];
    }
  }
#pragma unroll
  for (int c = 0; c < kStrip; ++c) tile.at(panel + lane, first + c) = x[strip + c];
}

// Solves for the columns of a strip in a row below those on the diagonal.
inline void solve_strip(CholeskyTile& tile, int panel, int strip, float (&x)[kCholeskyPanel]) {
#pragma unroll
  for (int c = 0; c < kCholeskyStrip; ++c) {
    float factors[kCholeskyStrip];
    tile.load_rows(factors, panel + strip, panel + strip + c);
    x[strip + c] *= tile.reciprocals[strip + c];
#pragma unroll
    for (int other = c + 1; other < kCholeskyStrip; ++other) {
      x[strip + other] -= x[strip + c] * factors[other];
    }
  }
}

// Subtracts from the columns of a strip in a row what those of an earlier one contribute.
inline void update_strip(CholeskyTile& tile, int panel, int solved, int strip,
                         float (&x)[kCholeskyPanel]) {
#pragma unroll
  for (int c = 0; c < kCholeskyStrip; ++c) {
    float factors[kCholeskyStrip];
    tile.load_rows(factors, panel + strip, panel + solved + c);
#pragma unroll
    for (int other = 0; other < kCholeskyStrip; ++other) {
      x[strip + other] -= x[solved + c] * factors[other];
    }
  }
}

// Factors a panel's 32 rows on the diagonal by the first warp, and solves for the rows below to
// `end` by the others, a strip behind it. A thread has a row.
inline void factor_panel(CholeskyTile& tile, int panel, int end) {
  constexpr int kPanel = kCholeskyPanel, kStrip = kCholeskyStrip;
  const int thread = threadIdx.x, row = panel + thread;
  const bool on_diagonal = thread < kPanel, below = !on_diagonal && row < end;
  float x[kPanel] = {};
  if (on_diagonal || below) {
#pragma unroll
    for (int c = 0; c < kPanel; ++c) x[c] = tile.at(row, panel + c);
  }
#pragma unroll
  for (int strip = 0; strip < kPanel; strip += kStrip) {
    if (on_diagonal) factor_strip(tile, panel, strip, x, thread);
    __syncthreads();
    if (below) solve_strip(tile, panel, strip, x);
#pragma unroll
    for (int other = strip + kStrip; other < kPanel; other += kStrip) {
      if (on_diagonal || below) update_strip(tile, panel, strip, other, x);
      if (on_diagonal && other == strip + kStrip) {
        // The matrix on the diagonal of the next strip.
        if (thread / kStrip == other / kStrip) {
#pragma unroll
          for (int c = 0; c < kStrip; ++c) tile.at(row, panel + other + c) = x[other + c];
        }
        __syncwarp();
      }
    }
  }
  if (below) {
#pragma unroll
    for (int c = 0; c < kPanel; ++c) tile.at(row, panel + c) = x[c];
  }
}

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

// Factors 128 columns of a matrix, from the element on the diagonal at `first`; what is left of
// them has been eliminated. A CTA writes 32 of the rows below to `factor`, a matrix of `size` rows,
// and to `parts`. The rows on the diagonal are divided among CTAs.
//
// `matrix` and `parts` have rows of `stride` elements, as many as there are rows. A row of parts
// has the hi parts, and then the lo parts. Of `matrix`, what is above the 32x32 matrices on the
// diagonal is not read.
__global__ void __launch_bounds__(kCholeskyThreads)
    blocked_cholesky(const float* matrix, float* factor, float16* parts, const int32* exponents,
                     int first, int size, int stride) {
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

// Copies the lower triangle of a matrix of `size` rows, or of half its sum with its transpose, into
// one of `stride` rows, whose other rows are those of an identity. Writes zeros above the diagonal
// of the factor, and an exponent for the parts of each row.
//
// A CTA has 32x32 elements of the lower triangle, and those of the upper one that mirror them. In
// the larger matrix, those above the diagonal are not written but for the 32x32 matrices on it.
template <bool kSymmetrize>
__global__ void __launch_bounds__(256) cholesky_begin(const float* from, float* to, float* factor,
                                                      int32* exponents, int size, int stride) {
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

// If the matrix was not positive definite, the last pivot is NaN. Then the triangle becomes NaN.
__global__ void __launch_bounds__(256) cholesky_end(float* factor, int size) {
  wait_for_prerequisites();
  const float last = factor[int64(size) * size - 1];
  if (last == last) return;
  for (int row = blockIdx.x; row < size; row += gridDim.x) {
    for (int i = threadIdx.x; i <= row; i += 256) factor[int64(row) * size + i] = last;
  }
}

}  // namespace tilekern

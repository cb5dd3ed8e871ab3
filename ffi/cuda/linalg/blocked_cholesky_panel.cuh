// Cholesky factors of 128 columns in shared memory, in panels of 32.
//
// Warps update a panel by what is left of it, with MMAs. Then the first warp factors the rows on
// the diagonal, and the others solve for those below.
#pragma once

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

}  // namespace tilekern

// Cholesky factors of small matrices: A = L L^T.
//
// A group of lanes of a warp works on a matrix, which stays in shared memory. The group computes a
// panel of columns at a time, in registers: each lane holds 2 or 4 rows of it, so that an element
// of L that all lanes read serves several multiply-adds. Of large matrices these are 2 rows, which
// leave shared memory for more warps.
//
// L is stored row by row, as in the result, and also column by column, in the triangle above the
// diagonal: a later panel reads contiguous elements of each of its columns. Elements of A are
// overwritten after they were read.
#pragma once

#include "linalg/matrix_copy.cuh"
#include "linalg/matrix_numbers.cuh"

namespace tilekern {

template <typename T, int kN>
struct CholeskySizes {
  static_assert(kN >= 1 && kN <= 64);
  static constexpr int kWidest = 16 / sizeof(T);
  static constexpr int kPanel = min_of(kN, 8);
  static constexpr int kRows = min_of(kN, kN > 16 ? 2 : kWidest);  // of a lane
  static constexpr int kLanes = 1 << log2_of((kN + kRows - 1) / kRows);
  static constexpr int kMatrices = 32 / kLanes;  // of a warp
  // An odd number of vectors, so that lanes read vectors of successive rows from different banks.
  static constexpr int kRowStride =
      kN < kWidest ? kN : ((kN + kWidest - 1) / kWidest | 1) * kWidest;
  // Groups read elements of a row from different banks: each one starts past the banks of another.
  static constexpr int kBanks = 128 / sizeof(T);
  static constexpr int kBankShift = max_of(kLanes, kWidest) % kBanks;
  static constexpr int kMatrixStride =
      kN * kRowStride + (kBanks + kBankShift - kN * kRowStride % kBanks) % kBanks;
  using Tiles = MatrixTiles<T, kN, kMatrices, 32, kRowStride, kMatrixStride>;
};

// Factors the panel of columns from `begin` on, of which panel[r][c] is the element in row
// begin + lane + r * kLanes and column begin + c. Returns whether its pivots are positive.
template <typename T, int kN, int kRows, int kPanel>
inline bool factor_panel(T (&panel)[kRows][kPanel], int begin, int lane) {
  constexpr int kLanes = CholeskySizes<T, kN>::kLanes;
  const auto broadcast = [&](int row, int column) {
    return __shfl_sync(~0u, panel[row / kLanes][column], row % kLanes, kLanes);
  };
  bool definite = true;
#pragma unroll
  for (int c = 0; c < kPanel; ++c) {
    if (kN % kPanel != 0 && begin + c >= kN) break;
    const T pivot = broadcast(c, c);
    definite = definite && pivot > T(0);
    const T root = square_root(pivot);
    const T reciprocal = T(1) / root;
#pragma unroll
    for (int r = 0; r < kRows; ++r) panel[r][c] = panel[r][c] * reciprocal;
    if (lane == c % kLanes) panel[c / kLanes][c] = root;
#pragma unroll
    for (int other = c + 1; other < kPanel; ++other) {
      const T factor = broadcast(other, c);
#pragma unroll
      for (int r = 0; r < kRows; ++r) panel[r][other] -= panel[r][c] * factor;
    }
  }
  return definite;
}

// Factors (A + A^T) / 2 if kSymmetrize, else the lower triangle of A alone. A matrix that is not
// positive definite gives a triangle of NaN.
template <typename T, int kN, bool kSymmetrize>
__global__ void __launch_bounds__(32) matrix_cholesky(const T* matrices, T* factors, int64 count) {
  using Sizes = CholeskySizes<T, kN>;
  using Tiles = typename Sizes::Tiles;
  constexpr int kRows = Sizes::kRows, kPanel = Sizes::kPanel, kLanes = Sizes::kLanes;
  alignas(16) __shared__ T storage[Tiles::kSize];
  const int lane = threadIdx.x % kLanes;
  const int64 first = static_cast<int64>(blockIdx.x) * Sizes::kMatrices;
  const int existing = static_cast<int>(min_of<int64>(Sizes::kMatrices, count - first));
  Tiles::load(storage, matrices + first * kN * kN, existing, threadIdx.x);
  __syncwarp();

  T* const matrix = storage + threadIdx.x / kLanes * Sizes::kMatrixStride;
  bool definite = true;
#pragma unroll 1
  for (int begin = 0; begin < kN; begin += kPanel) {
    T panel[kRows][kPanel];
    int rows[kRows];  // lanes past the last row compute that one again
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = min_of(begin + lane + r * kLanes, kN - 1);
#pragma unroll
      for (int c = 0; c < kPanel; ++c) {
        const int column = kN % kPanel == 0 ? begin + c : min_of(begin + c, kN - 1);
        panel[r][c] = matrix[rows[r] * Sizes::kRowStride + column];
        if constexpr (kSymmetrize) {
          panel[r][c] = (panel[r][c] + matrix[column * Sizes::kRowStride + rows[r]]) / T(2);
        }
      }
    }
#pragma unroll 4
    for (int k = 0; k < begin; ++k) {
      const T* column = matrix + k * Sizes::kRowStride;
      T own[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) own[r] = column[rows[r]];
#pragma unroll
      for (int c = 0; c < kPanel; c += Sizes::kWidest) {
        using Vector = MatrixVector<T, Sizes::kWidest>;
        const Vector shared = *reinterpret_cast<const Vector*>(column + begin + c);
#pragma unroll
        for (int i = 0; i < Sizes::kWidest; ++i) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) panel[r][c + i] -= own[r] * shared.items[i];
        }
      }
    }
    definite = factor_panel<T, kN>(panel, begin, lane) && definite;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = begin + lane + r * kLanes;
      if (row >= kN) break;
#pragma unroll
      for (int c = 0; c < kPanel; ++c) {
        if (kN % kPanel != 0 && begin + c >= kN) break;
        matrix[row * Sizes::kRowStride + begin + c] = begin + c > row ? T(0) : panel[r][c];
        if (row >= begin + kPanel) {
          matrix[(begin + c) * Sizes::kRowStride + row] = panel[r][c];
        }
      }
    }
    __syncwarp();
  }
  if (!definite) {
    for (int row = lane; row < kN; row += kLanes) {
      for (int i = 0; i <= row; ++i) matrix[row * Sizes::kRowStride + i] = T(0) / T(0);
    }
  }
  __syncwarp();
  Tiles::store(factors + first * kN * kN, existing, threadIdx.x,
               [&](int index, int row, int column) {
                 return column > row ? T(0) : storage[Tiles::offset(index, row, column)];
               });
}

}  // namespace tilekern

// Systems of linear equations with matrices so small that a thread holds one in registers.
#pragma once

#include "linalg/matrix_solve.cuh"

namespace tilekern {

template <typename T, int kN>
struct ThreadMatrix {
  // A warp has a matrix per thread. An odd stride spreads them over the banks.
  using Tiles = MatrixTiles<T, kN, 32, 32, kN, (kN * kN) | 1>;

  T values[kN][kN];
  int order[kN];  // the row of A at each position

  // Moves the row with the largest element in column `step` at or below the diagonal, the first of
  // equal ones, to the diagonal.
  void swap_pivot(int step) {
    int pivot = step;
    auto largest = magnitude_bits(values[step][step]);
#pragma unroll
    for (int i = step + 1; i < kN; ++i) {
      const auto magnitude = magnitude_bits(values[i][step]);
      if (magnitude > largest) pivot = i;
      largest = max_of(largest, magnitude);
    }
#pragma unroll
    for (int i = step + 1; i < kN; ++i) {
      const auto swap = [chosen = pivot == i](auto& x, auto& y) {
        const auto before = x;
        if (chosen) x = y;
        if (chosen) y = before;
      };
#pragma unroll
      for (int j = 0; j < kN; ++j) swap(values[step][j], values[i][j]);
      swap(order[step], order[i]);
    }
  }

  // Factors with partial pivoting: P A = L U, with both in place of A, and the reciprocals of U's
  // diagonal in place of that.
  void factor_lu() {
#pragma unroll
    for (int i = 0; i < kN; ++i) order[i] = i;
#pragma unroll
    for (int step = 0; step < kN; ++step) {
      swap_pivot(step);
      const T pivot = values[step][step];
      values[step][step] = T(1) / pivot;
      // A column of zeros has factors of zero, as in LAPACK.
      const T scale = pivot == T(0) ? T(0) : values[step][step];
#pragma unroll
      for (int i = step + 1; i < kN; ++i) {
        values[i][step] = values[i][step] * scale;
#pragma unroll
        for (int j = step + 1; j < kN; ++j) values[i][j] -= values[i][step] * values[step][j];
      }
    }
  }

  // Solves L U x = x.
  void substitute(T (&x)[kN]) const {
#pragma unroll
    for (int k = 0; k < kN; ++k) {
#pragma unroll
      for (int i = k + 1; i < kN; ++i) x[i] -= values[i][k] * x[k];
    }
#pragma unroll
    for (int k = kN - 1; k >= 0; --k) {
      x[k] = x[k] * values[k][k];
#pragma unroll
      for (int i = 0; i < k; ++i) x[i] -= values[i][k] * x[k];
    }
  }
};

// Solves A X = B, or A^T X = B, as matrix_solve does, with a thread for each matrix.
template <typename T, int kN, bool kTranspose>
__global__ void __launch_bounds__(32)
    thread_matrix_solve(const T* matrices, const T* __restrict__ rhs, T* __restrict__ solution,
                        const __grid_constant__ MatrixColumns shape) {
  using Matrix = ThreadMatrix<T, kN>;
  using Tiles = typename Matrix::Tiles;
  __shared__ T storage[Tiles::kSize];
  const int64 first = static_cast<int64>(blockIdx.x) * 32;
  const int existing = static_cast<int>(min_of<int64>(32, shape.count - first));
  Tiles::load(storage, matrices + first * kN * kN, existing, threadIdx.x);
  __syncwarp();
  if (threadIdx.x >= existing) return;

  Matrix matrix;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      matrix.values[i][j] =
          storage[Tiles::offset(threadIdx.x, kTranspose ? j : i, kTranspose ? i : j)];
    }
  }
  matrix.factor_lu();
  rhs += (first + threadIdx.x) * kN * shape.columns;
  solution += (first + threadIdx.x) * kN * shape.columns;
  const int begin = blockIdx.y * shape.columns_per_block;
  const int end = min_of(begin + shape.columns_per_block, shape.columns);
  for (int column = begin; column < end; ++column) {
    T x[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      x[i] = rhs[matrix.order[i] * shape.row_stride + column * shape.column_stride];
    }
    matrix.substitute(x);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      solution[i * shape.row_stride + column * shape.column_stride] = x[i];
    }
  }
}

}  // namespace tilekern

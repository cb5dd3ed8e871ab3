// Systems of linear equations with small matrices, general and triangular.
#pragma once

#include "linalg/matrix_rows.cuh"

namespace tilekern {

// Right-hand sides and solutions have the same layout: element (row, column) of matrix i is at
// i * kN * columns + row * row_stride + column * column_stride. `plans/linalg/small_matrices.py`
// packs the same fields in the same order.
struct MatrixColumns {
  int64 count;  // matrices
  int64 row_stride;
  int64 column_stride;
  int32 columns;
  int32 columns_per_block;  // blockIdx.y counts them
};

// Calls body(x) for every kColumns of the CTA's right-hand sides. x is the row at the thread's
// lane, and its value after body(x) is stored as the row at `position`.
template <int kColumns, typename T, int kN, typename Body>
inline void for_each_columns(const MatrixTeam<T, kN>& team, const MatrixColumns& shape,
                             const T* __restrict__ rhs, T* __restrict__ solution, int position,
                             const Body& body) {
  const int64 matrix = (team.first + team.group) * kN * shape.columns;
  rhs += matrix + team.lane * shape.row_stride;
  solution += matrix + position * shape.row_stride;
  const int begin = blockIdx.y * shape.columns_per_block;
  const int end = min_of(begin + shape.columns_per_block, shape.columns);
  for (int column = begin; column < end; column += kColumns) {
    T x[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const bool inside = team.has_matrix() && column + i < end;
      x[i] = inside ? rhs[(column + i) * shape.column_stride] : T(0);
    }
    body(x);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (team.has_matrix() && column + i < end) {
        solution[(column + i) * shape.column_stride] = x[i];
      }
    }
  }
}

// Solves A X = B, or A^T X = B, by Gaussian elimination with partial pivoting. Each CTA factors its
// matrices itself.
template <typename T, int kN, int kColumns, bool kTranspose>
__global__ void __launch_bounds__(MatrixSizes<T, kN>::kThreads)
    matrix_solve(const T* matrices, const T* rhs, T* solution,
                 const __grid_constant__ MatrixColumns shape) {
  using Sizes = MatrixSizes<T, kN>;
  __shared__ MatrixStorage<T, kN> storage[Sizes::kTeams];
  const MatrixTeam<T, kN> team(storage, shape.count);
  if (team.matrices <= 0) return;
  team.load(matrices);
  int position;
  {
    T values[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      values[i] = !team.has_row() ? T(0) : kTranspose ? team.row(i)[team.lane] : team.own_row()[i];
    }
    // The factors overwrite the rows from which transposed columns were read.
    if (kTranspose) team.sync();
    position = team.factor_lu(values);
  }
  const T* row = team.own_row();
  const auto coefficient = [&](int k) { return row[k]; };
  for_each_columns<kColumns>(team, shape, rhs, solution, position, [&](T(&x)[kColumns]) {
    team.template substitute<true, true>(x, position, coefficient);
    team.template substitute<false, false>(x, position, coefficient);
  });
}

// Solves T X = B, or T^T X = B, where T is the lower or the upper triangle of the matrix. The other
// triangle is not read, nor is a unit diagonal.
template <typename T, int kN, int kColumns, bool kLower, bool kTranspose, bool kUnit>
__global__ void __launch_bounds__(MatrixSizes<T, kN>::kThreads)
    matrix_triangular_solve(const T* matrices, const T* rhs, T* solution,
                            const __grid_constant__ MatrixColumns shape) {
  using Sizes = MatrixSizes<T, kN>;
  __shared__ MatrixStorage<T, kN> storage[Sizes::kTeams];
  const MatrixTeam<T, kN> team(storage, shape.count);
  if (team.matrices <= 0) return;
  team.load(matrices);
  const int lane = team.has_row() ? team.lane : 0;
  const auto coefficient = [&](int k) {
    return kTranspose ? team.row(k)[lane] : team.row(lane)[k];
  };
  for_each_columns<kColumns>(team, shape, rhs, solution, team.lane, [&](T(&x)[kColumns]) {
    team.template substitute<kLower != kTranspose, kUnit>(x, team.lane, coefficient);
  });
}

}  // namespace tilekern

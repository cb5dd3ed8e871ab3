// Factorisations of small matrices: P A = L U and A = L L^T.
#pragma once

#include "linalg/matrix_rows.cuh"

namespace tilekern {

// Partial pivoting as in LAPACK's getrf: `pivots` has the row with which each row was swapped, and
// `permutation` the row of A at each position.
template <typename T, int kN>
__global__ void __launch_bounds__(MatrixSizes<T, kN>::kThreads)
    matrix_lu(const T* matrices, T* factors, int32* pivots, int32* permutation, int64 count) {
  using Sizes = MatrixSizes<T, kN>;
  __shared__ MatrixStorage<T, kN> storage[Sizes::kTeams];
  const MatrixTeam<T, kN> team(storage, count);
  if (team.matrices <= 0) return;
  team.load(matrices);
  T values[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) values[i] = team.has_row() ? team.own_row()[i] : T(0);
  team.factor_lu(values);
  team.store(factors, [&](int matrix, int row, int column) {
    const int lane = team.storage.order[matrix][row];
    return team.storage.rows[(matrix * kN + lane) * Sizes::kRowStride + column];
  });
  for (int i = team.thread; i < team.matrices * kN; i += Sizes::kTeam) {
    pivots[team.first * kN + i] = team.storage.pivots[i / kN][i % kN];
    permutation[team.first * kN + i] = team.storage.order[i / kN][i % kN];
  }
}

// Factors (A + A^T) / 2 if kSymmetrize, else the lower triangle of A alone. A matrix that is not
// positive definite gives a triangle of NaN.
template <typename T, int kN, bool kSymmetrize>
__global__ void __launch_bounds__(MatrixSizes<T, kN>::kThreads)
    matrix_cholesky(const T* matrices, T* factors, int64 count) {
  using Sizes = MatrixSizes<T, kN>;
  __shared__ MatrixStorage<T, kN> storage[Sizes::kTeams];
  const MatrixTeam<T, kN> team(storage, count);
  if (team.matrices <= 0) return;
  team.load(matrices);
  T values[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    values[i] = team.has_row() ? team.own_row()[i] : T(0);
    if (kSymmetrize && team.has_row()) values[i] = (values[i] + team.row(i)[team.lane]) / T(2);
  }

  bool definite = true;
#pragma unroll 1
  for (int step = 0; step < kN; ++step) {
    const bool below = team.has_row() && team.lane >= step;
    // The column below the diagonal is the pivot's row by symmetry.
    if (below) team.broadcast(step)[team.lane - step] = values[0];
    team.sync();
    const T pivot = *team.broadcast(step);
    definite = definite && pivot > T(0);
    const T root = square_root(pivot);
    if (below) team.own_row()[step] = team.lane == step ? root : values[0] / root;
    team.eliminate(values, values[0] / pivot, step, kN - step);
  }
  if (!definite && team.has_row()) {
    for (int i = 0; i <= team.lane; ++i) team.own_row()[i] = T(0) / T(0);
  }
  team.store(factors, [&](int matrix, int row, int column) {
    if (column > row) return T(0);
    return team.storage.rows[(matrix * kN + row) * Sizes::kRowStride + column];
  });
}

}  // namespace tilekern

// LU factors of small matrices: P A = L U.
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

}  // namespace tilekern

// Inverses of small matrices.
#pragma once

#include "linalg/matrix_rows.cuh"

namespace tilekern {

// Gauss-Jordan elimination in place, with partial pivoting. Each step removes the pivot's column,
// which is the first, and appends a column of the inverse, so after all steps the columns are in
// their original order.
template <typename T, int kN>
__global__ void __launch_bounds__(MatrixSizes<T, kN>::kThreads)
    matrix_inverse(const T* matrices, T* inverses, int64 count) {
  __shared__ MatrixStorage<T, kN> storage[MatrixSizes<T, kN>::kTeams];
  const MatrixTeam<T, kN> team(storage, count);
  if (team.matrices <= 0) return;
  team.load(matrices);
  T values[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) values[i] = team.has_row() ? team.own_row()[i] : T(0);

  int position = team.lane;
#pragma unroll 1
  for (int step = 0; step < kN; ++step) {
    const int pivot = team.choose_pivot(values[0], position, step);
    const bool chosen = team.swap_rows(pivot, step, position);
    if (chosen) team.broadcast_row(values, step);
    team.sync();
    const T reciprocal = T(1) / *team.broadcast(step);
    const T factor = chosen ? -reciprocal : values[0] * reciprocal;
    if (chosen) {
#pragma unroll
      for (int i = 0; i < kN; ++i) values[i] = T(0);
    }
    team.eliminate(values, factor, step, kN);
    values[kN - 1] = -factor;
  }

  // The registers hold the inverse of P A; the order of the stored columns undoes P.
  if (team.has_row()) {
    T* row = team.row(position);
#pragma unroll
    for (int i = 0; i < kN; ++i) row[team.storage.order[team.group][i]] = values[i];
  }
  team.store(inverses, [&](int matrix, int row, int column) {
    return team.storage.rows[(matrix * kN + row) * MatrixSizes<T, kN>::kRowStride + column];
  });
}

}  // namespace tilekern

// Inverses of small matrices.
#pragma once

#include "linalg/matrix_rows.cuh"

namespace tilekern {

// Solves A X = I by LU factors, and stores the inverses of the groups' matrices that are
// `singular`. A row is divided by its pivot last, so it is infinite where LAPACK's is. Rows stay in
// shared memory, so that this rare path takes none of the kernel's registers.
template <typename T, int kN>
inline void invert_singular(const MatrixTeam<T, kN>& team, const T* matrices, T* inverses,
                            bool singular) {
  if (!team.has_matrix()) singular = false;
  const int64 matrix = (team.first + (singular ? team.group : 0)) * kN * kN;
  T* own = team.own_row();
  int position = team.lane;
  team.sync();
  if (singular) {
#pragma unroll 1
    for (int i = 0; i < kN; ++i) own[i] = matrices[matrix + team.lane * kN + i];
  }
#pragma unroll 1
  for (int step = 0; step < kN; ++step) {
    team.swap_rows(team.choose_pivot(own[step], position, step), step, position);
    team.sync();
    if (!singular || position <= step) continue;
    const T* known = team.row(team.storage.order[team.group][step]);
    const T factor = known[step] == T(0) ? own[step] : own[step] / known[step];
    own[step] = factor;
#pragma unroll 1
    for (int i = step + 1; i < kN; ++i) own[i] -= factor * known[i];
  }
#pragma unroll 1
  for (int column = 0; column < kN; ++column) {
    T x[] = {T(team.lane == column)};
    team.template substitute<true, true>(x, position, [&](int k) { return own[k]; });
    team.template substitute<false, false>(x, position, [&](int k) { return own[k]; });
    if (singular) inverses[matrix + position * kN + column] = x[0];
  }
}

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
  bool singular = false;
#pragma unroll 1
  for (int step = 0; step < kN; ++step) {
    const int pivot = team.choose_pivot(values[0], position, step);
    const bool chosen = team.swap_rows(pivot, step, position);
    if (chosen) team.broadcast_row(values, step);
    team.sync();
    const T reciprocal = T(1) / *team.broadcast(step);
    singular |= magnitude_bits(reciprocal) == magnitude_bits(T(1) / T(0));
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
  if (team.any(singular)) invert_singular(team, matrices, inverses, singular);
}

}  // namespace tilekern

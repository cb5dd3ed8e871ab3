// Tridiagonal systems of a lane.
#pragma once

#include "scalar_functions.cuh"

namespace tilekern::lax {

// Elements of an array in memory that are `step` apart.
template <typename T>
struct Line {
  T* first;
  long long step;
  T& operator[](long long i) const { return first[i * step]; }
};

// Solves a system of kSize equations with kColumns right sides, whose columns are `column_step`
// apart, by elimination with exchanges of neighbouring rows, as LAPACK's gtsv. A row that is
// exchanged with the next one gets a second upper element. The solution takes the place of the
// right sides, and the eliminated rows that of the diagonals. The solution of a singular system is
// NaN.
//
// A step depends on the one before. So a row is loaded a step before it is used.
template <int kSize, int kColumns, typename T>
inline void solve_tridiagonal(Line<T> lower, Line<T> diagonal, Line<T> upper, Line<T> right,
                              long long column_step) {
  constexpr int kUnrolled = kSize <= 16 ? kSize : 1;
  const auto at = [&](int row, int column) -> T& {
    return right.first[row * right.step + column * column_step];
  };
  struct Row {
    T under, pivot, beside, right[kColumns];
  };
  const auto load = [&](int i) {
    // The first element of `lower` and the last one of `upper` are not part of the system.
    Row row{i > 0 ? lower[i] : T(0), diagonal[i], i + 1 < kSize ? upper[i] : T(0), {}};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) row.right[c] = at(i, c);
    return row;
  };
  // The row whose first element is to be eliminated from the next one.
  Row row = load(0), next = load(kSize > 1);
#pragma unroll kUnrolled
  for (int i = 0; i + 1 < kSize; ++i) {
    const Row after = load(i + 2 < kSize ? i + 2 : i + 1);
    const bool exchanged = abs(next.under) > abs(row.pivot);
    const T top = exchanged ? next.under : row.pivot;
    const T factor = (exchanged ? row.pivot : next.under) / top;
    const T first = exchanged ? next.pivot : row.beside;
    const T second = exchanged ? next.beside : T(0);
    row.pivot = (exchanged ? row.beside : next.pivot) - factor * first;
    row.beside = (exchanged ? T(0) : next.beside) - factor * second;
    diagonal[i] = top;
    upper[i] = first;
    lower[i] = second;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const T own = exchanged ? next.right[c] : row.right[c];
      row.right[c] = (exchanged ? row.right[c] : next.right[c]) - factor * own;
      at(i, c) = own;
    }
    next = after;
  }
  T x[kColumns], later[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const T last = row.right[c] / row.pivot;
    x[c] = row.pivot != T(0) ? last : last - last;
    later[c] = T(0);
    at(kSize - 1, c) = x[c];
  }
  const auto load_eliminated = [&](int i) {
    Row row{lower[i], diagonal[i], upper[i], {}};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) row.right[c] = at(i, c);
    return row;
  };
  if constexpr (kSize > 1) row = load_eliminated(kSize - 2);
#pragma unroll kUnrolled
  for (int i = kSize - 2; i >= 0; --i) {
    const Row before = load_eliminated(i > 0 ? i - 1 : 0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const T rest = row.right[c] - row.under * later[c];
      later[c] = x[c];
      x[c] = (rest - row.beside * later[c]) / row.pivot;
      at(i, c) = x[c];
    }
    row = before;
  }
}

}  // namespace tilekern::lax

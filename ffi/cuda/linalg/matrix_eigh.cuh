// Eigenvalues of small symmetric matrices by two-sided Jacobi (Golub and Van Loan, section 8.5).
//
// In each step a lane has one or more pairs of rows, and computes their rotations. Then the blocks
// of 2x2 elements where two pairs meet are rotated from both sides.
#pragma once

#include "linalg/matrix_group.cuh"

namespace tilekern {

template <typename T, int kN, bool kVectors>
struct EighSizes {
  using Pairs = RowPairs<kN>;
  static constexpr int kLanes = group_lanes(kN, kN, (kN + 1) / 2);
  static constexpr int kStride = MatrixGroup<T, kLanes, 0>::row_stride(kN);
  static constexpr int kValues = kN * kStride;
  static constexpr int kRotations = kValues + kN;  // 4 coefficients of each pair
  static constexpr int kRotated = kRotations + 4 * Pairs::kPairs;
  static constexpr int kElements = kRotated + kVectors * kN * kStride;
  using Group = MatrixGroup<T, kLanes, kElements>;
};

// Diagonalises a symmetric matrix, in ascending order. Returns whether it has converged.
template <typename T, int kN, bool kVectors>
inline bool diagonalise_symmetric(const typename EighSizes<T, kN, kVectors>::Group& group, T* own) {
  using Sizes = EighSizes<T, kN, kVectors>;
  using Group = typename Sizes::Group;
  using Pairs = RowPairs<kN>;
  constexpr int kStride = Sizes::kStride, kPairs = Pairs::kPairs;
  T *const rotations = own + Sizes::kRotations, *const rotated = own + Sizes::kRotated;
  // Only the lower triangle exists.
  const auto at = [&](int row, int column) -> T& {
    return own[max_of(row, column) * kStride + min_of(row, column)];
  };
  const auto rotate_pair = [&](int pair, T& p, T& q) {
    const T* by = rotations + 4 * pair;
    const T before = p;
    p = by[0] * before + by[1] * q;
    q = by[2] * before + by[3] * q;
  };
  bool active = true;
#pragma unroll 1
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    bool moved = false;
    Group::each_step(Pairs::kSteps, [&](int step) {
      group.each_row(0, kPairs, [&](int pair) {
        const Pairs rows(step, pair);
        const bool exists = rows.q < kN;
        const int q = exists ? rows.q : rows.p;
        const T alpha = at(rows.p, rows.p), beta = at(q, q), gamma = exists ? at(q, rows.p) : T(0);
        const T norms =
            square_root(alpha < T(0) ? -alpha : alpha) * square_root(beta < T(0) ? -beta : beta);
        const T size = gamma < T(0) ? -gamma : gamma;
        const bool rotate = active && size > FloatFormat<T>::kEpsilon * norms;
        const bool exchange = active && alpha > beta;
        moved = moved || rotate || exchange;
        const JacobiRotation<T> by(alpha, beta, gamma, rotate, exchange);
        rotations[4 * pair] = by.first_p;
        rotations[4 * pair + 1] = by.first_q;
        rotations[4 * pair + 2] = by.second_p;
        rotations[4 * pair + 3] = by.second_q;
        if (!exists) return;
        const T low = alpha - by.change, high = beta + by.change;
        at(rows.p, rows.p) = exchange ? high : low;
        at(q, q) = exchange ? low : high;
        at(q, rows.p) = rotate ? T(0) : gamma;
        if constexpr (kVectors) {
          Group::each_element(0, kN, [&](int i) {
            by.apply(rotated[rows.p * kStride + i], rotated[q * kStride + i]);
          });
        }
      });
      group.sync();
      // Each two pairs meet once: a pair has those that follow it in a circle, up to half of it.
      group.each_row(0, kPairs, [&](int pair) {
        const Pairs rows(step, pair);
        Group::each_element(1, kPairs / 2 + 1, [&](int offset) {
          if (2 * offset == kPairs && pair >= offset) return;
          const int other = (pair + offset) % kPairs;
          const Pairs columns(step, other);
          const bool has_row = rows.q < kN, has_column = columns.q < kN;
          T pp = at(rows.p, columns.p);
          T pq = has_column ? at(rows.p, columns.q) : T(0);
          T qp = has_row ? at(rows.q, columns.p) : T(0);
          T qq = has_row && has_column ? at(rows.q, columns.q) : T(0);
          rotate_pair(pair, pp, qp);
          rotate_pair(pair, pq, qq);
          rotate_pair(other, pp, pq);
          rotate_pair(other, qp, qq);
          at(rows.p, columns.p) = pp;
          if (has_column) at(rows.p, columns.q) = pq;
          if (has_row) at(rows.q, columns.p) = qp;
          if (has_row && has_column) at(rows.q, columns.q) = qq;
        });
      });
      group.sync();
    });
    active = group.any(moved) && active;
    if (__ballot_sync(~0u, active) == 0) break;
  }
  return !active;
}

// values (n), and `vectors` (n, n) if kVectors. The lower or the upper triangle is read, or the
// mean of both if kSymmetrize.
template <typename T, int kN, bool kVectors, bool kLower, bool kSymmetrize>
__global__ void __launch_bounds__(32)
    matrix_eigh(const T* matrices, T* values, T* vectors, int64 count) {
  using Sizes = EighSizes<T, kN, kVectors>;
  using Group = typename Sizes::Group;
  constexpr int kStride = Sizes::kStride;
  const Group group(count);
  T held[Group::kRegisters ? Sizes::kElements : 1];
  T* const own = Group::kRegisters ? held : group.memory + group.index * Group::kSize;
  T *const rotated = own + Sizes::kRotated, *const own_values = own + Sizes::kValues;
  group.template load<kN, kN>(own, matrices, [](T* own, int row, int column, T value) {
    own[kLower ? row * kStride + column : column * kStride + row] = value;
  });
  group.each_row(0, kN, [&](int row) {
    group.each_element(0, kN, [&](int i) {
      // Halves do not overflow.
      if (kSymmetrize && i < row) {
        own[row * kStride + i] = own[row * kStride + i] / T(2) + own[i * kStride + row] / T(2);
      }
    });
  });
  group.sync();
  group.each_row(0, kN, [&](int row) {
    group.each_element(0, kN, [&](int i) {
      if (i > row) own[row * kStride + i] = T(0);
    });
  });
  if constexpr (kVectors) group.set_identity(rotated, kN, kN, kStride);
  group.sync();
  const auto scaled = group.scale(own, kN, kN, kStride);
  const bool converged = diagonalise_symmetric<T, kN, kVectors>(group, own);
  const bool failed = !converged || !scaled.finite;
  group.each_row(0, kN, [&](int row) { own_values[row] = own[row * (kStride + 1)]; });
  group.sync();
  sort_rows<kN>(group, own_values, kVectors ? rotated : nullptr, static_cast<T*>(nullptr), kN,
                kStride, [](T x, T y) { return x < y; });
  group.each_row(0, kN, [&](int row) {
    own_values[row] = failed ? T(0) / T(0) : own_values[row] * scaled.up;
  });
  group.template store<1, kN>(own, values,
                              [](T* own, int, int column) { return own[Sizes::kValues + column]; });
  if constexpr (kVectors) {
    group.spoil(rotated, kN, kN, kStride, failed);
    group.template store<kN, kN>(own, vectors, [](T* own, int row, int column) {
      return own[Sizes::kRotated + column * kStride + row];
    });
  }
}

}  // namespace tilekern

// Singular values of small matrices by one-sided Jacobi (Hestenes 1958, de Rijk 1989), as
// cpu/matrix_decompositions_kernel.inc computes them.
#pragma once

#include "linalg/matrix_group.cuh"

namespace tilekern {

// The memory of a matrix: offsets of its parts, in elements.
template <typename T, int kM, int kN, bool kVectors, bool kFull>
struct SvdSizes {
  static constexpr int kShort = min_of(kM, kN), kLong = max_of(kM, kN);
  static constexpr bool kTall = kM > kN, kReduced = kLong > kShort;
  static constexpr int kCount = kFull ? kLong : kShort;  // of the longer vectors
  static constexpr int kLanes = group_lanes(kM, kN, (kShort + 1) / 2);
  static constexpr int kLongStride = MatrixGroup<T, kLanes, 0>::row_stride(kLong);
  static constexpr int kShortStride = MatrixGroup<T, kLanes, 0>::row_stride(kShort);
  static constexpr int kSquare = kReduced ? kShort * kLongStride : 0;
  static constexpr int kValues = kSquare + kShort * kShortStride;
  static constexpr int kRotated = kValues + kShort;
  static constexpr int kBasis = kRotated + kVectors * kShort * kShortStride;
  static constexpr int kTaus = kBasis + kVectors * kCount * kLongStride;
  static constexpr int kElements = kTaus + 2 * kShort;
  using Group = MatrixGroup<T, kLanes, kElements>;
};

// Makes the rows of a square matrix orthogonal, in descending order of norm, and applies the
// rotations to `rotated` also. Returns whether they have converged.
template <int kN, bool kVectors, typename Group, typename T>
inline bool orthogonalise(const Group& group, T* x, T* rotated, int stride) {
  using Pairs = RowPairs<kN>;
  using Format = FloatFormat<T>;
  const T tolerance = Format::kEpsilon * square_root(T(kN));
  bool active = true;
#pragma unroll 1
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    bool moved = false;
    Group::each_step(Pairs::kSteps, [&](int step) {
      group.each_row(0, Pairs::kPairs, [&](int pair) {
        const Pairs rows(step, pair);
        if (rows.q >= kN) return;
        T *p = x + rows.p * stride, *q = x + rows.q * stride;
        T alpha = T(0), beta = T(0), gamma = T(0);
        Group::each_element(0, kN, [&](int i) {
          alpha += p[i] * p[i];
          beta += q[i] * q[i];
          gamma += p[i] * q[i];
        });
        const T size = gamma < T(0) ? -gamma : gamma;
        // A row whose square is too small to be accurate counts as zero.
        const bool rotate = active && size > tolerance * (square_root(alpha) * square_root(beta)) &&
                            min_of(alpha, beta) > Format::kSmallestSquare;
        const bool exchange = active && alpha < beta;
        if (!rotate && !exchange) return;
        moved = true;
        const JacobiRotation<T> by(alpha, beta, gamma, rotate, exchange);
        Group::each_element(0, kN, [&](int i) { by.apply(p[i], q[i]); });
        if constexpr (kVectors) {
          T *rotated_p = rotated + rows.p * stride, *rotated_q = rotated + rows.q * stride;
          Group::each_element(0, kN, [&](int i) { by.apply(rotated_p[i], rotated_q[i]); });
        }
      });
      group.sync();
    });
    active = group.any(moved) && active;
    if (__ballot_sync(~0u, active) == 0) break;
  }
  return !active;
}

// values (k), left (m, k or m) and right (k or n, n), of which the latter two are written if
// kVectors.
template <typename T, int kM, int kN, bool kVectors, bool kFull>
__global__ void __launch_bounds__(32)
    matrix_svd(const T* matrices, T* values, T* left, T* right, int64 count) {
  using Sizes = SvdSizes<T, kM, kN, kVectors, kFull>;
  using Group = typename Sizes::Group;
  constexpr int kShort = Sizes::kShort, kLong = Sizes::kLong, kCount = Sizes::kCount;
  constexpr int kLongStride = Sizes::kLongStride, kShortStride = Sizes::kShortStride;
  constexpr bool kTall = Sizes::kTall;
  const Group group(count);
  T held[Group::kRegisters ? Sizes::kElements : 1];
  T* const own = Group::kRegisters ? held : group.memory + group.index * Group::kSize;
  T *const square = own + Sizes::kSquare, *const rotated = own + Sizes::kRotated;
  T *const basis = own + Sizes::kBasis, *const taus = own + Sizes::kTaus;
  T* const own_values = own + Sizes::kValues;
  group.clear(own, kShort * kLongStride);
  group.template load<kM, kN>(own, matrices, [](T* own, int row, int column, T value) {
    own[kTall ? column * kLongStride + row : row * kLongStride + column] = value;
  });
  const auto scaled = group.scale(own, kShort * kLongStride);
  if constexpr (Sizes::kReduced) {
    group.factor(own, kShort, kLong, kLongStride, taus);
    group.each_row(0, kShort, [&](int row) {
      Group::each_element(0, kShort, [&](int i) {
        square[row * kShortStride + i] = i <= row ? own[row * kLongStride + i] : T(0);
      });
    });
  }
  if constexpr (kVectors) group.set_identity(rotated, kShort, kShort, kShortStride);
  group.sync();
  const bool converged = orthogonalise<kShort, kVectors>(group, square, rotated, kShortStride);
  const bool failed = !converged || !scaled.finite;
  group.each_row(0, kShort, [&](int row) {
    own_values[row] = Group::norm(square + row * kShortStride, kShort);
  });
  group.sync();
  sort_rows<kShort>(group, own_values, square, kVectors ? rotated : nullptr, kShort, kShortStride,
                    [](T x, T y) { return x > y; });
  group.each_row(0, kShort, [&](int row) {
    own_values[row] = failed ? T(0) / T(0) : own_values[row] * scaled.up;
  });
  group.template store<1, kShort>(
      own, values, [](T* own, int, int column) { return own[Sizes::kValues + column]; });
  if constexpr (kVectors) {
    // The rows are orthogonal, so their triangular factor is diagonal. The orthogonal factor has
    // the normalised rows, and completes them to a basis where singular values are zero.
    T* const square_taus = taus + kShort;
    group.factor(square, kShort, kShort, kShortStride, square_taus);
    group.set_identity(basis, kCount, kLong, kLongStride);
    group.sync();
    group.apply_reflections(square, kShort, kShort, kShortStride, square_taus, basis, kShort,
                            kLongStride, /*units=*/true);
    group.each_row(0, kShort, [&](int row) {
      const bool negative = square[row * kShortStride + row] < T(0);
      Group::each_element(0, kShort, [&](int i) {
        if (negative) basis[row * kLongStride + i] = -basis[row * kLongStride + i];
      });
    });
    group.sync();
    if constexpr (Sizes::kReduced) {
      group.apply_reflections(own, kShort, kLong, kLongStride, taus, basis, kCount, kLongStride,
                              /*units=*/false);
    }
    group.spoil(basis, kCount, kLong, kLongStride, failed);
    group.spoil(rotated, kShort, kShort, kShortStride, failed);
    group.template store<kM, kTall ? kCount : kShort>(own, left, [](T* own, int row, int column) {
      return kTall ? own[Sizes::kBasis + column * kLongStride + row]
                   : own[Sizes::kRotated + column * kShortStride + row];
    });
    group.template store<kTall ? kShort : kCount, kN>(own, right, [](T* own, int row, int column) {
      return kTall ? own[Sizes::kRotated + row * kShortStride + column]
                   : own[Sizes::kBasis + row * kLongStride + column];
    });
  }
}

}  // namespace tilekern

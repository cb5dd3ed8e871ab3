// Singular values of small matrices by one-sided Jacobi (Hestenes 1958). Exchanges of rows in a
// sweep (de Rijk 1989) would take more sweeps in the order of a tournament.
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
  static constexpr int kWide = kLanes == 1 ? 1 : 16 / sizeof(T);
  using Rows = MatrixGroup<T, kLanes, 0, kWide>;
  static constexpr int kLongStride = Rows::row_stride(kLong);
  static constexpr int kShortStride = Rows::row_stride(kShort);
  static constexpr int kSquare = kReduced ? kShort * kLongStride : 0;
  static constexpr int kRotated = kSquare + kShort * kShortStride;
  static constexpr int kBasis = kRotated + kVectors * kShort * kShortStride;
  // Loads of several norms may reach into what follows, which nobody writes at that time.
  static constexpr int kNorms = kBasis + kVectors * kCount * kLongStride;
  static constexpr int kTaus = kNorms + kShort;
  static constexpr int kValues = kTaus + 2 * kShort;
  static constexpr int kPlaces = kValues + kShort;
  static constexpr int kElements = kPlaces + kShort;
  using Group = MatrixGroup<T, kLanes, kElements, kWide>;
};

// Makes the rows of a square matrix orthogonal, and applies the rotations to `rotated` also.
// Returns whether they have converged.
template <int kN, bool kVectors, typename Group, typename T>
inline bool orthogonalise(const Group& group, T* x, T* rotated) {
  using Pairs = RowPairs<kN>;
  using Format = FloatFormat<T>;
  using Vector = typename Group::Vector;
  constexpr int kStride = Group::row_stride(kN), kWide = Group::kWide;
  constexpr int kVectorsOfRow = (kN + kWide - 1) / kWide;
  // Registers hold a pair of rows from the products to the rotation, if there are enough.
  constexpr bool kHeld = kVectorsOfRow * sizeof(Vector) <= 192;
  constexpr int kUnrolled = kHeld ? kVectorsOfRow : 4;
  const T tolerance = Format::kEpsilon * square_root(T(kN));
  bool active = true;
#pragma unroll 1
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    bool moved = false;
    Group::each_step(Pairs::kSteps, [&](int step) {
      group.each_row(0, Pairs::kPairs, [&](int pair) {
        const Pairs rows(step, pair);
        if (rows.q >= kN) return;
        T *const own_p = x + rows.p * kStride, *const own_q = x + rows.q * kStride;
        Vector p[kHeld ? kVectorsOfRow : 1], q[kHeld ? kVectorsOfRow : 1];
        Vector alphas = {}, betas = {}, gammas = {};
#pragma unroll kUnrolled
        for (int k = 0; k < kVectorsOfRow; ++k) {
          const int held = kHeld ? k : 0;
          p[held] = Group::vector(own_p, k * kWide);
          q[held] = Group::vector(own_q, k * kWide);
#pragma unroll
          for (int i = 0; i < kWide; ++i) {
            alphas.items[i] += p[held].items[i] * p[held].items[i];
            betas.items[i] += q[held].items[i] * q[held].items[i];
            gammas.items[i] += p[held].items[i] * q[held].items[i];
          }
        }
        T alpha = T(0), beta = T(0), gamma = T(0);
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          alpha += alphas.items[i];
          beta += betas.items[i];
          gamma += gammas.items[i];
        }
        // A row whose square is too small to be accurate counts as zero.
        const bool rotate =
            active && absolute(gamma) > tolerance * (square_root(alpha) * square_root(beta)) &&
            min_of(alpha, beta) > Format::kSmallestSquare;
        if (!rotate) return;
        moved = true;
        const JacobiRotation<T> by(alpha, beta, gamma, rotate);
        const auto apply = [&](Vector& p, Vector& q) {
#pragma unroll
          for (int i = 0; i < kWide; ++i) by.apply(p.items[i], q.items[i]);
        };
#pragma unroll kUnrolled
        for (int k = 0; k < kVectorsOfRow; ++k) {
          const int held = kHeld ? k : 0;
          Vector &to_p = Group::vector(own_p, k * kWide), &to_q = Group::vector(own_q, k * kWide);
          if constexpr (!kHeld) {
            p[held] = to_p;
            q[held] = to_q;
          }
          apply(p[held], q[held]);
          to_p = p[held];
          to_q = q[held];
        }
        if constexpr (kVectors) {
#pragma unroll kUnrolled
          for (int k = 0; k < kVectorsOfRow; ++k) {
            Vector& to_p = Group::vector(rotated + rows.p * kStride, k * kWide);
            Vector& to_q = Group::vector(rotated + rows.q * kStride, k * kWide);
            Vector v = to_p, w = to_q;
            apply(v, w);
            to_p = v;
            to_q = w;
          }
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
  T *const own_values = own + Sizes::kValues, *const places = own + Sizes::kPlaces;
  group.clear(own, kShort * kLongStride);
  group.template load<kM, kN>(own, matrices, [](T* own, int row, int column, T value) {
    own[kTall ? column * kLongStride + row : row * kLongStride + column] = value;
  });
  const auto scaled = group.scale(own, kShort * kLongStride);
  const auto long_row = [&](int i) { return own + i * kLongStride; };
  if constexpr (Sizes::kReduced) {
    group.factor(long_row, kShort, kLong, taus);
    group.each_row(0, kShort, [&](int row) {
      Group::each_element(0, kShortStride, [&](int i) {
        square[row * kShortStride + i] = i <= row ? own[row * kLongStride + i] : T(0);
      });
    });
  }
  if constexpr (kVectors) group.set_identity(rotated, kShort, kShortStride);
  group.sync();
  const bool converged = orthogonalise<kShort, kVectors>(group, square, rotated);
  const bool failed = !converged || !scaled.finite;
  // Registers are sorted. Rows in memory stay where they are, and row i is that of places[i].
  T* const norms = Group::kRegisters ? own_values : own + Sizes::kNorms;
  group.each_row(0, kShort,
                 [&](int row) { norms[row] = Group::norm(square + row * kShortStride, kShort); });
  group.sync();
  const auto before = [](T x, T y) { return x > y; };
  if constexpr (!Group::kRegisters) {
    group.template sort<kShort>(norms, own_values, places, before);
  } else if constexpr (kVectors) {
    sort_rows<kShort>(own_values, before, square, rotated);
  } else {
    sort_rows<kShort>(own_values, before);
  }
  const auto place = [=](int row) {
    if constexpr (Group::kRegisters) return row;
    return static_cast<int>(places[row]);
  };
  group.each_row(0, kShort, [&](int row) {
    own_values[row] = failed ? T(0) / T(0) : own_values[row] * scaled.up;
  });
  group.template store<1, kShort>(
      own, values, [](T* own, int, int column) { return own[Sizes::kValues + column]; });
  if constexpr (kVectors) {
    // The rows are orthogonal, so their triangular factor is diagonal. The orthogonal factor has
    // the normalised rows, and completes them to a basis where singular values are zero.
    const auto short_row = [&](int i) { return square + place(i) * kShortStride; };
    T* const square_taus = taus + kShort;
    group.factor(short_row, kShort, kShort, square_taus);
    group.set_identity(basis, kCount, kLongStride);
    group.sync();
    group.apply_reflections(short_row, kShort, kShort, square_taus, basis, kShort, kLongStride,
                            /*units=*/true);
    group.each_row(0, kShort, [&](int row) {
      const bool negative = short_row(row)[row] < T(0);
      Group::each_element(0, kShort, [&](int i) {
        if (negative) basis[row * kLongStride + i] = -basis[row * kLongStride + i];
      });
    });
    group.sync();
    if constexpr (Sizes::kReduced) {
      group.apply_reflections(long_row, kShort, kLong, taus, basis, kCount, kLongStride,
                              /*units=*/false);
    }
    group.spoil(basis, kCount, kLong, kLongStride, failed);
    group.spoil(rotated, kShort, kShort, kShortStride, failed);
    const auto rotated_row = [](T* own, int row) {
      if constexpr (!Group::kRegisters) row = static_cast<int>(own[Sizes::kPlaces + row]);
      return own + Sizes::kRotated + row * kShortStride;
    };
    group.template store<kM, kTall ? kCount : kShort>(own, left, [&](T* own, int row, int column) {
      return kTall ? own[Sizes::kBasis + column * kLongStride + row]
                   : rotated_row(own, column)[row];
    });
    group.template store<kTall ? kShort : kCount, kN>(own, right, [&](T* own, int row, int column) {
      return kTall ? rotated_row(own, row)[column]
                   : own[Sizes::kBasis + row * kLongStride + column];
    });
  }
}

}  // namespace tilekern

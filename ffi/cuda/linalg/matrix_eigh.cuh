// Eigenvalues of small symmetric matrices: by Jacobi rotations in the registers of a thread (Golub
// and Van Loan, section 8.5), or by QL steps of a tridiagonal matrix.
#pragma once

#include "linalg/tridiagonal.cuh"

namespace tilekern {

// Loads symmetric matrices as both triangles. The lower or the upper triangle is read, or the mean
// of both if kSymmetrize.
template <int kN, bool kLower, bool kSymmetrize, typename Group, typename T>
inline void load_symmetric(const Group& group, T* own, const T* matrices) {
  constexpr int kStride = Group::row_stride(kN);
  group.template load<kN, kN>(own, matrices, [](T* own, int row, int column, T value) {
    if (kSymmetrize || (kLower ? row >= column : row <= column)) {
      own[row * kStride + column] = value;
      if (!kSymmetrize) own[column * kStride + row] = value;
    }
  });
  if constexpr (kSymmetrize) {
    group.sync();
    group.each_row(0, kN, [&](int row) {
      Group::each_element(0, kN, [&](int i) {
        if (i >= row) return;
        T &below = own[row * kStride + i], &above = own[i * kStride + row];
        // Halves do not overflow.
        below = above = below / T(2) + above / T(2);
      });
    });
  }
  group.sync();
}

// The memory of a matrix of one thread.
template <typename T, int kN, bool kVectors>
struct ThreadEighSizes {
  static constexpr int kValues = kN * kN;
  static constexpr int kRotated = kValues + kN;
  static constexpr int kElements = kRotated + kVectors * kN * kN;
  using Group = MatrixGroup<T, 1, kElements>;
};

// Diagonalises a symmetric matrix, of which the lower triangle is read. Returns whether it has
// converged.
template <int kN, bool kVectors, typename T>
inline bool diagonalise_symmetric(T* own, T* rotated) {
  const auto at = [&](int row, int column) -> T& {
    return own[max_of(row, column) * kN + min_of(row, column)];
  };
  bool moved = true;
#pragma unroll 1
  for (int sweep = 0; sweep < kMaxSweeps && moved; ++sweep) {
    moved = false;
#pragma unroll
    for (int p = 0; p < kN; ++p) {
#pragma unroll
      for (int q = p + 1; q < kN; ++q) {
        const T alpha = at(p, p), beta = at(q, q), gamma = at(q, p);
        const T norms = square_root(absolute(alpha)) * square_root(absolute(beta));
        const bool rotate = absolute(gamma) > FloatFormat<T>::kEpsilon * norms;
        moved = moved || rotate;
        const JacobiRotation<T> by(alpha, beta, gamma, rotate);
        at(p, p) = alpha - by.change;
        at(q, q) = beta + by.change;
        at(q, p) = rotate ? T(0) : gamma;
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          if (i != p && i != q) by.apply(at(i, p), at(i, q));
          if constexpr (kVectors) by.apply(rotated[p * kN + i], rotated[q * kN + i]);
        }
      }
    }
  }
  return !moved;
}

template <typename T, int kN, bool kVectors, bool kLower, bool kSymmetrize>
inline void thread_eigh(const T* matrices, T* values, T* vectors, int64 count) {
  using Sizes = ThreadEighSizes<T, kN, kVectors>;
  using Group = typename Sizes::Group;
  const Group group(count);
  T own[Sizes::kElements];
  T *const rotated = own + Sizes::kRotated, *const own_values = own + Sizes::kValues;
  load_symmetric<kN, kLower, kSymmetrize>(group, own, matrices);
  if constexpr (kVectors) group.set_identity(rotated, kN, kN);
  const auto scaled = group.scale(own, kN * kN);
  const bool failed = !diagonalise_symmetric<kN, kVectors>(own, rotated) || !scaled.finite;
  group.each_row(0, kN, [&](int row) { own_values[row] = own[row * (kN + 1)]; });
  const auto before = [](T x, T y) { return x < y; };
  if constexpr (kVectors) {
    sort_rows<kN>(own_values, before, rotated);
  } else {
    sort_rows<kN>(own_values, before);
  }
  group.each_row(0, kN, [&](int row) {
    own_values[row] = failed ? T(0) / T(0) : own_values[row] * scaled.up;
  });
  group.template store<1, kN>(own, values,
                              [](T* own, int, int column) { return own[Sizes::kValues + column]; });
  if constexpr (kVectors) {
    group.spoil(rotated, kN, kN, kN, failed);
    group.template store<kN, kN>(own, vectors, [](T* own, int row, int column) {
      return own[Sizes::kRotated + column * kN + row];
    });
  }
}

template <typename T, int kN, bool kVectors, bool kLower, bool kSymmetrize>
inline void group_eigh(const T* matrices, T* values, T* vectors, int64 count) {
  using Sizes = TridiagonalSizes<T, kN>;
  using Group = typename Sizes::Group;
  constexpr int kStride = Sizes::kStride;
  const Group group(count);
  T* const own = group.memory + group.index * Group::kSize;
  group.clear(own, kN * kStride);
  load_symmetric<kN, kLower, kSymmetrize>(group, own, matrices);
  const auto scaled = group.scale(own, kN * kStride);
  const Tridiagonal<T, kN> tridiagonal(group, own);
  tridiagonal.reduce();
  if constexpr (kVectors) tridiagonal.form_rotation();
  const bool failed = !tridiagonal.template diagonalise<kVectors>() || !scaled.finite;
  T *const diagonal = own + Sizes::kDiagonal, *const sorted = own + Sizes::kSorted;
  group.template sort<kN>(diagonal, sorted, own + Sizes::kPlaces, [](T x, T y) { return x < y; });
  group.each_row(0, kN,
                 [&](int row) { sorted[row] = failed ? T(0) / T(0) : sorted[row] * scaled.up; });
  group.template store<1, kN>(own, values,
                              [](T* own, int, int column) { return own[Sizes::kSorted + column]; });
  if constexpr (kVectors) {
    group.spoil(own, kN, kN, kStride, failed);
    group.template store<kN, kN>(own, vectors, [](T* own, int row, int column) {
      return own[static_cast<int>(own[Sizes::kPlaces + column]) * kStride + row];
    });
  }
}

// values (n), and `vectors` (n, n) if kVectors. The lower or the upper triangle is read, or the
// mean of both if kSymmetrize.
template <typename T, int kN, bool kVectors, bool kLower, bool kSymmetrize>
__global__ void __launch_bounds__(32)
    matrix_eigh(const T* matrices, T* values, T* vectors, int64 count) {
  if constexpr (kN <= kThreadRows) {
    thread_eigh<T, kN, kVectors, kLower, kSymmetrize>(matrices, values, vectors, count);
  } else {
    group_eigh<T, kN, kVectors, kLower, kSymmetrize>(matrices, values, vectors, count);
  }
}

}  // namespace tilekern

// Eigenvalues of a symmetric matrix of a lane, by a group of threads and Jacobi's method.
#pragma once

#include "lane_groups.cuh"
#include "linalg/matrix_group.cuh"

namespace tilekern::lax {

// Makes the off-diagonal elements of `a` vanish, which has both triangles, and sets the rows of
// `vectors` to the eigenvectors. `rotations` has room for 3 numbers of each pair of rows, and
// `rows` for 2.
//
// A step rotates disjoint pairs of rows, and the same columns. A thread takes blocks of the rows of
// one pair and the columns of another one, and their mirror images, so that the matrix stays
// symmetric and nobody else accesses them.
template <int kThreads, int kN, typename T>
inline void diagonalise(T* a, T* vectors, T* rotations, int* rows) {
  using Pairs = RowPairs<kN>;
  constexpr int kPairs = Pairs::kPairs, kBlocks = kPairs * (kPairs + 1) / 2;
  const int rank = threadIdx.x % kThreads;
  const auto larger = [](T x, T y) { return x > y ? x : y; };
  const auto largest = [&](bool with_diagonal) {
    T found = T(0);
    for (int i = rank; i < kN * kN; i += kThreads) {
      if (with_diagonal || i / kN != i % kN) found = larger(found, abs(a[i]));
    }
    return reduced_in_group<kThreads>(found, larger);
  };
  for (int i = rank; i < kN * kN; i += kThreads) vectors[i] = T(i / kN == i % kN);
  // Eigenvalues have an error of this order.
  const T tolerance = FloatFormat<T>::kEpsilon * largest(true);
  for (int sweep = 0; sweep < kMaxSweeps && largest(false) > tolerance; ++sweep) {
#pragma unroll 1
    for (int step = 0; step < Pairs::kSteps; ++step) {
      group_barrier<kThreads>();
      for (int pair = rank; pair < kPairs; pair += kThreads) {
        const Pairs own(step, pair);
        const int q = min_of(own.q, kN - 1);
        const T between = a[q * kN + own.p];
        const JacobiRotation<T> by(a[own.p * (kN + 1)], a[q * (kN + 1)], between,
                                   own.q < kN && between != T(0));
        rows[2 * pair] = own.p;
        rows[2 * pair + 1] = own.q;
        rotations[pair] = by.c;
        rotations[kPairs + pair] = by.s;
        rotations[2 * kPairs + pair] = by.change;
      }
      group_barrier<kThreads>();
      // Rotates elements of rows p and q.
      const auto rotate = [&](int pair, T& p, T& q) {
        const T c = rotations[pair], s = rotations[kPairs + pair], before = p;
        p = c * before - s * q;
        q = s * before + c * q;
      };
      for (int block = rank; block < kBlocks; block += kThreads) {
        const int i = block % kPairs, j = (i + block / kPairs) % kPairs;
        const int r[2] = {rows[2 * i], rows[2 * i + 1]}, c[2] = {rows[2 * j], rows[2 * j + 1]};
        if (i == j) {
          const T change = rotations[2 * kPairs + i];
          if (r[1] >= kN) continue;
          a[r[0] * (kN + 1)] -= change;
          a[r[1] * (kN + 1)] += change;
          a[r[0] * kN + r[1]] = a[r[1] * kN + r[0]] = T(0);
          continue;
        }
        T x[2][2];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const bool inside = r[m / 2] < kN && c[m % 2] < kN;
          x[m / 2][m % 2] = inside ? a[r[m / 2] * kN + c[m % 2]] : T(0);
        }
        rotate(i, x[0][0], x[1][0]);
        rotate(i, x[0][1], x[1][1]);
        rotate(j, x[0][0], x[0][1]);
        rotate(j, x[1][0], x[1][1]);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          if (r[m / 2] >= kN || c[m % 2] >= kN) continue;
          a[r[m / 2] * kN + c[m % 2]] = a[c[m % 2] * kN + r[m / 2]] = x[m / 2][m % 2];
        }
      }
      for (int i = rank; i < kPairs * kN; i += kThreads) {
        const int p = rows[2 * (i / kN)], q = rows[2 * (i / kN) + 1];
        if (q < kN) rotate(i / kN, vectors[p * kN + i % kN], vectors[q * kN + i % kN]);
      }
    }
    group_barrier<kThreads>();
  }
}

}  // namespace tilekern::lax

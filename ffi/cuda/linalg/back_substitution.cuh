// Back substitution in blocks of 256 rows, and the copies before and after it.
#pragma once

#include "linalg/blocked_lu_pivots.cuh"
#include "ptx.cuh"

namespace tilekern {

inline constexpr int kSubstitutionThreads = 256;

// Rows that are computed together, so that their sums do not wait for each other.
inline constexpr int kTogether = 4;

// Subtracts from rows of right-hand sides the product of `multiples`, whose rows of 32 are
// contiguous in shared memory, with solutions from `first`. A thread has one right-hand side.
template <int kFirst = 0, typename T>
inline void subtract_products(T (&rows)[kTogether], const T* multiples,
                              const T (&x)[kPanelColumns]) {
#pragma unroll
  for (int i = kPanelColumns - 4; i >= kFirst; i -= 4) {
#pragma unroll
    for (int row = 0; row < kTogether; ++row) {
      const Four<T> v = *reinterpret_cast<const Four<T>*>(multiples + row * kPanelColumns + i);
      rows[row] -= v.w * x[i + 3];
      rows[row] -= v.z * x[i + 2];
      rows[row] -= v.y * x[i + 1];
      rows[row] -= v.x * x[i];
    }
  }
}

// Solves for the rows from `kFirst`, given the solutions behind them, and then for those before.
template <int kFirst = kPanelColumns - kTogether, typename T>
inline void solve_upper(const T* triangle, T (&x)[kPanelColumns]) {
  const T* own = triangle + kFirst * kPanelColumns;
  T rest[kTogether];
#pragma unroll
  for (int row = 0; row < kTogether; ++row) rest[row] = x[kFirst + row];
  subtract_products<kFirst + kTogether>(rest, own, x);
#pragma unroll
  for (int row = kTogether - 1; row >= 0; --row) {
    const Four<T> v = *reinterpret_cast<const Four<T>*>(own + row * kPanelColumns + kFirst);
    const T elements[kTogether] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int column = kTogether - 1; column > row; --column) {
      rest[row] -= elements[column] * x[kFirst + column];
    }
    // A quotient by the reciprocal, which does not depend on the other rows, and one correction.
    const T reciprocal = approximate_reciprocal(elements[row]);
    const T quotient = rest[row] * reciprocal;
    x[kFirst + row] = quotient + (rest[row] - quotient * elements[row]) * reciprocal;
  }
  if constexpr (kFirst > 0) solve_upper<kFirst - kTogether>(triangle, x);
}

// Solves systems with the upper triangle of a block of 256 rows, in place. A CTA has 32 columns of
// `solutions`, one for each lane of its warps.
//
// The block is taken in parts of 32 columns, from the last. Their product is subtracted from the 32
// rows above by all warps. Then one warp solves these, while the others subtract the product from
// the rows above them.
template <typename T>
__global__ void __launch_bounds__(kSubstitutionThreads, sizeof(T) == 4 ? 2 : 1)
    back_substitution(const T* triangle, T* solutions, int triangle_stride, int solution_stride) {
  constexpr int kRows = kBlockColumns, kPart = kPanelColumns, kParts = kRows / kPart;
  constexpr int kElements = 16 / sizeof(T), kVectors = kPart / kElements;
  constexpr int kWarps = kSubstitutionThreads / 32;
  extern __shared__ float4 shared[];
  T* x = reinterpret_cast<T*>(shared);       // [kRows][32]
  T* diagonals = x + kRows * 32;             // [2][kPart][kPart]
  T* above = diagonals + 2 * kPart * kPart;  // [2][kRows - kPart][kPart]
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  T* own = solutions + 32 * blockIdx.x;

  // Copies rows of a part's columns; those of its own on the diagonal, and those above it.
  const auto copy = [&](T* to, int part, int first, int rows) {
    const T* from = triangle + int64(first) * triangle_stride + part * kPart;
    for (int i = thread; i < rows * kVectors; i += kSubstitutionThreads) {
      const int row = i / kVectors, vector = i % kVectors;
      cp_async<16>(shared_address(to + row * kPart + vector * kElements),
                   from + int64(row) * triangle_stride + vector * kElements, true);
    }
  };
  const auto diagonal_of = [&](int part) { return diagonals + part % 2 * kPart * kPart; };
  const auto above_of = [&](int part) { return above + part % 2 * (kRows - kPart) * kPart; };
  const auto copy_diagonal = [&](int part) { copy(diagonal_of(part), part, part * kPart, kPart); };
  const auto copy_above = [&](int part) { copy(above_of(part), part, 0, part * kPart); };
  T solved[kPart];
  const auto load = [&](int part) {
#pragma unroll
    for (int row = 0; row < kPart; ++row) solved[row] = x[(part * kPart + row) * 32 + lane];
  };
  const auto solve = [&](int part) {
    T rows[kPart];
#pragma unroll
    for (int row = 0; row < kPart; ++row) rows[row] = x[(part * kPart + row) * 32 + lane];
    solve_upper(diagonal_of(part), rows);
#pragma unroll
    for (int row = 0; row < kPart; ++row) x[(part * kPart + row) * 32 + lane] = rows[row];
  };
  // Subtracts the part's product from rows.
  const auto subtract = [&](int part, int first) {
    T rows[kTogether];
#pragma unroll
    for (int row = 0; row < kTogether; ++row) rows[row] = x[(first + row) * 32 + lane];
    subtract_products(rows, above_of(part) + first * kPart, solved);
#pragma unroll
    for (int row = 0; row < kTogether; ++row) x[(first + row) * 32 + lane] = rows[row];
  };

  for (int i = thread; i < kRows * kVectors; i += kSubstitutionThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    cp_async<16>(shared_address(x + row * 32 + vector * kElements),
                 own + int64(row) * solution_stride + vector * kElements, true);
  }
  copy_diagonal(kParts - 1);
  copy_diagonal(kParts - 2);
  copy_above(kParts - 1);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  if (warp == 0) solve(kParts - 1);
  __syncthreads();

#pragma unroll 1
  for (int part = kParts - 1; part > 0; --part) {
    // Into what the part before this one has left.
    if (part > 1) {
      copy_above(part - 1);
      copy_diagonal(part - 2);
    }
    cp_async_commit();
    load(part);
    static_assert(kWarps * kTogether == kPart);
    subtract(part, (part - 1) * kPart + warp * kTogether);
    __syncthreads();
    if (warp == 0) {
      solve(part - 1);
    } else {
      for (int row = (warp - 1) * kTogether; row < (part - 1) * kPart;
           row += (kWarps - 1) * kTogether) {
        subtract(part, row);
      }
    }
    cp_async_wait<0>();
    __syncthreads();
  }
  for (int i = thread; i < kRows * kVectors; i += kSubstitutionThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    reinterpret_cast<float4*>(own + int64(row) * solution_stride)[vector] =
        reinterpret_cast<const float4*>(x + row * 32)[vector];
  }
}

// Copies a matrix into a larger one, whose other elements are `diagonal` on its diagonal and 0. A
// CTA writes a row.
template <typename T>
__global__ void __launch_bounds__(256)
    copy_and_extend(const T* from, T* to, int rows, int columns, int extended, int from_stride,
                    int to_stride, T diagonal) {
  const int row = blockIdx.x;
  const T* own = from + int64(row) * from_stride;
  T* own_to = to + int64(row) * to_stride;
  for (int i = threadIdx.x; i < extended; i += 256) {
    own_to[i] = row < rows && i < columns ? own[i] : i == row ? diagonal : 0;
  }
}

// Copies the lower triangle of a square matrix, with ones on the diagonal and zeros above it.
template <typename T>
__global__ void __launch_bounds__(256) copy_unit_lower(const T* from, T* to, int size) {
  const int row = blockIdx.x;
  const T* own = from + int64(row) * size;
  T* own_to = to + int64(row) * size;
  for (int i = threadIdx.x; i < size; i += 256) own_to[i] = i < row ? own[i] : i == row;
}

// Writes column i of a square matrix of `size` rows to column `permutation[i]` of one of `columns`.
template <typename T>
__global__ void __launch_bounds__(512)
    permute_columns(const T* from, const int32* permutation, T* to, int size, int columns) {
  extern __shared__ float4 shared[];
  T* row = reinterpret_cast<T*>(shared);
  const T* own = from + int64(blockIdx.x) * size;
  for (int i = threadIdx.x; i < size; i += 512) row[permutation[i]] = own[i];
  __syncthreads();
  T* own_to = to + int64(blockIdx.x) * columns;
  for (int i = threadIdx.x; i < columns; i += 512) own_to[i] = row[i];
}

}  // namespace tilekern

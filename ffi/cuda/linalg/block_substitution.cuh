// Substitution in blocks of 256 rows, and the copies before and after it.
#pragma once

#include "linalg/blocked_lu_pivots.cuh"
#include "ptx.cuh"

namespace tilekern {

inline constexpr int kSubstitutionThreads = 256;

// Rows that are computed together, so that their accumulators do not wait for each other.
inline constexpr int kRowsPerStep = 4;

// Adds to right-hand sides of rows the product of `multiples`, whose rows of 32 are contiguous in
// shared memory, with the solutions from kBegin to kEnd, or subtracts it. A thread has one
// right-hand side.
template <bool kAdd, int kBegin = 0, int kEnd = kPanelColumns, typename T>
inline void add_products(T (&rows)[kRowsPerStep], const T* multiples, const T (&x)[kPanelColumns]) {
#pragma unroll
  for (int i = kBegin; i < kEnd; i += 4) {
#pragma unroll
    for (int row = 0; row < kRowsPerStep; ++row) {
      const Four<T> v = *reinterpret_cast<const Four<T>*>(multiples + row * kPanelColumns + i);
      rows[row] += (kAdd ? v.x : -v.x) * x[i];
      rows[row] += (kAdd ? v.y : -v.y) * x[i + 1];
      rows[row] += (kAdd ? v.z : -v.z) * x[i + 2];
      rows[row] += (kAdd ? v.w : -v.w) * x[i + 3];
    }
  }
}

// Solves 32 equations with an upper triangle from the last to the first. `x` has the right-hand
// sides, and the solutions from kFirst + kRowsPerStep on.
template <int kFirst = kPanelColumns - kRowsPerStep, typename T>
inline void solve_upper(const T* triangle, T (&x)[kPanelColumns]) {
  const T* own = triangle + kFirst * kPanelColumns;
  T residuals[kRowsPerStep];
#pragma unroll
  for (int row = 0; row < kRowsPerStep; ++row) residuals[row] = x[kFirst + row];
  add_products<false, kFirst + kRowsPerStep>(residuals, own, x);
#pragma unroll
  for (int row = kRowsPerStep - 1; row >= 0; --row) {
    const Four<T> v = *reinterpret_cast<const Four<T>*>(own + row * kPanelColumns + kFirst);
    const T elements[kRowsPerStep] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int column = kRowsPerStep - 1; column > row; --column) {
      residuals[row] -= elements[column] * x[kFirst + column];
    }
    // A quotient by the reciprocal, which does not depend on the other rows, and one correction.
    const T reciprocal = approximate_reciprocal(elements[row]);
    const T quotient = residuals[row] * reciprocal;
    x[kFirst + row] = quotient + (residuals[row] - quotient * elements[row]) * reciprocal;
  }
  if constexpr (kFirst > 0) solve_upper<kFirst - kRowsPerStep>(triangle, x);
}

// Solves 32 equations with a unit lower triangle, whose other elements are negated.
template <int kFirst = 0, typename T>
inline void solve_unit_lower(const T* triangle, T (&x)[kPanelColumns]) {
  const T* own = triangle + kFirst * kPanelColumns;
  T residuals[kRowsPerStep];
#pragma unroll
  for (int row = 0; row < kRowsPerStep; ++row) residuals[row] = x[kFirst + row];
  add_products<true, 0, kFirst>(residuals, own, x);
#pragma unroll
  for (int row = 0; row < kRowsPerStep; ++row) {
    const Four<T> v = *reinterpret_cast<const Four<T>*>(own + row * kPanelColumns + kFirst);
    const T elements[kRowsPerStep] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int column = 0; column < row; ++column) {
      residuals[row] += elements[column] * x[kFirst + column];
    }
    x[kFirst + row] = residuals[row];
  }
  if constexpr (kFirst + kRowsPerStep < kPanelColumns) {
    solve_unit_lower<kFirst + kRowsPerStep>(triangle, x);
  }
}

// Solves systems with a triangle of a block of 256 rows, in place: with the upper one, or with the
// unit lower one, whose other elements are negated. A CTA has 32 columns of `solutions`, one for
// each lane of its warps. If `copies` is not null, the solutions are stored there too, but for the
// 256 columns from `skipped`.
//
// The block is taken in parts of 32 columns. All warps add the product of a part to the 32 rows
// that are next. Then one warp solves these, while the others add the product to the rows behind
// them.
template <typename T, bool kLower>
__global__ void __launch_bounds__(kSubstitutionThreads, sizeof(T) == 4 ? 2 : 1)
    block_substitution(const T* triangle, T* solutions, T* copies, int triangle_stride,
                       int solution_stride, int skipped) {
  constexpr int kRows = kBlockColumns, kPart = kPanelColumns, kParts = kRows / kPart;
  constexpr int kElements = 16 / sizeof(T), kVectors = kPart / kElements;
  constexpr int kWarps = kSubstitutionThreads / 32;
  extern __shared__ float4 shared[];
  T* x = reinterpret_cast<T*>(shared);        // [kRows][32]
  T* diagonals = x + kRows * 32;              // [2][kPart][kPart]
  T* others = diagonals + 2 * kPart * kPart;  // [2][kRows - kPart][kPart]
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_column = 32 * blockIdx.x;
  T* own = solutions + first_column;

  // The part of a step, and the rows that wait for it.
  const auto part_of = [](int step) { return kLower ? step : kParts - 1 - step; };
  const auto waiting_from = [](int part) { return kLower ? (part + 1) * kPart : 0; };
  const auto waiting = [](int part) { return (kLower ? kParts - 1 - part : part) * kPart; };
  // Copies rows of a part's columns.
  const auto copy = [&](T* to, int part, int first, int rows) {
    const T* from = triangle + int64(first) * triangle_stride + part * kPart;
    for (int i = thread; i < rows * kVectors; i += kSubstitutionThreads) {
      const int row = i / kVectors, vector = i % kVectors;
      cp_async<16>(shared_address(to + row * kPart + vector * kElements),
                   from + int64(row) * triangle_stride + vector * kElements, true);
    }
  };
  const auto diagonal_of = [&](int part) { return diagonals + part % 2 * kPart * kPart; };
  const auto others_of = [&](int part) { return others + part % 2 * (kRows - kPart) * kPart; };
  const auto copy_diagonal = [&](int part) { copy(diagonal_of(part), part, part * kPart, kPart); };
  const auto copy_others = [&](int part) {
    copy(others_of(part), part, waiting_from(part), waiting(part));
  };
  T solved[kPart];
  const auto load = [&](int part) {
#pragma unroll
    for (int row = 0; row < kPart; ++row) solved[row] = x[(part * kPart + row) * 32 + lane];
  };
  const auto solve = [&](int part) {
    T rows[kPart];
#pragma unroll
    for (int row = 0; row < kPart; ++row) rows[row] = x[(part * kPart + row) * 32 + lane];
    if constexpr (kLower) {
      solve_unit_lower(diagonal_of(part), rows);
    } else {
      solve_upper(diagonal_of(part), rows);
    }
#pragma unroll
    for (int row = 0; row < kPart; ++row) x[(part * kPart + row) * 32 + lane] = rows[row];
  };
  // Adds the part's product to rows.
  const auto add = [&](int part, int first) {
    T rows[kRowsPerStep];
#pragma unroll
    for (int row = 0; row < kRowsPerStep; ++row) rows[row] = x[(first + row) * 32 + lane];
    add_products<kLower>(rows, others_of(part) + (first - waiting_from(part)) * kPart, solved);
#pragma unroll
    for (int row = 0; row < kRowsPerStep; ++row) x[(first + row) * 32 + lane] = rows[row];
  };

  for (int i = thread; i < kRows * kVectors; i += kSubstitutionThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    cp_async<16>(shared_address(x + row * 32 + vector * kElements),
                 own + int64(row) * solution_stride + vector * kElements, true);
  }
  copy_diagonal(part_of(0));
  copy_diagonal(part_of(1));
  copy_others(part_of(0));
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  if (warp == 0) solve(part_of(0));
  __syncthreads();

#pragma unroll 1
  for (int step = 0; step + 1 < kParts; ++step) {
    const int part = part_of(step), next = part_of(step + 1);
    // Prefetches into the buffers of the previous step.
    if (step + 2 < kParts) {
      copy_others(next);
      copy_diagonal(part_of(step + 2));
    }
    cp_async_commit();
    load(part);
    static_assert(kWarps * kRowsPerStep == kPart);
    add(part, next * kPart + warp * kRowsPerStep);
    __syncthreads();
    if (warp == 0) {
      solve(next);
    } else {
      for (int row = (warp - 1) * kRowsPerStep; row < waiting(next);
           row += (kWarps - 1) * kRowsPerStep) {
        add(part, waiting_from(next) + row);
      }
    }
    cp_async_wait<0>();
    __syncthreads();
  }
  const bool is_copied =
      copies != nullptr && (first_column < skipped || first_column >= skipped + kRows);
  for (int i = thread; i < kRows * kVectors; i += kSubstitutionThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    const float4 v = reinterpret_cast<const float4*>(x + row * 32)[vector];
    reinterpret_cast<float4*>(own + int64(row) * solution_stride)[vector] = v;
    if (is_copied) {
      T* to = copies + first_column + int64(row) * solution_stride;
      reinterpret_cast<float4*>(to)[vector] = v;
    }
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

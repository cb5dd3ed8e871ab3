// The pivots of a panel of 32 columns, by a tournament (CALU; Grigori, Demmel and Xiang, SIAM J.
// Matrix Anal. Appl. 32, 2011).
//
// Each CTA eliminates rows of its own, with partial pivoting. The rows of its 32 pivots are
// candidates. The last CTA to finish eliminates all candidates.
//
// Four lanes share a row, 8 columns each.
#pragma once

#include "types.cuh"

namespace tilekern {

inline constexpr int kPanelColumns = 32;
inline constexpr int kPivotsThreads = 256;
// Panels are parts of a block of this many columns.
inline constexpr int kBlockColumns = 256;

// Four adjacent elements.
template <typename T>
struct alignas(16) Four {
  T x, y, z, w;
};

// The pivots of a panel, for the update of all rows.
template <typename T>
struct PanelSteps {
  // Row s is the pivot of step s as that step finds it: from column s its row of the upper factor,
  // and before that its multiples of the pivots of those steps.
  alignas(16) T rows[kPanelColumns][kPanelColumns];
  // 1 / rows[s][s], or 0 where that is infinite.
  T reciprocals[kPanelColumns];
};

// The rows that a CTA eliminates, of which each group of lanes has a few.
inline constexpr int kLanesOfRow = 4;
inline constexpr int kGroups = kPivotsThreads / kLanesOfRow;
inline constexpr int kMaxRows = 8 * kGroups;

// The order of candidates for a pivot: by magnitude, and NaN above infinity; then the first row.
// Key 0 means no candidate. The last of 32 bits are the row's. Magnitudes within a relative 2^-14,
// or 2^-11 in float64, compare as equal.
struct CandidateKey {
  static_assert(kMaxRows == 512);
  static constexpr uint32 kMagnitude = 0x7ffffe00u;
  // All bits, or none if the row is no candidate.
  uint32 mask;
  uint32 row;

  CandidateKey() = default;
  CandidateKey(int number, bool is_candidate)
      : mask(is_candidate ? ~0u : 0), row(is_candidate ? 0x200u + (511u - number) : 0) {}

  uint32 of(float value) const { return (__float_as_uint(value) & kMagnitude & mask) + row; }
  uint32 of(double value) const {
    return (static_cast<uint32>(__double2hiint(value)) & kMagnitude & mask) + row;
  }
  // `value`, or 0 if the row is no candidate.
  float kept(float value) const { return __uint_as_float(__float_as_uint(value) & mask); }
  double kept(double value) const { return mask ? value : 0; }
  static int row_of(uint32 key) { return 511 - static_cast<int>(key & 511u); }
};

// Within two units in the last place.
inline float approximate_reciprocal(float value) {
  float reciprocal;
  asm("rcp.approx.f32 %0, %1;" : "=f"(reciprocal) : "f"(value));
  return reciprocal;
}
inline double approximate_reciprocal(double value) { return __drcp_rn(value); }

// A pivot whose reciprocal overflows eliminates nothing.
template <typename T>
inline T pivot_reciprocal(T pivot) {
  constexpr T kMax = sizeof(T) == 4 ? 0x1.fffffep127 : 0x1.fffffffffffffp1023;
  const T reciprocal = approximate_reciprocal(pivot);
  return fabs(reciprocal) > kMax ? 0 : reciprocal;
}

// Calls `function` with the constant that equals `index`, of kCount from kFirst: registers cannot
// be indexed dynamically.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <int kCount, int kFirst = 0, typename Function>
inline void with_constant(int index, Function function) {
  if constexpr (kCount == 1) {
    function(Constant<kFirst>());
  } else if (index < kFirst + kCount / 2) {
    with_constant<kCount / 2, kFirst>(index, function);
  } else {
    with_constant<kCount / 2, kFirst + kCount / 2>(index, function);
  }
}

// What the threads of a CTA exchange in an elimination.
template <typename T>
struct PivotExchange {
  static constexpr int kWarps = kPivotsThreads / 32;

  // The best row of each warp, and the reciprocal of its pivot. There are two buffers: a warp
  // writes those of step s + 2 after the barrier of step s + 1, before which all have read those of
  // step s.
  alignas(16) T rows[2][kWarps][kPanelColumns + 4];
  alignas(16) uint32 keys[2][kWarps];
  // The row of each step, or -1.
  int32 pivots[kPanelColumns];
};

// Eliminates the rows of a CTA, of which each group of lanes has row `numbers[r]` of `panel`,
// unless that is negative. Finds the pivots, and if kStores stores the steps.
template <typename T, int kRows, bool kStores>
inline void eliminate_rows(const T* panel, int stride, const int (&numbers)[kRows],
                           PivotExchange<T>& shared, PanelSteps<T>& stored) {
  static_assert(kRows * kGroups <= kMaxRows);
  constexpr int kWarps = PivotExchange<T>::kWarps, kOwn = kPanelColumns / kLanesOfRow;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = threadIdx.x / kLanesOfRow, part = threadIdx.x % kLanesOfRow;

  T values[kRows][kOwn];
  CandidateKey keys[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    keys[r] = CandidateKey(group * kRows + r, numbers[r] >= 0);
#pragma unroll
    for (int c = 0; c < kOwn; c += 4) {
      Four<T> v = {};
      if (numbers[r] >= 0) {
        v = *reinterpret_cast<const Four<T>*>(panel + int64(numbers[r]) * stride + part * kOwn + c);
      }
      values[r][c] = v.x;
      values[r][c + 1] = v.y;
      values[r][c + 2] = v.z;
      values[r][c + 3] = v.w;
    }
  }
#pragma unroll 1
  for (int quarter = 0; quarter < kLanesOfRow; ++quarter) {
    // The lanes that have the columns of the steps.
    const bool holds_column = part == quarter;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int step = quarter * kOwn + i, buffer = i % 2;
      uint32 key = 0;
      T column[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        key = max_of(key, keys[r].of(values[r][i]));
        column[r] = __shfl_sync(~0u, values[r][i], quarter, kLanesOfRow);
      }
      key = __reduce_max_sync(~0u, holds_column ? key : 0);
      const int best = CandidateKey::row_of(key);
      if (best / kRows == group) {
        T* row = shared.rows[buffer][warp];
        with_constant<kRows>(best % kRows, [&](auto constant) {
          constexpr int r = decltype(constant)::value;
#pragma unroll
          for (int c = 0; c < kOwn; c += 4) {
            *reinterpret_cast<Four<T>*>(row + part * kOwn + c) = {
                values[r][c], values[r][c + 1], values[r][c + 2], values[r][c + 3]};
          }
          if (holds_column) row[kPanelColumns] = pivot_reciprocal(values[r][i]);
        });
      }
      if (lane == 0) shared.keys[buffer][warp] = key;
      __syncthreads();

      const uint4 first = reinterpret_cast<const uint4*>(shared.keys[buffer])[0];
      const uint4 last = reinterpret_cast<const uint4*>(shared.keys[buffer])[1];
      const uint32 largest = max_of(max_of(max_of(first.x, first.y), max_of(first.z, first.w)),
                                    max_of(max_of(last.x, last.y), max_of(last.z, last.w)));
      const int winner = CandidateKey::row_of(largest);
      const T* pivot = shared.rows[buffer][winner / (kRows * (32 / kLanesOfRow)) % kWarps];
      const T reciprocal = pivot[kPanelColumns];
      T pivot_values[kOwn];
#pragma unroll
      for (int c = 0; c < kOwn; c += 4) {
        const Four<T> v = *reinterpret_cast<const Four<T>*>(pivot + part * kOwn + c);
        pivot_values[c] = v.x;
        pivot_values[c + 1] = v.y;
        pivot_values[c + 2] = v.z;
        pivot_values[c + 3] = v.w;
      }
      if constexpr (kStores) {
        if (warp == i % kWarps) {
          stored.rows[step][lane] = pivot[lane];
          if (lane == 0) stored.reciprocals[step] = reciprocal;
        }
        // The multiples in the columns of the steps before remain.
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
          const bool is_right = c > i ? part >= quarter : part > quarter;
          pivot_values[c] = is_right ? pivot_values[c] : 0;
        }
      }
      if (winner / kRows == group) {
        with_constant<kRows>(winner % kRows, [&](auto constant) {
          constexpr int r = decltype(constant)::value;
          // The key of no candidate has the last row, which may not be one.
          if (part == 0) shared.pivots[step] = largest == 0 ? -1 : numbers[r];
          keys[r] = CandidateKey(0, false);
        });
      } else if (largest == 0 && threadIdx.x == 0) {
        shared.pivots[step] = -1;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const T factor = keys[r].kept(-column[r] * reciprocal);
#pragma unroll
        for (int c = 0; c < kOwn; ++c) values[r][c] += factor * pivot_values[c];
        if (kStores && holds_column) values[r][i] = factor;
      }
    }
  }
}

// Finds the pivots of the panel of 32 columns from `column` of `block`. `block` has `rows` rows at
// a distance of `stride`, and is not modified.
//
// `steps` has for each row the column of the block of which it is the pivot, or -1. The panel at
// column 0 initializes it. `order` has the pivot of each column; the panel writes its own 32.
// `pivot_rows` receives the block's rows that are the pivots, eliminated by each other. `arrived`
// is 0 before and after. `candidates` has 32 numbers for each CTA.
//
// A group of lanes has kRows consecutive rows of its CTA, or kFinalRows of the candidates.
template <typename T, int kRows, int kFinalRows>
__global__ void __launch_bounds__(kPivotsThreads, 1)
    blocked_lu_pivots(const T* block, int32* steps, int32* order, uint32* arrived,
                      int32* candidates, PanelSteps<T>* panel_steps, T* pivot_rows, int rows,
                      int stride, int column) {
  constexpr int kColumns = kPanelColumns;
  __shared__ PivotExchange<T> shared;
  __shared__ PanelSteps<T> stored;
  __shared__ bool is_last;
  const int thread = threadIdx.x, group = thread / kLanesOfRow;
  const T* panel = block + column;

  const auto eliminate = [&]<int kOwn, bool kStores>(bool of_candidates) {
    int numbers[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int i = group * kOwn + r;
      if (of_candidates) {
        numbers[r] = i < gridDim.x * kColumns ? __ldcg(candidates + i) : -1;
      } else {
        const int row = blockIdx.x * kGroups * kOwn + i;
        if (column == 0 && row < rows && thread % kLanesOfRow == 0) steps[row] = -1;
        numbers[r] = row < rows && (column == 0 || steps[row] < 0) ? row : -1;
      }
    }
    eliminate_rows<T, kOwn, kStores>(panel, stride, numbers, shared, stored);
    __syncthreads();
  };
  // The last CTA would wait for the instructions of another stage, which are not cached. For many
  // rows that takes longer than to store the steps of all rows.
  constexpr bool kSameCode = kRows == 8 && kFinalRows == 8;
#pragma unroll 1
  for (bool of_candidates = false;; of_candidates = true) {
    if (kSameCode || of_candidates) {
      eliminate.template operator()<kFinalRows, true>(of_candidates);
    } else {
      eliminate.template operator()<kRows, false>(false);
    }
    if (of_candidates) break;
    if (thread < kColumns) candidates[blockIdx.x * kColumns + thread] = shared.pivots[thread];
    __threadfence();
    __syncthreads();
    if (thread == 0) is_last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
  }
  if (thread < kColumns) {
    const int row = shared.pivots[thread];
    order[column + thread] = row;
    steps[row] = column + thread;
    panel_steps->reciprocals[thread] = stored.reciprocals[thread];
  }
  for (int i = thread; i < kColumns * kColumns; i += kPivotsThreads) {
    panel_steps->rows[i / kColumns][i % kColumns] = stored.rows[i / kColumns][i % kColumns];
  }

  // A thread has a column of the block.
  static_assert(kPivotsThreads == kBlockColumns);
  T x[kColumns];
#pragma unroll
  for (int s = 0; s < kColumns; ++s) x[s] = block[int64(shared.pivots[s]) * stride + thread];
#pragma unroll
  for (int s = 1; s < kColumns; ++s) {
#pragma unroll
    for (int i = 0; i < s; i += 4) {
      const Four<T> v = *reinterpret_cast<const Four<T>*>(&stored.rows[s][i]);
      const T multiples[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e < s) x[s] += multiples[e] * x[i + e];
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kColumns; ++s) pivot_rows[s * kBlockColumns + thread] = x[s];
}

}  // namespace tilekern

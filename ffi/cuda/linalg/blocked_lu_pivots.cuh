// The pivots of a panel of 32 columns, by a tournament (CALU; Grigori, Demmel and Xiang, SIAM J.
// Matrix Anal. Appl. 32, 2011).
//
// Each CTA eliminates rows of its own, with partial pivoting. The rows of its 32 pivots are
// candidates. The last CTA to finish eliminates all candidates.
//
// Four lanes share a row, 8 columns each.
#pragma once

#include "ptx.cuh"
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

// The rows of a group of lanes that have not been pivots, and their keys: by magnitude, and NaN
// above infinity; then the first row. Key 0 means no candidate. The last of 32 bits are the row's.
// Magnitudes within a relative 2^-14, or 2^-11 in float64, compare as equal.
template <int kRows>
struct Candidates {
  static_assert(kMaxRows == 512);
  static constexpr uint32 kMagnitude = 0x7ffffe00u;
  // A bit for each row of the group.
  uint32 rows = 0;

  bool has(int row) const { return rows >> row & 1; }
  void remove(int number, int group) {
    if (number / kRows == group) rows &= ~(1u << number % kRows);
  }
  // The larger of `key` and the key of a row of the group.
  uint32 larger(uint32 key, int row, int group, uint32 high_bits) const {
    const uint32 other = (high_bits & kMagnitude) + (0x200u + 511u - row - group * kRows);
    return has(row) ? max_of(key, other) : key;
  }
  static int number_of(uint32 key) { return 511 - static_cast<int>(key & 511u); }
};

inline uint32 high_bits(float value) { return __float_as_uint(value); }
inline uint32 high_bits(double value) { return static_cast<uint32>(__double2hiint(value)); }

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
  // The rows of the groups, and that of each step's pivot, or -1.
  int32 numbers[kMaxRows];
  int32 pivots[kPanelColumns];
};

// Eliminates the rows of a CTA, of which each group of lanes has row `numbers[r]` of `panel`,
// unless that is negative. Finds the pivots, and if kStores stores the steps.
//
// The first of a lane's values is that of column `step % 8` of its eight, and a step moves each
// value down by one. So the loop needs the instructions of a few steps only: beside a product,
// which evicts them from L2, a panel waits for each that it fetches.
template <typename T, int kRows, bool kStores>
inline void eliminate_rows(const T* panel, int stride, const int (&numbers)[kRows],
                           PivotExchange<T>& shared, PanelSteps<T>& stored) {
  static_assert(kRows * kGroups <= kMaxRows);
  constexpr int kWarps = PivotExchange<T>::kWarps, kOwn = kPanelColumns / kLanesOfRow;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = threadIdx.x / kLanesOfRow, part = threadIdx.x % kLanesOfRow;

  T values[kRows][kOwn];
  Candidates<kRows> candidates;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (numbers[r] >= 0) candidates.rows |= 1u << r;
    if (part == 0) shared.numbers[group * kRows + r] = numbers[r];
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
  T column[kRows];
  // Shares the column of a step, and stores the warp's candidate for its pivot.
  const auto propose = [&](int step) {
    const int quarter = step / kOwn, buffer = step % 2;
    const bool holds_column = part == quarter;
    uint32 own = 0;
    T largest = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32 key = candidates.larger(own, r, group, high_bits(values[r][0]));
      largest = key == own ? largest : values[r][0];
      own = key;
      column[r] = __shfl_sync(~0u, values[r][0], quarter, kLanesOfRow);
    }
    // While the warp compares the keys, each lane divides by the pivot that it would be.
    const T reciprocal = pivot_reciprocal(largest);
    const uint32 key = __reduce_max_sync(~0u, holds_column ? own : 0);
    const int best = Candidates<kRows>::number_of(key);
    T* row = shared.rows[buffer][warp];
    if (best / kRows == group) {
      with_constant<kRows>(best % kRows, [&](auto constant) {
        constexpr int r = decltype(constant)::value;
#pragma unroll
        for (int c = 0; c < kOwn; c += 4) {
          *reinterpret_cast<Four<T>*>(row + part * kOwn + c) = {values[r][c], values[r][c + 1],
                                                                values[r][c + 2], values[r][c + 3]};
        }
      });
      if (holds_column) row[kPanelColumns] = reciprocal;
    }
    if (lane == 0) shared.keys[buffer][warp] = key;
  };

  propose(0);
#pragma unroll 4
  for (int step = 0; step < kPanelColumns; ++step) {
    const int quarter = step / kOwn, buffer = step % 2;
    // The lanes that have the column of the step.
    const bool holds_column = part == quarter;
    __syncthreads();

    const uint4 first = reinterpret_cast<const uint4*>(shared.keys[buffer])[0];
    const uint4 last = reinterpret_cast<const uint4*>(shared.keys[buffer])[1];
    const uint32 largest = max_of(max_of(max_of(first.x, first.y), max_of(first.z, first.w)),
                                  max_of(max_of(last.x, last.y), max_of(last.z, last.w)));
    const int winner = Candidates<kRows>::number_of(largest);
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
      if (warp == step % kWarps) {
        stored.rows[step][lane] =
            pivot[lane / kOwn * kOwn + static_cast<uint32>(lane - step) % kOwn];
        if (lane == 0) stored.reciprocals[step] = reciprocal;
      }
      // The multiples in the columns of the steps before remain.
      const int left = holds_column ? kOwn - step % kOwn : part > quarter ? kOwn : 0;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) pivot_values[c] = c < left ? pivot_values[c] : 0;
    }
    candidates.remove(winner, group);
    // The key of no candidate has the last row, which may not be one.
    if (threadIdx.x == 0) shared.pivots[step] = largest == 0 ? -1 : shared.numbers[winner];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const T factor = candidates.has(r) ? -column[r] * reciprocal : 0;
      const T moved = values[r][0] + factor * pivot_values[0];
#pragma unroll
      for (int c = 1; c < kOwn; ++c) values[r][c - 1] = values[r][c] + factor * pivot_values[c];
      values[r][kOwn - 1] = kStores && holds_column ? factor : moved;
    }
    // Nothing reads what this stores after the last step.
    propose(step + 1);
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
  wait_for_prerequisites();

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
  launch_dependents();
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

// Elimination by the pivots of a panel, and after the last panel of a block the exchange of rows
// and what the product with the other columns reads.
#pragma once

#include "linalg/blocked_lu_pivots.cuh"

namespace tilekern {

// Sets what the first panel of a matrix expects: no CTA has arrived, and no row has moved.
__global__ void __launch_bounds__(256)
    blocked_lu_begin(uint32* arrived, int32* permutation, int size) {
  const int row = blockIdx.x * 256 + threadIdx.x;
  if (row == 0) *arrived = 0;
  if (row < size) permutation[row] = row;
}

// The shared memory of blocked_lu_update(), whose size `plans/linalg/blocked_lu.py` computes too.
template <typename T, int kRows>
struct UpdateTile {
  Four<T> right[kPanelColumns][kBlockColumns / 4];
  T left[kPanelColumns][kRows + 4];
  PanelSteps<T> pivots;
};

// Eliminates the 32 columns from `column` of a block in all of its rows, by the steps of its
// pivots, and updates the columns behind them.
//
// The pivot of step s then has its row of the upper factor from column s. Before that it has its
// multiples of the pivots of earlier steps, negated. All other rows have multiples of all pivots.
// The columns behind the panel change by the product of the multiples with `pivot_rows`.
//
// A warp has 8 rows. In the panel four lanes share a row, 8 columns each.
template <typename T, int kWarps>
__global__ void __launch_bounds__(kWarps * 32)
    blocked_lu_update(T* block, const int32* steps, const PanelSteps<T>* panel_steps,
                      const T* pivot_rows, int rows, int stride, int column) {
  constexpr int kThreads = kWarps * 32, kRows = 8, kTileRows = kWarps * kRows;
  constexpr int kVectors = kBlockColumns / 4, kColumns = kPanelColumns, kOwn = kColumns / 4;
  using Vector = Four<T>;
  extern __shared__ float4 shared[];
  auto& [right, left, pivots] = *reinterpret_cast<UpdateTile<T, kTileRows>*>(shared);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tile = blockIdx.x * kTileRows;
  launch_dependents();
  wait_for_prerequisites();

  for (int i = thread; i < static_cast<int>(sizeof(PanelSteps<T>) / 16); i += kThreads) {
    reinterpret_cast<float4*>(&pivots)[i] = reinterpret_cast<const float4*>(panel_steps)[i];
  }
#pragma unroll
  for (int i = thread; i < kColumns * kVectors; i += kThreads) {
    (&right[0][0])[i] = reinterpret_cast<const Vector*>(pivot_rows)[i];
  }
  // Whether the lane's columns of a half of the block are behind the panel.
  const auto is_behind = [&](int half) { return (half * 32 + lane) * 4 >= column + kColumns; };
  Vector values[kRows][2];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = tile + warp * kRows + r;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values[r][half] = {};
      if (row < rows && is_behind(half)) {
        values[r][half] =
            reinterpret_cast<const Vector*>(block + int64(row) * stride)[half * 32 + lane];
      }
    }
  }
  const int own_row = warp * kRows + lane / 4, own_column = lane % 4 * kOwn;
  const bool inside = tile + own_row < rows;
  T* own = block + int64(tile + own_row) * stride + column + own_column;
  // The steps that change the row: those before its own, and none if it was a pivot before.
  const int step = inside ? steps[tile + own_row] : -1;
  const int limit = !inside ? 0 : step < 0 ? kColumns : step - column;
  T x[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    Vector v = {};
    if (inside) v = *reinterpret_cast<const Vector*>(own + i);
    x[i] = v.x;
    x[i + 1] = v.y;
    x[i + 2] = v.z;
    x[i + 3] = v.w;
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kColumns; ++t) {
    const T first = __shfl_sync(~0u, x[t % kOwn], t / kOwn, 4);
    const T factor = t < limit ? -first * pivots.reciprocals[t] : 0;
    // The columns before t keep the multiples of earlier steps.
    const bool is_behind = lane % 4 > t / kOwn, has_column = lane % 4 == t / kOwn;
    const T before = is_behind ? factor : 0, after = is_behind || has_column ? factor : 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const Vector v = *reinterpret_cast<const Vector*>(&pivots.rows[t][own_column + i]);
      x[i] += (i > t % kOwn ? after : before) * v.x;
      x[i + 1] += (i + 1 > t % kOwn ? after : before) * v.y;
      x[i + 2] += (i + 2 > t % kOwn ? after : before) * v.z;
      x[i + 3] += (i + 3 > t % kOwn ? after : before) * v.w;
    }
    if (has_column && t < limit) x[t % kOwn] = factor;
  }
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    if (inside) *reinterpret_cast<Vector*>(own + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    left[own_column + i][own_row] = own_column + i < limit ? x[i] : 0;
  }
  __syncwarp();

#pragma unroll 4
  for (int k = 0; k < kColumns; ++k) {
    T factors[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const Vector v = *reinterpret_cast<const Vector*>(&left[k][warp * kRows + r]);
      factors[r] = v.x;
      factors[r + 1] = v.y;
      factors[r + 2] = v.z;
      factors[r + 3] = v.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Vector v = right[k][half * 32 + lane];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        values[r][half].x += factors[r] * v.x;
        values[r][half].y += factors[r] * v.y;
        values[r][half].z += factors[r] * v.z;
        values[r][half].w += factors[r] * v.w;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int vector = half * 32 + lane;
    if (!is_behind(half)) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = tile + warp * kRows + r;
      if (row < rows) {
        reinterpret_cast<Vector*>(block + int64(row) * stride)[vector] = values[r][half];
      }
    }
  }
}

// Moves the rows of a block's pivots, in their order, to the top of `matrix`, and the rows that
// were there to where the pivots were. `order` has the pivots among the rows from `first`, and
// `steps` is that of the panels. `permutation` has the original place of each row.
//
// Outside of the block's columns the pivots' rows go to `pivot_rows` only. There the block's own
// columns become an identity. Each CTA moves 128 bytes of every row, from column `begin` on.
template <typename T>
__global__ void __launch_bounds__(256)
    blocked_lu_exchange(T* matrix, const int32* steps, const int32* order, int32* permutation,
                        T* pivot_rows, int stride, int first, int begin) {
  constexpr int kColumns = 128 / sizeof(T);
  constexpr int kRows = kBlockColumns, kThreads = 256;
  constexpr int kVectors = 8, kRowsAtOnce = kThreads / kVectors, kLoads = kRows / kRowsAtOnce;
  static_assert(kRows == kThreads);
  // The rows below the top from which pivots come, in the order of the pivots.
  __shared__ int32 vacated[kRows];
  // Where each row of the top goes if it is no pivot.
  __shared__ int32 places[kRows];
  __shared__ int32 displaced_of_warp[kThreads / 32], vacated_of_warp[kThreads / 32];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  const bool displaced = steps[thread] < 0;
  const int pivot = order[thread];
  const uint32 displaced_lanes = __ballot_sync(~0u, displaced);
  const uint32 vacated_lanes = __ballot_sync(~0u, pivot >= kRows);
  if (lane == 0) {
    displaced_of_warp[warp] = __popc(displaced_lanes);
    vacated_of_warp[warp] = __popc(vacated_lanes);
  }
  __syncthreads();
  const uint32 lower_lanes = (1u << lane) - 1;
  int displaced_before = __popc(displaced_lanes & lower_lanes);
  int vacated_before = __popc(vacated_lanes & lower_lanes);
  for (int w = 0; w < warp; ++w) {
    displaced_before += displaced_of_warp[w];
    vacated_before += vacated_of_warp[w];
  }
  if (pivot >= kRows) vacated[vacated_before] = pivot;
  __syncthreads();
  const int place = displaced ? vacated[displaced_before] : -1;
  places[thread] = place;

  if (blockIdx.x == 0) {
    int32* of_rows = permutation + first;
    const int32 of_pivot = of_rows[pivot], of_displaced = of_rows[thread];
    __syncthreads();
    of_rows[thread] = of_pivot;
    if (displaced) of_rows[place] = of_displaced;
  }
  __syncthreads();

  const int column = begin + kColumns * blockIdx.x, vector = thread % kVectors,
            row = thread / kVectors;
  T* rows = matrix + int64(first) * stride + column;
  float4 pivots[kLoads], others[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kRowsAtOnce + row;
    pivots[i] = reinterpret_cast<const float4*>(rows + int64(order[at]) * stride)[vector];
    others[i] = reinterpret_cast<const float4*>(rows + int64(at) * stride)[vector];
  }
  // All rows have been read before the first is written.
  __syncthreads();
  const bool in_block = column / kBlockColumns == first / kBlockColumns;
  constexpr int kElements = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kRowsAtOnce + row;
    alignas(16) T identity[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      identity[e] = column + vector * kElements + e == first + at;
    }
    float4* to = reinterpret_cast<float4*>(pivot_rows + int64(at) * stride + column) + vector;
    if (in_block) {
      reinterpret_cast<float4*>(rows + int64(at) * stride)[vector] = pivots[i];
      *to = *reinterpret_cast<const float4*>(identity);
    } else {
      *to = pivots[i];
    }
    const int place = places[at];
    if (place >= 0) {
      reinterpret_cast<float4*>(rows + int64(place) * stride)[vector] = others[i];
    }
  }
}

// Moves the multiples of the rows below a block's pivots out of `block`, whose first 256 rows are
// the pivots, and leaves zeros. The inverse of the pivots' unit lower factor, which `pivot_rows`
// has in the block's columns, takes the place of the factor.
template <typename T>
__global__ void __launch_bounds__(256)
    blocked_lu_multiples(T* block, const T* pivot_rows, T* multiples, int rows, int stride) {
  constexpr int kVectors = kBlockColumns / 4;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < rows * kVectors; i += gridDim.x * 256) {
    const int row = i / kVectors, column = i % kVectors * 4;
    Four<T>* own = reinterpret_cast<Four<T>*>(block + int64(row) * stride + column);
    if (row >= kBlockColumns) {
      reinterpret_cast<Four<T>*>(multiples)[i - kBlockColumns * kVectors] = *own;
      *own = {};
    } else if (column < row) {
      Four<T> v = *own;
      const Four<T> inverse =
          *reinterpret_cast<const Four<T>*>(pivot_rows + int64(row) * stride + column);
      v.x = inverse.x;
      if (column + 1 < row) v.y = inverse.y;
      if (column + 2 < row) v.z = inverse.z;
      if (column + 3 < row) v.w = inverse.w;
      *own = v;
    }
  }
}

}  // namespace tilekern

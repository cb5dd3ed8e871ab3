// Gauss-Jordan elimination with partial pivoting of a panel of 32 columns, by one cluster of CTAs.
//
// Rows stay where they are, in registers, and a row that has been a pivot is not chosen again. Each
// step has one exchange between the CTAs: each sends the candidate of its own rows, the whole row
// with it, to all others, and all choose the same pivot among the candidates.
//
// Elimination shifts the columns by one in the same multiply-adds that compute them, so the column
// of the step is always the first register. Its new value enters at the other end: after 32 steps
// each column is back in its place, and the panel holds the matrix that eliminates it elsewhere.
#pragma once

#include "cluster.cuh"
#include "mbarrier.cuh"
#include "ptx.cuh"
#include "types.cuh"

namespace tilekern {

inline constexpr int kPanelColumns = 32;
inline constexpr int kPanelThreads = 512;
inline constexpr int kPanelCtas = 8;
// Panels are parts of a block of this many columns.
inline constexpr int kBlockColumns = 256;

// A candidate for the pivot: the bits of its magnitude plus 1, or 0 for none, and its row.
struct PanelCandidate {
  uint32 key;
  int32 row;
};

inline constexpr int32 kNoRow = 0x7fffffff;

// Chooses the largest magnitude of a warp's candidates, and the first of equal ones. NaN counts as
// larger than infinity.
inline PanelCandidate choose(PanelCandidate candidate) {
  const uint32 key = __reduce_max_sync(~0u, candidate.key);
  return {key, __reduce_min_sync(~0u, candidate.key == key ? candidate.row : kNoRow)};
}

// What a CTA sends to another: the candidate's row, and the candidate.
struct alignas(16) PanelMessage {
  static constexpr int kChunks = kPanelColumns / 4 + 1;
  uint32 words[kChunks][4];
};

// `block` has `rows` rows at a distance of `stride`, of which this panel is the 32 columns from
// `column`. `steps` has the column of the matrix for which each row has been the pivot, or -1, and
// `order` the row that has been the pivot of each column; those from `first` are this panel's, and
// the panel at 0 sets all of `steps`. `pivot_rows` receives the block's rows that are the pivots.
// Their elements in other panels have not changed yet; those in this panel are not read.
// A thread has `kRows` rows, and the cluster at least `rows`.
template <int kRows>
__global__ void __launch_bounds__(kPanelThreads, 1)
    gauss_jordan_panel(float* block, int32* steps, int32* order, float* pivot_rows, int rows,
                       int stride, int first, int column) {
  constexpr int kThreads = kPanelThreads, kCtas = kPanelCtas;
  constexpr int kWarps = kThreads / 32, kChunks = PanelMessage::kChunks;
  // Buffers of messages, and their mbarriers, are used in turn. A CTA sends the messages of step
  // s + 3 once it has those of step s + 2. Each CTA sends those after its __syncthreads() of step
  // s + 2, before which its threads have read the pivot of step s for the last time, in step s + 1.
  // So no message is overwritten while it is read, and no thread is more than a phase behind.
  __shared__ PanelMessage messages[3][kCtas];
  // One warp uses these in a step. The __syncthreads() of the next step is before the next warp's.
  __shared__ alignas(16) float own_row[kPanelColumns + 4];
  __shared__ alignas(16) float updated_row[kPanelColumns];
  // All read candidates[s % 2] after the __syncthreads() of step s, and a warp writes them again in
  // step s + 2, after that of step s + 1.
  __shared__ PanelCandidate candidates[2][32];
  __shared__ int32 pivots[kPanelColumns];
  __shared__ alignas(8) uint64 arrivals[3];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int cta = cluster_cta_rank();
  const int own_first = cta * kThreads * kRows + thread;

  if (thread == 0) {
    mbarrier_init(shared_address(&arrivals[0]), 1);
    mbarrier_init(shared_address(&arrivals[1]), 1);
    mbarrier_init(shared_address(&arrivals[2]), 1);
    fence_barrier_init();
  }

  float values[kRows][kPanelColumns];
  bool active[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = own_first + r * kThreads;
    active[r] = row < rows && (first == 0 || steps[row] < 0);
    if (first == 0 && row < rows) steps[row] = -1;
#pragma unroll
    for (int i = 0; i < kPanelColumns; i += 4) {
      float4 vector = {};
      if (row < rows) {
        vector = *reinterpret_cast<const float4*>(block + int64(row) * stride + column + i);
      }
      values[r][i] = vector.x;
      values[r][i + 1] = vector.y;
      values[r][i + 2] = vector.z;
      values[r][i + 3] = vector.w;
    }
  }
  __syncwarp();
  cluster_sync();

  // The update of a step is behind the exchange of the next one: `column_values` is the column of
  // the step, which is up to date, and `values` lacks the previous step, of `factors` and `pivot`.
  float column_values[kRows], factors[kRows];
  const float* pivot = nullptr;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    column_values[r] = values[r][0];
    factors[r] = 0;
  }
  // Applies the step of `factors` and `pivot` to all columns.
  const auto eliminate = [&] {
#pragma unroll
    for (int i = 0; i < kPanelColumns; i += 4) {
      const float4 vector = *reinterpret_cast<const float4*>(pivot + i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (i > 0) values[r][i - 1] = values[r][i] + factors[r] * vector.x;
        values[r][i] = values[r][i + 1] + factors[r] * vector.y;
        values[r][i + 1] = values[r][i + 2] + factors[r] * vector.z;
        values[r][i + 2] = values[r][i + 3] + factors[r] * vector.w;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[r][kPanelColumns - 1] = factors[r];
  };

  int buffer = 0;
  uint32 parity = 0;
  // Whatever the values are, there are 32 steps, and in each every CTA sends one message of a fixed
  // size to every CTA: NaN and singular matrices change which row is the pivot, never a wait. There
  // is always a pivot, because rows that have not been one remain, and their keys are positive.
#pragma unroll 1
  for (int step = 0; step < kPanelColumns; ++step) {
    const uint32 arrived = shared_address(&arrivals[buffer]);
    if (thread == 0) mbarrier_arrive_expect_tx(arrived, kCtas * sizeof(PanelMessage));

    // The CTA's own candidate.
    PanelCandidate best = {0, kNoRow};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32 key = active[r] ? (__float_as_uint(column_values[r]) & 0x7fffffffu) + 1 : 0;
      if (key > best.key) best = {key, own_first + r * kThreads};
    }
    best = choose(best);
    if (lane == 0) candidates[step & 1][warp] = best;
    __syncthreads();
    best = choose(lane < kWarps ? candidates[step & 1][lane] : PanelCandidate{0, kNoRow});

    // The warp that holds it sends it, with the update that is still to come. Warp 0 sends a
    // message without a candidate if the CTA has none.
    const int owner = best.key == 0 ? 0 : best.row % kThreads / 32;
    if (warp == owner) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (best.row == own_first + r * kThreads) {
#pragma unroll
          for (int i = 0; i < kPanelColumns; i += 4) {
            *reinterpret_cast<float4*>(own_row + i) = {values[r][i], values[r][i + 1],
                                                       values[r][i + 2], values[r][i + 3]};
          }
          own_row[kPanelColumns] = factors[r];
        }
      }
      __syncwarp();
      float value = own_row[lane];
      if (step > 0) {
        const float factor = own_row[kPanelColumns];
        value = lane < 31 ? own_row[lane + 1] + factor * pivot[lane + 1] : factor;
      }
      updated_row[lane] = value;
      __syncwarp();
      for (int i = lane; i < kCtas * kChunks; i += 32) {
        const int to = i / kChunks, chunk = i % kChunks;
        uint32 words[4] = {best.key, static_cast<uint32>(best.row), 0, 0};
        if (chunk < kChunks - 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) words[j] = __float_as_uint(updated_row[4 * chunk + j]);
        }
        st_async(shared_address(messages[buffer][cta].words[chunk]), arrived, to, words);
      }
    }
    if (step > 0) eliminate();

    // The pivot is the best of all candidates.
    mbarrier_wait(arrived, parity);
    best = {0, kNoRow};
    if (lane < kCtas) {
      const uint32* words = messages[buffer][lane].words[kChunks - 1];
      best = {words[0], static_cast<int32>(words[1])};
    }
    best = choose(best);
    if (thread == 0) {
      pivots[step] = best.row;
      if (cta == 0) order[first + step] = best.row;
    }
    pivot = reinterpret_cast<const float*>(messages[buffer][best.row / (kThreads * kRows)].words);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = own_first + r * kThreads;
      float value = values[r][0];
      if (row == best.row) {
        // The pivot's own row becomes its quotient by the pivot.
#pragma unroll
        for (int i = 0; i < kPanelColumns; ++i) values[r][i] = 0;
        value = -1;
        active[r] = false;
        steps[row] = first + step;
      }
      factors[r] = -value / pivot[0];
      column_values[r] = values[r][1] + factors[r] * pivot[1];
    }
    if (++buffer == 3) {
      buffer = 0;
      parity ^= 1;
    }
  }
  eliminate();

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = own_first + r * kThreads;
    if (row >= rows) continue;
#pragma unroll
    for (int i = 0; i < kPanelColumns; i += 4) {
      *reinterpret_cast<float4*>(block + int64(row) * stride + column + i) = {
          values[r][i], values[r][i + 1], values[r][i + 2], values[r][i + 3]};
    }
  }
  __syncthreads();
  constexpr int kVectors = kBlockColumns / 4;
  for (int i = cta * kThreads + thread; i < kPanelColumns * kVectors; i += kCtas * kThreads) {
    const int step = i / kVectors, vector = i % kVectors;
    reinterpret_cast<float4*>(pivot_rows)[i] =
        reinterpret_cast<const float4*>(block + int64(pivots[step]) * stride)[vector];
  }
  // No CTA ends while another may send to it.
  __syncwarp();
  cluster_sync();
}

}  // namespace tilekern

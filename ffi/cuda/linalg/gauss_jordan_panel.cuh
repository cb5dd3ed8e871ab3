// Gauss-Jordan elimination with partial pivoting of a panel of 32 columns, by one cluster of CTAs.
//
// Rows stay where they are, in registers, and a row that has been a pivot is not chosen again. Each
// step has one exchange between the CTAs: each sends the candidate of its own rows, the whole row
// divided by it, to all others, and all choose the same pivot among the candidates.
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
inline constexpr int kPanelThreads = 256;
inline constexpr int kPanelCtas = 8;
// Panels are parts of a block of this many columns.
inline constexpr int kBlockColumns = 256;

// The order of candidates for the pivot: by magnitude, and NaN above infinity. 0 is for none.
inline uint32 candidate_key(float value) { return (__float_as_uint(value) & 0x7fffffffu) + 1; }

// The first lane of a warp with the largest key, which `key` becomes in all lanes.
inline int choose(uint32& key) {
  const uint32 largest = __reduce_max_sync(~0u, key);
  const int lane = __ffs(__ballot_sync(~0u, key == largest)) - 1;
  key = largest;
  return lane;
}

// `block` has `rows` rows at a distance of `stride`, of which this panel is the 32 columns from
// `column`. `steps` has the column of the matrix for which each row has been the pivot, or -1, and
// `order` the row that has been the pivot of each column; those from `first` are this panel's, and
// the panel at 0 sets all of `steps`. `pivot_rows` receives the block's rows that are the pivots.
// Their elements in other panels have not changed yet; those in this panel are not read.
//
// A thread has `kRows` consecutive rows, so threads are in the order of their rows and the first of
// equal candidates is that of the first row. The cluster has at least `rows`.
template <int kRows>
__global__ void __launch_bounds__(kPanelThreads, 1)
    gauss_jordan_panel(float* block, int32* steps, int32* order, float* pivot_rows, int rows,
                       int stride, int first, int column) {
  constexpr int kThreads = kPanelThreads, kCtas = kPanelCtas, kColumns = kPanelColumns;
  constexpr int kWarps = kThreads / 32, kVectors = kColumns / 4;
  // A message is a candidate, or -0 for none, and elements 1 to 31 of its row, divided by it.
  //
  // Buffers of messages, and their mbarriers, are used in turn. A CTA sends the messages of step
  // s + 3 once it has those of step s + 2. Each CTA sends those after its __syncthreads() of step
  // s + 2, before which its threads have read the pivot of step s for the last time, in step s + 1.
  // So no message is overwritten while it is read, and no thread is more than a phase behind.
  __shared__ alignas(16) float messages[3][kCtas][kColumns];
  // One warp uses these in a step. The __syncthreads() of the next step is before the next warp's.
  __shared__ alignas(16) float own_row[kColumns + 4];
  __shared__ alignas(16) float own_message[kColumns];
  // All read keys[s % 2] after the __syncthreads() of step s, and a warp writes them again in step
  // s + 2, after that of step s + 1.
  __shared__ uint32 keys[2][kWarps];
  // The pivots among the CTA's own rows, or -1.
  __shared__ int32 pivots[kColumns];
  __shared__ alignas(8) uint64 arrivals[3];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int cta = cluster_cta_rank();
  const int own_first = (cta * kThreads + thread) * kRows;

  if (thread < kColumns) pivots[thread] = -1;
  if (thread == 0) {
    mbarrier_init(shared_address(&arrivals[0]), 1);
    mbarrier_init(shared_address(&arrivals[1]), 1);
    mbarrier_init(shared_address(&arrivals[2]), 1);
    fence_barrier_init();
  }

  float values[kRows][kColumns];
  bool active[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = own_first + r;
    active[r] = row < rows && (first == 0 || steps[row] < 0);
    if (first == 0 && row < rows) steps[row] = -1;
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
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
  // the step, which is up to date, and `values` lacks the previous step: the multiples `factors` of
  // the row of `pivot`, a message, whose candidate has the reciprocal `reciprocal`.
  float column_values[kRows], factors[kRows];
  float reciprocal = 0;
  const float* pivot = messages[0][0];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    column_values[r] = values[r][0];
    factors[r] = 0;
  }
  // Applies that step to all columns.
  const auto eliminate = [&] {
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
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
    for (int r = 0; r < kRows; ++r) values[r][kColumns - 1] = factors[r] * reciprocal;
  };

  int buffer = 0;
  uint32 parity = 0;
  // Whatever the values are, there are 32 steps, and in each every CTA sends one message of a fixed
  // size to every CTA: NaN and singular matrices change which row is the pivot, never a wait. There
  // is always a pivot, because rows that have not been one remain, and their keys are positive.
#pragma unroll 1
  for (int step = 0; step < kColumns; ++step) {
    const uint32 arrived = shared_address(&arrivals[buffer]);
    if (thread == 0) mbarrier_arrive_expect_tx(arrived, sizeof(messages[0]));

    // The CTA's own candidate: row `own` of lane `leader` of warp `owner`. Each lane divides by its
    // own before it is known which one is chosen.
    uint32 key = 0;
    int own = 0;
    float own_value = column_values[0];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32 other = active[r] ? candidate_key(column_values[r]) : 0;
      if (other > key) {
        key = other;
        own = r;
        own_value = column_values[r];
      }
    }
    const int leader = choose(key);
    if (lane == 0) keys[step & 1][warp] = key;
    const float own_reciprocal = __frcp_rn(own_value);
    __syncthreads();
    key = lane < kWarps ? keys[step & 1][lane] : 0;
    const int owner = choose(key);

    // The warp that holds it sends its row, with the update that is still to come.
    if (warp == owner) {
      if (lane == leader) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (own == r) {
#pragma unroll
            for (int i = 0; i < kColumns; i += 4) {
              *reinterpret_cast<float4*>(own_row + i) = {values[r][i], values[r][i + 1],
                                                         values[r][i + 2], values[r][i + 3]};
            }
            *reinterpret_cast<float4*>(own_row + kColumns) = {factors[r] * reciprocal, factors[r],
                                                              own_reciprocal, 0};
          }
        }
      }
      __syncwarp();
      float value = own_row[lane];
      if (step > 0) {
        value = own_row[lane + 1];
        if (lane < 31) value += own_row[kColumns + 1] * pivot[lane + 1];
      }
      if (lane > 0) {
        value *= own_row[kColumns + 2];
      } else if (key == 0) {
        value = -0.0f;
      } else if (value == 0) {
        value = 0.0f;  // -0 is for no candidate.
      }
      own_message[lane] = value;
      __syncwarp();
      const int vector = lane % kVectors;
      const uint4 words = reinterpret_cast<const uint4*>(own_message)[vector];
#pragma unroll
      for (int to = lane / kVectors; to < kCtas; to += 32 / kVectors) {
        st_async(shared_address(&messages[buffer][cta][4 * vector]), arrived, to,
                 {words.x, words.y, words.z, words.w});
      }
    }
    if (step > 0) eliminate();

    // The pivot is the best of all candidates.
    mbarrier_wait(arrived, parity);
    const float2 candidate = *reinterpret_cast<const float2*>(messages[buffer][lane % kCtas]);
    key = __float_as_uint(candidate.x) == 0x80000000u ? 0 : candidate_key(candidate.x);
    const int winner = choose(key);
    pivot = messages[buffer][winner];
    reciprocal = __frcp_rn(__shfl_sync(~0u, candidate.x, winner));
    const float second = __shfl_sync(~0u, candidate.y, winner);
    const bool is_owner = winner == cta && warp == owner && lane == leader;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      factors[r] = -values[r][0];
      if (is_owner && own == r) {
        // The pivot's own row becomes its quotient by the pivot.
        const int row = own_first + r;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) values[r][i] = 0;
        factors[r] = 1;
        active[r] = false;
        steps[row] = first + step;
        order[first + step] = row;
        pivots[step] = row;
      }
      column_values[r] = values[r][1] + factors[r] * second;
    }
    if (++buffer == 3) {
      buffer = 0;
      parity ^= 1;
    }
  }
  eliminate();

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = own_first + r;
    if (row >= rows) continue;
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      *reinterpret_cast<float4*>(block + int64(row) * stride + column + i) = {
          values[r][i], values[r][i + 1], values[r][i + 2], values[r][i + 3]};
    }
  }
  __syncthreads();
  // A warp copies a row at a time of the CTA's pivots.
  for (int step = warp; step < kColumns; step += kWarps) {
    if (pivots[step] < 0) continue;
    const float* from = block + int64(pivots[step]) * stride;
    float* to = pivot_rows + step * kBlockColumns;
#pragma unroll
    for (int i = 4 * lane; i < kBlockColumns; i += 128) {
      *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(from + i);
    }
  }
  // No CTA ends while another may send to it.
  __syncwarp();
  cluster_sync();
}

}  // namespace tilekern

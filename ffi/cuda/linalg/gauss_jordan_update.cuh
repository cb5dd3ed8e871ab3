// What follows a panel of Gauss-Jordan elimination: updates of the other columns in plain float32,
// the exchange of a block's columns for its pivots' rows, and the order of the result.
#pragma once

#include "linalg/gauss_jordan_panel.cuh"

namespace tilekern {

// Applies a panel to the other columns of its block: the rows that were pivots are replaced by,
// and all others change by, the product of the panel's row with the pivots' rows. A warp has 8
// rows.
template <int kWarps>
__global__ void __launch_bounds__(kWarps * 32)
    gauss_jordan_update(float* block, const int32* steps, const float* pivot_rows, int rows,
                        int stride, int first, int column) {
  constexpr int kThreads = kWarps * 32, kRows = 8, kTileRows = kWarps * kRows;
  constexpr int kVectors = kBlockColumns / 4, kPanelVectors = kPanelColumns / 4;
  __shared__ float4 right[kPanelColumns][kVectors];
  __shared__ alignas(16) float left[kPanelColumns][kTileRows + 4];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tile = blockIdx.x * kTileRows;

  float4 values[kRows][2];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = tile + warp * kRows + r;
    const bool kept = row < rows && (steps[row] < first || steps[row] >= first + kPanelColumns);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values[r][half] = {};
      if (kept) {
        values[r][half] =
            reinterpret_cast<const float4*>(block + int64(row) * stride)[half * 32 + lane];
      }
    }
  }
#pragma unroll
  for (int i = thread; i < kPanelColumns * kVectors; i += kThreads) {
    (&right[0][0])[i] = reinterpret_cast<const float4*>(pivot_rows)[i];
  }
  for (int i = thread; i < kTileRows * kPanelVectors; i += kThreads) {
    const int row = i / kPanelVectors, vector = i % kPanelVectors;
    float4 v = {};
    if (tile + row < rows) {
      v = reinterpret_cast<const float4*>(block + int64(tile + row) * stride + column)[vector];
    }
    left[vector * 4][row] = v.x;
    left[vector * 4 + 1][row] = v.y;
    left[vector * 4 + 2][row] = v.z;
    left[vector * 4 + 3][row] = v.w;
  }
  __syncthreads();

#pragma unroll 4
  for (int k = 0; k < kPanelColumns; ++k) {
    float factors[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const float4 v = *reinterpret_cast<const float4*>(&left[k][warp * kRows + r]);
      factors[r] = v.x;
      factors[r + 1] = v.y;
      factors[r + 2] = v.z;
      factors[r + 3] = v.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 v = right[k][half * 32 + lane];
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
    if (vector / kPanelVectors == column / kPanelColumns) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = tile + warp * kRows + r;
      if (row < rows) {
        reinterpret_cast<float4*>(block + int64(row) * stride)[vector] = values[r][half];
      }
    }
  }
}

// Moves the rows of a block's pivots from `matrix`, leaving zeros, to `pivot_rows`. The block's own
// columns stay, are zeros in `pivot_rows`, and are copied to `block`.
__global__ void __launch_bounds__(256)
    gauss_jordan_exchange(float* matrix, const int32* order, float* block, float* pivot_rows,
                          int size, int first) {
  constexpr int kVectors = kBlockColumns / 4;
  const int vectors = size / 4, of_rows = kBlockColumns * vectors, of_block = size * kVectors;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < of_rows + of_block; i += gridDim.x * 256) {
    if (i < of_rows) {
      const int step = i / vectors, vector = i % vectors;
      const bool in_block = vector / kVectors == first / kBlockColumns;
      float4* from = reinterpret_cast<float4*>(matrix + int64(order[first + step]) * size) + vector;
      reinterpret_cast<float4*>(pivot_rows)[i] = in_block ? float4{} : *from;
      if (!in_block) *from = {};
    } else {
      const int row = (i - of_rows) / kVectors, vector = (i - of_rows) % kVectors;
      reinterpret_cast<float4*>(block)[i - of_rows] =
          reinterpret_cast<const float4*>(matrix + int64(row) * size + first)[vector];
    }
  }
}

// Orders rows and columns: row j of the result is row order[j], and its column order[i] column i.
__global__ void __launch_bounds__(512)
    gauss_jordan_order(const float* matrix, const int32* order, float* result, int size) {
  extern __shared__ float row[];
  const float* from = matrix + int64(order[blockIdx.x]) * size;
  for (int i = threadIdx.x; i < size; i += 512) row[order[i]] = from[i];
  __syncthreads();
  float* to = result + int64(blockIdx.x) * size;
  for (int i = threadIdx.x; i < size; i += 512) to[i] = row[i];
}

}  // namespace tilekern

// Cholesky factors of a block of 128 columns: of the block on the diagonal by one CTA, and of the
// rows below it by as many as there are tiles of rows.
//
// A warp factors each 32x32 block of the diagonal in registers and inverts it. Products with these
// small inverses take the place of substitutions.
#pragma once

#include "types.cuh"

namespace tilekern {

inline constexpr int kFactorColumns = 128, kFactorTile = 32;

// Factors 32 rows and columns, of which each lane has a row, and returns the inverse of the row's
// diagonal element. The diagonal of a matrix that is not positive definite is NaN.
inline float factor_tile(float (&row)[kFactorTile], int lane) {
  float inverse = 0;
#pragma unroll
  for (int j = 0; j < kFactorTile; ++j) {
    const float pivot = __shfl_sync(~0u, row[j], j);
    // One step of Newton's method makes the estimate accurate.
    float root = rsqrtf(pivot);
    root += 0.5f * root * (1 - pivot * root * root);
    if (!(pivot > 0)) root = __int_as_float(0x7fffffff);
    if (lane == j) inverse = root;
    row[j] *= root;
#pragma unroll
    for (int k = j + 1; k < kFactorTile; ++k) row[k] -= row[j] * __shfl_sync(~0u, row[j], k);
  }
  return inverse;
}

// The block, column after column, and the inverses of the 32x32 blocks on its diagonal, of which
// inverse(c, k) is inverses[.][k][c].
struct CholeskyBlock {
  // Strides of 4 banks more than a multiple of 32 keep vectors of a column free of conflicts.
  static constexpr int kN = kFactorColumns, kStride = kN + 4, kInverseStride = kFactorTile + 4;
  static constexpr int kInverses = kN * kInverseStride;
  alignas(16) float columns[kN][kStride];
  alignas(16) float inverses[kN / kFactorTile][kFactorTile][kInverseStride];
};

// Factors the block at `matrix`, whose rows are at a distance of `stride`, in place; `inverses`
// receives those of the blocks on the diagonal. Only the lower triangle is read and written.
__global__ void __launch_bounds__(512)
    cholesky_block(float* matrix, float* inverses, int stride) {
  constexpr int kN = kFactorColumns, kTile = kFactorTile, kThreads = 512;
  extern __shared__ float4 dynamic[];
  CholeskyBlock& block = *reinterpret_cast<CholeskyBlock*>(dynamic);
  const int thread = threadIdx.x, lane = thread % 32;
  for (int i = thread; i < kN * kN; i += kThreads) {
    const int row = i / kN, column = i % kN;
    if (column <= row) block.columns[column][row] = matrix[int64(row) * stride + column];
  }
  __syncthreads();

#pragma unroll 1
  for (int first = 0; first < kN; first += kTile) {
    float(&inverse)[kTile][CholeskyBlock::kInverseStride] = block.inverses[first / kTile];
    if (thread < 32) {
      float row[kTile];
#pragma unroll
      for (int k = 0; k < kTile; ++k) row[k] = block.columns[first + k][first + lane];
      const float reciprocal = factor_tile(row, lane);
#pragma unroll
      for (int k = 0; k < kTile; ++k) {
        if (k <= lane) block.columns[first + k][first + lane] = row[k];
      }
      __syncwarp();
      // Each lane has a column of the inverse.
      float x[kTile];
#pragma unroll
      for (int i = 0; i < kTile; ++i) x[i] = i == lane;
#pragma unroll
      for (int k = 0; k < kTile; ++k) {
        x[k] *= __shfl_sync(~0u, reciprocal, k);
#pragma unroll
        for (int i = k + 1; i < kTile; ++i) {
          x[i] -= block.columns[first + k][first + i] * x[k];
        }
      }
#pragma unroll
      for (int i = 0; i < kTile; i += 4) {
        *reinterpret_cast<float4*>(&inverse[lane][i]) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
      }
    }
    __syncthreads();

    // The rows below: each thread has 8 columns of a row.
    const int below = kN - first - kTile;
    const int divisor = max_of(1, below);
    const int row = first + kTile + thread % divisor, part = thread / divisor;
    const bool active = below > 0 && part < kTile / 8;
    float solved[8] = {};
    if (active) {
#pragma unroll 8
      for (int k = 0; k < kTile; ++k) {
        const float value = block.columns[first + k][row];
#pragma unroll
        for (int c = 0; c < 8; ++c) solved[c] += value * inverse[k][part * 8 + c];
      }
    }
    __syncthreads();
    if (active) {
#pragma unroll
      for (int c = 0; c < 8; ++c) block.columns[first + part * 8 + c][row] = solved[c];
    }
    __syncthreads();

    // The rest of the triangle, in tiles of 4x4.
    const int tiles = below / 4;
    for (int i = thread; i < tiles * tiles; i += kThreads) {
      const int tile_row = i / tiles, tile_column = i % tiles;
      if (tile_column > tile_row) continue;
      const int rows = first + kTile + 4 * tile_row, columns = first + kTile + 4 * tile_column;
      float sums[4][4] = {};
#pragma unroll 8
      for (int k = 0; k < kTile; ++k) {
        const float4 l = *reinterpret_cast<const float4*>(&block.columns[first + k][rows]);
        const float4 r = *reinterpret_cast<const float4*>(&block.columns[first + k][columns]);
        const float left[4] = {l.x, l.y, l.z, l.w}, right[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
          for (int r2 = 0; r2 < 4; ++r2) sums[c][r2] += left[r2] * right[c];
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float4& to = *reinterpret_cast<float4*>(&block.columns[columns + c][rows]);
        const float4 old = to;
        to = {old.x - sums[c][0], old.y - sums[c][1], old.z - sums[c][2], old.w - sums[c][3]};
      }
    }
    __syncthreads();
  }

  for (int i = thread; i < kN * kN; i += kThreads) {
    const int row = i / kN, column = i % kN;
    if (column <= row) matrix[int64(row) * stride + column] = block.columns[column][row];
  }
  for (int i = thread; i < CholeskyBlock::kInverses; i += kThreads) {
    inverses[i] = (&block.inverses[0][0][0])[i];
  }
}

// Solves x L^T = b for rows below a block, in place: `factor` is the block, `matrix` the first row.
__global__ void __launch_bounds__(256)
    cholesky_rows(float* matrix, const float* factor, const float* inverses, int rows, int stride) {
  constexpr int kN = kFactorColumns, kTile = kFactorTile, kThreads = 256, kRows = 32;
  extern __shared__ float4 dynamic[];
  CholeskyBlock& block = *reinterpret_cast<CholeskyBlock*>(dynamic);
  // Columns of the CTA's rows.
  __shared__ alignas(16) float tile[kN][kRows + 4];
  const int thread = threadIdx.x, first_row = blockIdx.x * kRows;
  for (int i = thread; i < kN * kN; i += kThreads) {
    const int row = i / kN, column = i % kN;
    if (column < row) block.columns[column][row] = factor[int64(row) * stride + column];
  }
  for (int i = thread; i < CholeskyBlock::kInverses; i += kThreads) {
    (&block.inverses[0][0][0])[i] = inverses[i];
  }
  for (int i = thread; i < kRows * kN; i += kThreads) {
    const int row = i / kN, column = i % kN;
    tile[column][row] =
        first_row + row < rows ? matrix[int64(first_row + row) * stride + column] : 0;
  }
  __syncthreads();
  // Each warp has 4 columns of 32 rows.
  const int row = thread % 32, part = thread / 32;
#pragma unroll
  for (int first = 0; first < kN; first += kTile) {
    float solved[4] = {};
#pragma unroll 8
    for (int k = 0; k < kTile; ++k) {
      const float value = tile[first + k][row];
      const float4 v = *reinterpret_cast<const float4*>(&block.inverses[first / kTile][k][part * 4]);
      solved[0] += value * v.x;
      solved[1] += value * v.y;
      solved[2] += value * v.z;
      solved[3] += value * v.w;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 4; ++c) tile[first + part * 4 + c][row] = solved[c];
    __syncthreads();
    // The columns to the right, 4 at a time.
    for (int column = first + kTile + part * 4; column < kN; column += 32) {
      float sums[4] = {};
#pragma unroll 8
      for (int k = 0; k < kTile; ++k) {
        const float value = tile[first + k][row];
        const float4 v = *reinterpret_cast<const float4*>(&block.columns[first + k][column]);
        sums[0] += value * v.x;
        sums[1] += value * v.y;
        sums[2] += value * v.z;
        sums[3] += value * v.w;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) tile[column + c][row] -= sums[c];
    }
    __syncthreads();
  }
  for (int i = thread; i < kRows * kN; i += kThreads) {
    const int row = i / kN, column = i % kN;
    if (first_row + row < rows) matrix[int64(first_row + row) * stride + column] = tile[column][row];
  }
}

}  // namespace tilekern

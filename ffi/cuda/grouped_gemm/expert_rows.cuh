// Rows of tokens as rows of their pairs of a token and an expert, and the sums of the latter.
// Token t has `chosen` pairs, whose rows are places[t * chosen + i].
#pragma once

#include "vector_loads.cuh"

namespace tilekern {

inline constexpr int kExpertRowThreads = 256;

// Run-time sizes; `ExpertRows` in `plans/grouped_gemm/expert_rows.py` packs the same fields in the
// same order.
struct ExpertRowsShape {
  // Vectors of a row.
  int64 vectors;
  uint32 tokens;
  uint32 chosen;
  // Rows of pairs; other numbers in `places` are ignored.
  uint32 rows;
};

template <int kBytes>
struct alignas(kBytes) RowVector {
  uint8 bytes[kBytes];
};

// The vectors of a row are dealt to kLanes threads of each CTA along y.
template <int kLanes, class F>
inline void for_vectors_of_row(const ExpertRowsShape& shape, const F& f) {
  const uint32 lane = blockIdx.y * kLanes + threadIdx.x % kLanes;
  for (int64 vector = lane; vector < shape.vectors; vector += gridDim.y * kLanes) f(vector);
}

// Copies the row of each token to its pairs.
template <int kBytes, int kLanes>
__global__ void __launch_bounds__(kExpertRowThreads)
    spread_rows(const RowVector<kBytes>* x, const int32* places, RowVector<kBytes>* out,
                const __grid_constant__ ExpertRowsShape shape) {
  const uint32 token = blockIdx.x * (kExpertRowThreads / kLanes) + threadIdx.x / kLanes;
  if (token >= shape.tokens) return;
  for_vectors_of_row<kLanes>(shape, [&](int64 vector) {
    const RowVector<kBytes> value = x[token * shape.vectors + vector];
    for (uint32 i = 0; i < shape.chosen; ++i) {
      const uint32 row = static_cast<uint32>(places[token * shape.chosen + i]);
      if (row < shape.rows) out[row * shape.vectors + vector] = value;
    }
  });
}

// Sums the rows of each token's pairs, of one array or of two.
template <typename T, typename Sum, int kBytes, int kLanes, int kArrays>
__global__ void __launch_bounds__(kExpertRowThreads)
    combine_rows(const T* first, const T* second, const int32* places, T* out,
                 const __grid_constant__ ExpertRowsShape shape) {
  constexpr int kVector = kBytes / static_cast<int>(sizeof(T));
  // Four of float64, or of two arrays of float32, spill registers on sm_120.
  constexpr int kUnroll = kArrays * sizeof(T) > 4 ? 2 : 4;
  const uint32 token = blockIdx.x * (kExpertRowThreads / kLanes) + threadIdx.x / kLanes;
  if (token >= shape.tokens) return;
  for_vectors_of_row<kLanes>(shape, [&](int64 vector) {
    Sum sums[kVector] = {};
    for (uint32 begin = 0; begin < shape.chosen; begin += kUnroll) {
      Bits<kBytes> values[kUnroll][kArrays] = {};
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (begin + i >= shape.chosen) continue;
        const uint32 row = static_cast<uint32>(places[token * shape.chosen + begin + i]);
        if (row >= shape.rows) continue;
        const int64 at = (row * shape.vectors + vector) * kVector;
        values[i][0] = load_once<kBytes>(first + at);
        if constexpr (kArrays == 2) values[i][1] = load_once<kBytes>(second + at);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
        for (int j = 0; j < kArrays; ++j) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) sums[k] += element<T, Sum>(values[i][j], k);
        }
      }
    }
    struct alignas(kBytes) {
      T elements[kVector];
    } result;
#pragma unroll
    for (int k = 0; k < kVector; ++k) result.elements[k] = rounded<T>(sums[k]);
    *reinterpret_cast<decltype(result)*>(out + (token * shape.vectors + vector) * kVector) = result;
  });
}

}  // namespace tilekern

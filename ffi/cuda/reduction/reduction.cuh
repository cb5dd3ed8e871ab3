// Sums, and products with a vector: out[b, i] is the sum over k of lhs[b, i, k], or of
// lhs[b, i, k] * rhs[b, k].
#pragma once

#include "vector_loads.cuh"

namespace tilekern {

inline constexpr int kReductionThreads = 256;

// Compile-time choices; `ReductionPass` in `plans/reduction/passes.py` makes them.
struct ReductionConfig {
  // Bytes per load of lhs, whose elements are adjacent. Every address is a multiple of it.
  int vector_bytes;
  // Whether adjacent elements are those of adjacent outputs, or of adjacent k.
  bool columns;
  // Whether lhs is multiplied by rhs; otherwise rhs is not read.
  bool products;
};

// Run-time sizes; `ReductionPass` packs the same fields in the same order. Strides are in elements.
struct ReductionShape {
  // Batch dimensions, outermost first; unused ones come first with size 1.
  int64 lhs_batch[kMaxBatchDims];
  int64 rhs_batch[kMaxBatchDims];
  int64 out_batch[kMaxBatchDims];
  int64 lhs_output;
  int64 lhs_k;
  int64 rhs_k;
  int64 out_output;
  // The distance between the partial sums of one output's chunks.
  int64 out_chunk;
  int64 k;
  uint32 batch[kMaxBatchDims];
  // Outputs per matrix and in total; vectors of outputs, if vectors are columns.
  uint32 matrix_slots;
  uint32 slots;
  // CTAs that share k, and how much of it each has.
  uint32 chunks;
  uint32 chunk_k;
  // 2^log2_lanes threads are side by side along the vectors' dimension.
  uint32 log2_lanes;
};

// Threads form a matrix, of which rows read adjacent vectors. Those that share an output add up
// their parts of k by a tree in shared memory, so the order of additions is always the same.
template <typename T, typename Sum, typename Out, ReductionConfig config>
__global__ void __launch_bounds__(kReductionThreads, 3)
    reduce(const T* lhs, const T* rhs, Out* out, const __grid_constant__ ReductionShape shape) {
  constexpr int kBytes = config.vector_bytes;
  constexpr int kVector = kBytes / static_cast<int>(sizeof(T));
  constexpr int kOutputs = config.columns ? kVector : 1;
  constexpr int kLoadK = config.columns ? 1 : kVector;
  constexpr int kFactorBytes = kLoadK * static_cast<int>(sizeof(T));
  constexpr int kUnroll = kBytes > 4 ? 4 : 8;
  const uint32 thread = threadIdx.x;
  const uint32 lanes = 1u << shape.log2_lanes, lane = thread % lanes;
  const uint32 lines = kReductionThreads / lanes, line = thread / lanes;
  const uint32 sharing = config.columns ? lines : lanes;
  const uint32 part = config.columns ? line : lane;

  const uint32 wanted =
      blockIdx.x / shape.chunks * (kReductionThreads / sharing) + (config.columns ? lane : line);
  // No thread ends early, because all take part in barriers.
  const uint32 slot = min_of(wanted, shape.slots - 1);
  const int64 output = static_cast<int64>(slot % shape.matrix_slots) * kOutputs;
  lhs += output * shape.lhs_output;
  out += output * shape.out_output;
  uint32 rest = slot / shape.matrix_slots;
#pragma unroll
  for (int dim = kMaxBatchDims - 1; dim >= 0 && rest > 0; --dim) {
    const int64 index = rest % shape.batch[dim];
    rest /= shape.batch[dim];
    lhs += index * shape.lhs_batch[dim];
    rhs += index * shape.rhs_batch[dim];
    out += index * shape.out_batch[dim];
  }
  const uint32 chunk = blockIdx.x % shape.chunks;
  const int64 begin = static_cast<int64>(chunk) * shape.chunk_k;
  const uint32 count = static_cast<uint32>(min_of<int64>(shape.k - begin, shape.chunk_k));
  lhs += begin * shape.lhs_k;
  rhs += begin * shape.rhs_k;
  out += chunk * shape.out_chunk;

  Sum sums[kVector] = {};
  const uint32 loads = count / kLoadK;
  for (uint32 first = part; first < loads; first += kUnroll * sharing) {
    // Loads that are in flight at once; zeros after the last one.
    Bits<kBytes> values[kUnroll] = {};
    Bits<kFactorBytes> factors[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32 load = first + i * sharing;
      if (load >= loads) break;
      const int64 k = static_cast<int64>(load) * kLoadK;
      values[i] = load_once<kBytes>(lhs + k * shape.lhs_k);
      if constexpr (config.products) factors[i] = load_reused<kFactorBytes>(rhs + k * shape.rhs_k);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const Sum value = element<T, Sum>(values[i], j);
        sums[j] += config.products ? value * element<T, Sum>(factors[i], j % kLoadK) : value;
      }
    }
  }
#pragma unroll
  for (int j = kOutputs; j < kVector; ++j) sums[0] += sums[j];

  // An array for each of a thread's outputs, so that threads access different banks.
  __shared__ Sum shared[kOutputs][kReductionThreads];
#pragma unroll
  for (int j = 0; j < kOutputs; ++j) shared[j][thread] = sums[j];
  for (uint32 half = sharing / 2; half > 0; half /= 2) {
    __syncthreads();
    if (part < half) {
      const uint32 other = thread + half * (config.columns ? lanes : 1);
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) shared[j][thread] += shared[j][other];
    }
  }
  if (part > 0 || wanted >= shape.slots) return;
#pragma unroll
  for (int j = 0; j < kOutputs; ++j) out[j * shape.out_output] = rounded<Out>(shared[j][thread]);
}

}  // namespace tilekern

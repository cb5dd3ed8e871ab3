// Sums, and products with a vector: out[b, i] is the sum over k of lhs[b, i, k], or of
// lhs[b, i, k] * rhs[b, k].
#pragma once

#include "vector_loads.cuh"

namespace tilekern {

inline constexpr int kReductionThreads = 256;

// Compile-time choices; `ReductionPass` in `plans/reduction/passes.py` makes them.
struct ReductionConfig {
  // Bytes per load of lhs, whose elements are adjacent. Every address of columns is a multiple of
  // it; rows may start anywhere.
  int vector_bytes;
  // Bytes per load of rhs.
  int factor_bytes;
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
// their parts of k by a tree, within a warp by shuffles if they are adjacent, and otherwise in
// shared memory. So the order of additions is always the same.
template <typename T, typename Sum, typename Out, ReductionConfig config>
__global__ void __launch_bounds__(kReductionThreads, 3)
    reduce(const T* lhs, const T* rhs, Out* out, const __grid_constant__ ReductionShape shape) {
  constexpr int kBytes = config.vector_bytes;
  constexpr int kVector = kBytes / static_cast<int>(sizeof(T));
  constexpr int kOutputs = config.columns ? kVector : 1;
  constexpr int kLoadK = config.columns ? 1 : kVector;
  constexpr int kSize = static_cast<int>(sizeof(T));
  constexpr int kFactorBytes = config.factor_bytes;
  // Rows share rhs, and one that is aligned unlike them is read by element, from L1.
  constexpr bool kFactorElements = config.products && !config.columns && kFactorBytes < kBytes;
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
  // Whole vectors of a row lie between its first and last elements, of which a thread has one.
  uint32 head = 0;
  if constexpr (!config.columns) {
    const uint32 before = -static_cast<uint32>(reinterpret_cast<uint64>(lhs)) % kBytes / kSize;
    head = min_of(before, count);
  }
  const uint32 loads = (count - head) / kLoadK;
  Bits<kSize> end_value = {}, end_factor = {};
  if constexpr (!config.columns) {
    if (part < count - loads * kLoadK) {
      const uint32 k = part < head ? part : part + loads * kLoadK;
      end_value = load_reused<kSize>(lhs + k);
      if constexpr (config.products) end_factor = load_reused<kSize>(rhs + k);
    }
    lhs += head;
    rhs += head;
  }
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
      if constexpr (config.products && !kFactorElements) {
        factors[i] = load_reused<kFactorBytes>(rhs + k * shape.rhs_k);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32 load = first + i * sharing;
      if (kFactorElements && load >= loads) break;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const Sum value = element<T, Sum>(values[i], j);
        if constexpr (kFactorElements) {
          sums[j] += value * load_element<T, Sum>(rhs + static_cast<int64>(load) * kLoadK + j);
        } else if constexpr (config.products) {
          sums[j] += value * element<T, Sum>(factors[i], config.columns ? 0 : j);
        } else {
          sums[j] += value;
        }
      }
    }
  }
  if constexpr (!config.columns) {
    const Sum end = element<T, Sum>(end_value, 0);
    sums[0] += config.products ? end * element<T, Sum>(end_factor, 0) : end;
#pragma unroll
    for (int j = 1; j < kVector; ++j) sums[0] += sums[j];
    for (uint32 half = min_of(sharing, 32u) / 2; half > 0; half /= 2) {
      sums[0] += __shfl_xor_sync(0xffffffff, sums[0], half);
    }
  }

  // An array for each of a thread's outputs, so that threads access different banks.
  __shared__ Sum shared[kOutputs][kReductionThreads];
#pragma unroll
  for (int j = 0; j < kOutputs; ++j) shared[j][thread] = sums[j];
  for (uint32 half = sharing / 2; half >= (config.columns ? 1 : 32); half /= 2) {
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

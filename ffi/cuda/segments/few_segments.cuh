// Reductions to segments that are so few that every thread has its own values of all of them in
// shared memory. A CTA takes a block of edges as they lie, and `combine_blocks` combines the CTAs'
// parts.
#pragma once

#include "ptx.cuh"
#include "segments/index_sort.cuh"
#include "segments/segments.cuh"

namespace tilekern {

inline constexpr int kCombineThreads = 256;

// Run-time sizes; `FewSegments` in `plans/segments/few_segments.py` packs the same fields in the
// same order.
struct FewSegmentsShape {
  int64 columns;
  uint32 edges;
  uint32 bins;
  // Edges of a CTA.
  uint32 block;
  // 2^log2_lanes threads are side by side on each row.
  uint32 log2_lanes;
};

// Writes parts[CTA][segment][column].
template <typename Operation, typename Map, int kThreads, int kUnroll, typename... Fields>
__global__ void __launch_bounds__(kThreads)
    reduce_few(const int32* keys, typename Map::Value* parts,
               const __grid_constant__ FewSegmentsShape shape,
               const __grid_constant__ Fields... fields) {
  const Map map{fields...};
  using Value = typename Map::Value;
  constexpr int kVector = Map::kVector;
  extern __shared__ float4 shared[];
  // [bin][element of the vector][thread]
  Value* const all = reinterpret_cast<Value*>(shared);
  const uint32 thread = threadIdx.x, lanes = 1u << shape.log2_lanes;
  const uint32 lane = thread & (lanes - 1), phase = thread >> shape.log2_lanes;
  const uint32 phases = kThreads >> shape.log2_lanes;
  const int64 column = (static_cast<int64>(blockIdx.y) * lanes + lane) * kVector;
  const bool inside = column < shape.columns;
  for (uint32 i = 0; i < shape.bins * kVector; ++i) {
    all[i * kThreads + thread] = Operation::template neutral<Value>();
  }

  launch_dependents();
  const uint32 begin = blockIdx.x * shape.block;
  const uint32 end = min_of(shape.edges - begin, shape.block) + begin;
  for (uint32 edge = begin + phase; inside && edge < end; edge += kUnroll * phases) {
    typename Map::Row rows[kUnroll];
    uint32 bins[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32 at = edge + i * phases;
      if (at < end) bins[i] = bin_of_key(keys[at], shape.bins);
      if (at < end) rows[i] = map.load(map.place(at), column);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (edge + i * phases >= end) continue;
      Value values[kVector];
      map.values(rows[i], values);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        Value& own = all[(bins[i] * kVector + j) * kThreads + thread];
        own = Operation::combined(own, values[j]);
      }
    }
  }

  // A tree over the phases.
  for (int log2_width = log2_of(kThreads) - 1; log2_width >= static_cast<int>(shape.log2_lanes);
       --log2_width) {
    __syncthreads();
    const uint32 width = 1u << log2_width;
    for (uint32 i = thread; i < (shape.bins * kVector) << log2_width; i += kThreads) {
      Value* const own = all + (i >> log2_width) * kThreads + (i & (width - 1));
      *own = Operation::combined(*own, own[width]);
    }
  }
  __syncthreads();
  const int64 first = static_cast<int64>(blockIdx.y) * lanes * kVector;
  const uint32 columns = min_of(shape.columns - first, static_cast<int64>(lanes) * kVector);
  const uint32 segments = shape.bins - 2;
  parts += static_cast<int64>(blockIdx.x) * segments * shape.columns + first;
  for (uint32 i = thread; i < segments * columns; i += kThreads) {
    const uint32 segment = i / columns, at = i % columns;
    parts[segment * shape.columns + at] =
        all[((segment + 1) * kVector + at % kVector) * kThreads + at / kVector];
  }
}

// out[i] combines parts[block][i].
template <typename Operation, typename Value, typename Out>
__global__ void __launch_bounds__(kCombineThreads)
    combine_blocks(const Value* parts, Out* out, int64 results, uint32 blocks) {
  constexpr uint32 kLanes = 32, kPhases = kCombineThreads / kLanes;
  __shared__ Value shared[kPhases][kLanes];
  const uint32 lane = threadIdx.x % kLanes, phase = threadIdx.x / kLanes;
  const int64 result = static_cast<int64>(blockIdx.x) * kLanes + lane;
  Value value = Operation::template neutral<Value>();
  wait_for_prerequisites();
  if (result < results) {
#pragma unroll 8
    for (uint32 block = phase; block < blocks; block += kPhases) {
      value = Operation::combined(value, parts[block * results + result]);
    }
  }
  shared[phase][lane] = value;
  __syncthreads();
  if (phase != 0 || result >= results) return;
  for (uint32 i = 1; i < kPhases; ++i) value = Operation::combined(value, shared[i][lane]);
  out[result] = rounded<Out>(value);
}

}  // namespace tilekern

// Reductions of few edges: a CTA for each segment reads the keys of all edges, and the rows of
// those that are its own. Nothing is sorted.
#pragma once

#include "segments/segments.cuh"

namespace tilekern {

inline constexpr int kScanThreads = 256;

// Run-time sizes; `ScannedSegments` in `plans/segments/scanned_segments.py` packs the same fields
// in the same order.
struct ScannedShape {
  int64 columns;
  uint32 edges;
  // Segments of a batch, whose bins have two more numbers.
  uint32 segments;
  // Tiles of columns.
  uint32 tiles;
};

// kLanes threads are side by side on a row, and read the rows of as many edges one after the other.
template <typename Operation, typename Map, typename Out, int kLanes, typename... Fields>
__global__ void __launch_bounds__(kScanThreads)
    reduce_scanned(const int32* keys, Out* out, const __grid_constant__ ScannedShape shape,
                   const __grid_constant__ Fields... fields) {
  using Value = typename Map::Value;
  constexpr int kVector = Map::kVector, kGroups = kScanThreads / kLanes, kUnroll = 4;
  __shared__ alignas(16) Value shared[kGroups][kLanes][kVector];
  const Map map{fields...};
  const uint32 thread = threadIdx.x, lane = thread % kLanes, group = thread / kLanes;
  const uint32 row = blockIdx.x / shape.tiles;
  // Bins before and behind the segments of a batch have keys, too.
  const int32 key =
      static_cast<int32>(row / shape.segments * (shape.segments + 2) + row % shape.segments);
  const int64 column = (static_cast<int64>(blockIdx.x % shape.tiles) * kLanes + lane) * kVector;
  const bool inside = column < shape.columns;
  const uint32 lanes_of_group =
      kLanes == 32 ? ~0u : ((1u << kLanes % 32) - 1) << thread % 32 / kLanes * kLanes;
  Reduced<Operation, Value, kVector> part;
  for (uint32 first = 0; first < shape.edges; first += kScanThreads) {
    const uint32 own = first + thread;
    const bool is_own = own < shape.edges && keys[own] == key;
    const uint32 warp = first + thread / 32 * 32;
    uint32 left = __ballot_sync(~0u, is_own) & lanes_of_group;
    while (inside && left != 0) {
      typename Map::Row rows[kUnroll];
      const uint32 count = __popc(left);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (i >= count) continue;
        rows[i] = map.load(map.place(warp + __ffs(left) - 1), column);
        left &= left - 1;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (i >= count) continue;
        Value values[kVector];
        map.values(rows[i], values);
        part.take(values);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared[group][lane][i] = part.values[i];
  for (int half = kGroups / 2; half > 0; half /= 2) {
    __syncthreads();
    if (group < half) {
      part.take(shared[group + half][lane]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) shared[group][lane][i] = part.values[i];
    }
  }
  if (group == 0 && inside) store_values(out + row * shape.columns + column, part.values);
}

}  // namespace tilekern

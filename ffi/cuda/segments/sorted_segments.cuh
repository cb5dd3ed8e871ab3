// Reductions to segments whose edges are sorted by their keys, by an order or as they lie.
//
// The edges and the ends of the bins form one list, sorted by bin: the edges of a bin come before
// its end. Each worker, some lanes of a warp, takes equally many items of the list, as in the
// merge-based product of a sparse matrix and a vector of Merrill and Garland (SC 2016). Neither
// long nor empty segments make work uneven. A worker stores the segments that begin and end among
// its items. It stores its part of a segment that began before (`heads`), and of one that goes on
// behind (`tails`). `combine_parts` combines the parts in a fixed order.
#pragma once

#include "ptx.cuh"
#include "segments/segments.cuh"

namespace tilekern {

inline constexpr int kSegmentThreads = 256;
// CTAs of an SM: more of them hide more of the latency than more loads of a thread do.
inline constexpr int kSegmentCtas = 4;

// Compile-time choices; `SortedSegments` in `plans/segments/sorted_segments.py` makes them.
struct SegmentConfig {
  // Threads of a worker, side by side on a row.
  int lanes;
  // Rows whose loads are in flight at once.
  int unroll;
  // Whether edges are read in an order.
  bool ordered;
};

// Run-time sizes; `SortedSegments` packs the same fields in the same order.
struct SegmentShape {
  int64 columns;
  uint32 edges;
  // Those of all batches.
  uint32 bins;
  // The bins of a batch.
  uint32 period;
  // Items of the list that a worker takes.
  uint32 items;
  uint32 workers;
  // Tiles of columns.
  uint32 tiles;
};

// How many bins and edges come before an item of the list.
struct ListPosition {
  uint32 bin;
  uint32 edge;
};

// What a worker takes: from one position to the other.
struct WorkerRange {
  uint32 last_item;
  ListPosition begin;
  ListPosition end;
};

// All lanes of a worker search together. The whole warp calls it.
template <int kLanes>
inline WorkerRange worker_range(const int32* bounds, const SegmentShape& shape, uint32 worker) {
  const uint32 lane = threadIdx.x % kLanes;
  const uint32 group =
      kLanes == 32 ? ~0u : ((1u << kLanes % 32) - 1) << threadIdx.x % 32 / kLanes * kLanes;
  const uint32 total = shape.edges + shape.bins;
  const uint32 items[2] = {min_of(worker * shape.items, total),
                           min_of((worker + 1) * shape.items, total)};
  // Each bin is from `low` to `low + width`.
  uint32 low[2] = {0, 0};
  for (uint32 width = shape.bins; width > 0;) {
    const uint32 step = (width + 1 + kLanes) / (kLanes + 1);
    bool is_before[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32 probe = low[i] + (lane + 1) * step - 1;
      is_before[i] =
          probe < shape.bins && static_cast<uint32>(bounds[probe + 1]) + probe < items[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] += __popc(__ballot_sync(~0u, is_before[i]) & group) * step;
    }
    width = step - 1;
  }
  return {items[1],
          {low[0], min_of(items[0] - low[0], shape.edges)},
          {low[1], min_of(items[1] - low[1], shape.edges)}};
}

// The segment of a bin, or of the bins before it where it is none.
struct SegmentOfBin {
  uint32 in_batch;
  uint32 period;
  int64 row;

  SegmentOfBin(uint32 bin, uint32 bins_of_batch)
      : in_batch(bin % bins_of_batch),
        period(bins_of_batch),
        row(static_cast<int64>(bin / bins_of_batch) * (bins_of_batch - 2) +
            min_of(bins_of_batch - 2, max_of(in_batch, 1u) - 1)) {}

  bool is_stored() const { return in_batch != 0 && in_batch != period - 1; }
  void next() {
    row += is_stored();
    in_batch = in_batch + 1 == period ? 0 : in_batch + 1;
  }
};

template <typename Operation, typename Map, typename Out, SegmentConfig config, typename... Fields>
__global__ void __launch_bounds__(kSegmentThreads, kSegmentCtas)
    reduce_sorted(const int32* order, const int32* bounds, typename Map::Value* heads,
                  typename Map::Value* tails, Out* out, const __grid_constant__ SegmentShape shape,
                  const __grid_constant__ Fields... fields) {
  const Map map{fields...};
  using Value = typename Map::Value;
  constexpr int kVector = Map::kVector;
  constexpr int kUnroll = config.unroll;
  // Adjacent CTAs have adjacent columns of one row.
  const uint32 worker =
      blockIdx.x / shape.tiles * (kSegmentThreads / config.lanes) + threadIdx.x / config.lanes;
  const int64 column =
      (static_cast<int64>(blockIdx.x % shape.tiles) * config.lanes + threadIdx.x % config.lanes) *
      kVector;
  wait_for_prerequisites();
  const WorkerRange range = worker_range<config.lanes>(bounds, shape, worker);
  const ListPosition &begin = range.begin, &end = range.end;
  launch_dependents();
  if (worker >= shape.workers || column >= shape.columns) return;

  uint32 bin = begin.bin, edge = begin.edge;
  SegmentOfBin segment(bin, shape.period);
  Reduced<Operation, Value, kVector> part;
  // Whether the part has an edge.
  bool is_begun = false;
  bool is_head = bin < shape.bins && static_cast<uint32>(bounds[bin]) < edge;
  uint32 next = bin < shape.bins ? bounds[bin + 1] : shape.edges;

  const auto end_bins = [&](uint32 at) {
    while (bin < end.bin && at >= next) {
      if (is_head) {
        store_values(heads + worker * shape.columns + column, part.values);
        is_head = false;
      } else if (segment.is_stored()) {
        store_values(out + segment.row * shape.columns + column, part.values);
      }
      part.reset();
      is_begun = false;
      segment.next();
      ++bin;
      next = bin < shape.bins ? bounds[bin + 1] : shape.edges;
    }
  };
  // The places of a batch of edges are known before those of the batch before are reduced.
  typename Map::Place places[kUnroll];
  const auto find_places = [&](uint32 from) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (from + i >= end.edge) continue;
      const uint32 found = config.ordered ? order[from + i] : from + i;
      places[i] = map.place(min_of(found, shape.edges - 1));
    }
  };
  bool is_found = false;
  while (true) {
    end_bins(edge);
    if (edge >= end.edge) break;
    if (!segment.is_stored()) {
      edge = max_of(edge + 1, min_of(next, end.edge));
      is_found = false;
      continue;
    }
    if (!is_found) find_places(edge);
    typename Map::Row rows[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (edge + i < end.edge) rows[i] = map.load(places[i], column);
    }
    find_places(edge + kUnroll);
    is_found = true;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (edge + i >= end.edge) continue;
      end_bins(edge + i);
      Value values[kVector];
      map.values(rows[i], values);
      part.take(values);
      is_begun = true;
    }
    edge = min_of(edge + kUnroll, end.edge);
  }
  if (is_begun) store_values(tails + worker * shape.columns + column, part.values);
}

// Combines the parts of each segment that several workers have. The group of lanes of the worker
// where it ends combines a few parts, and a CTA more of them.
template <typename Operation, typename Value, typename Out, int kVector, int kLanes>
__global__ void __launch_bounds__(kSegmentThreads)
    combine_parts(const int32* bounds, const Value* heads, const Value* tails, Out* out,
                  const __grid_constant__ SegmentShape shape) {
  constexpr uint32 kGroups = kSegmentThreads / kLanes, kFew = 16;
  struct Span {
    uint32 first;
    uint32 worker;
    int64 row;
  };
  __shared__ Span spans[kGroups];
  __shared__ alignas(16) Value shared[kGroups][kLanes][kVector];
  const uint32 lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  wait_for_prerequisites();
  const Span own = [&]() -> Span {
    const Span none = {0, 0, 0};
    const uint32 worker = blockIdx.x * kGroups + group;
    const WorkerRange range = worker_range<kLanes>(bounds, shape, worker);
    const ListPosition& begin = range.begin;
    if (worker >= shape.workers) return none;
    // Whether a segment has begun before, and ends here.
    if (begin.bin >= shape.bins || static_cast<uint32>(bounds[begin.bin]) >= begin.edge) {
      return none;
    }
    if (static_cast<uint32>(bounds[begin.bin + 1]) + begin.bin >= range.last_item) {
      return none;
    }
    const SegmentOfBin segment(begin.bin, shape.period);
    if (!segment.is_stored()) return none;
    const uint32 item = static_cast<uint32>(bounds[begin.bin]) + begin.bin;
    return {item / shape.items, worker, segment.row};
  }();

  // Takes every `step`th part from `index` on, the head being the last.
  const auto take = [&](Reduced<Operation, Value, kVector>& part, const Span& span, uint32 index,
                        uint32 step, int64 column) {
#pragma unroll 4
    for (uint32 i = span.first + index; i <= span.worker; i += step) {
      const Value* const from = i < span.worker ? tails : heads;
      Value values[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] = from[i * shape.columns + column + j];
      part.take(values);
    }
  };
  // CTAs of one number along x share the tiles of columns.
  const int64 first_column = static_cast<int64>(blockIdx.y) * kLanes * kVector;
  const int64 next = static_cast<int64>(gridDim.y) * kLanes * kVector;
  const bool is_few = own.worker - own.first <= kFew;
  if (is_few && own.worker != 0) {
    for (int64 column = first_column + lane * kVector; column < shape.columns; column += next) {
      Reduced<Operation, Value, kVector> part;
      take(part, own, 0, 1, column);
      store_values(out + own.row * shape.columns + column, part.values);
    }
  }
  if (lane == 0) spans[group] = is_few ? Span{0, 0, 0} : own;
  if (!__syncthreads_or(!is_few)) return;
  for (uint32 i = 0; i < kGroups; ++i) {
    const Span span = spans[i];
    if (span.worker == 0) continue;
    for (int64 tile = first_column; tile < shape.columns; tile += next) {
      const int64 column = tile + lane * kVector;
      Reduced<Operation, Value, kVector> part;
      if (column < shape.columns) take(part, span, group, kGroups, column);
#pragma unroll
      for (int j = 0; j < kVector; ++j) shared[group][lane][j] = part.values[j];
      __syncthreads();
      if (group == 0 && column < shape.columns) {
        for (uint32 j = 1; j < kGroups; ++j) part.take(shared[j][lane]);
        store_values(out + span.row * shape.columns + column, part.values);
      }
      __syncthreads();
    }
  }
}

}  // namespace tilekern

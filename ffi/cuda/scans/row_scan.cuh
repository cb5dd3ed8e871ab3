// Scans along the innermost dimension: rows of adjacent elements.
#pragma once

#include "scans/look_back.cuh"

namespace tilekern {

inline constexpr int kRowScanThreads = 256;
inline constexpr int kRowScanWarps = kRowScanThreads / 32;

// Run-time sizes; `RowScan` in `plans/scans/row_scan.py` packs the same fields in the same order.
struct RowScanShape {
  int64 length;
  uint32 rows;
  // What a row consists of.
  uint32 vectors;
  uint32 tiles;
  uint32 groups;
  // Tiles of a group, at most kRowScanThreads.
  uint32 group;
  // Tickets after which a CTA takes the tile that a CTA prefetches.
  uint32 ahead;
};

// What precedes a tile of a row, and its publications. All threads of the CTA call it; `aggregate`
// is that of the tile in the last warp.
template <class Scan>
inline Prefix<Scan> before_tile(const Scan& scan, uint64* slots, uint32 row, uint32 tile,
                                const RowScanShape& shape, const typename Scan::Value& aggregate) {
  using Value = typename Scan::Value;
  __shared__ Value parts[kRowScanWarps], entering;
  const uint32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const uint32 group = tile / shape.group, before = tile % shape.group;
  uint64* const aggregates = slots + 1;
  uint64* const groups =
      aggregates + static_cast<int64>(shape.rows) * shape.tiles * ValueWords<Value>::kCount;
  const int64 first = static_cast<int64>(row) * shape.tiles;
  const int64 first_group = static_cast<int64>(row) * shape.groups;
  const bool publishes = thread == kRowScanThreads - 1 && tile + 1 < shape.tiles;
  if (publishes) publish(aggregates, first + tile, aggregate);
  // A thread takes one of the tiles before.
  Value own = {};
  if (thread < before) own = awaited<Value>(aggregates, first + group * shape.group + thread);
  own = scanned_over_lanes<Scan>(own);
  if (thread < before && (lane == 31 || thread + 1 == before)) parts[warp] = own;
  if (thread == 0 && group > 0) entering = awaited<Value>(groups, first_group + group);
  if constexpr (Scan::kInitial) {
    if (thread == 0 && group == 0) entering = scan.initial(row);
  }
  __syncthreads();
  Prefix<Scan> prefix = {entering, Scan::kInitial || group > 0};
  for (uint32 i = 0; 32 * i < before; ++i) prefix.append(parts[i]);
  if (publishes && before == shape.group - 1) {
    Prefix<Scan> next = prefix;
    next.append(aggregate);
    publish(groups, first_group + group + 1, next.value);
  }
  return prefix;
}

// Prefetches the tile of a later ticket to L2, so that DRAM is read while CTAs wait for each other.
// Each thread has kElements adjacent elements, a line or less of each array.
template <int kElements, class Scan>
inline void prefetch_tile(const Scan& scan, uint32 ticket, const RowScanShape& shape) {
  const uint32 row = ticket % shape.rows, tile = ticket / shape.rows;
  const int64 first = (static_cast<int64>(tile) * kRowScanThreads + threadIdx.x) * kElements;
  if (tile >= shape.tiles || first >= shape.length) return;
  scan.prefetch(row * shape.length + (Scan::kReverse ? shape.length - 1 - first : first));
}

// kWarps warps have a tile of a row, each of them kVectors times 32 adjacent vectors. Without
// kLookBack a row is one tile.
template <class Scan, int kWarps, int kVectors, bool kLookBack, typename... Fields>
__global__ void __launch_bounds__(kRowScanThreads, sizeof(typename Scan::Value) <= 16 ? 3 : 1)
    scan_rows(uint64* slots, const __grid_constant__ RowScanShape shape,
              const __grid_constant__ Fields... fields) {
  using Value = typename Scan::Value;
  constexpr int kVector = Scan::kVector;
  static_assert(!kLookBack || kWarps == kRowScanWarps);
  __shared__ Value totals[kRowScanWarps];
  const Scan scan{fields...};
  const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = warp % kWarps;
  uint32 row = blockIdx.x * (kRowScanWarps / kWarps) + warp / kWarps, tile = 0, ticket = 0;
  if constexpr (kLookBack) {
    ticket = take_ticket(slots);
    row = ticket % shape.rows;
    tile = ticket / shape.rows;
  }
  const int64 begin = static_cast<int64>(row) * shape.length;
  const Row place = {begin, begin + shape.length, Scan::kReverse ? 1 : -1};
  const uint32 first = (tile * kWarps + member) * kVectors * 32 + lane;

  const auto at = [&](int i) {
    const int64 number = first + 32 * i;
    return begin + (Scan::kReverse ? shape.vectors - 1 - number : number) * kVector;
  };
  const auto count = [&](int i) {
    const bool inside = row < shape.rows && first + 32 * i < shape.vectors;
    return inside ? static_cast<int>(min_of<int64>(kVector, place.end - at(i))) : 0;
  };

  typename Scan::Vector loaded[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) loaded[i] = scan.load(at(i), count(i), place);
  if constexpr (kLookBack) {
    prefetch_tile<kVectors * kVector>(scan, ticket + shape.ahead, shape);
  }
  const auto value = [&](int i, int j) {
    return Scan::value(loaded[i], Scan::kReverse ? kVector - 1 - j : j);
  };

  // What the lanes before have of the warp's elements up to vector i; lane 0 has nothing in the
  // first one.
  Value before[kVectors], carried;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    Value total = value(i, 0);
#pragma unroll
    for (int j = 1; j < kVector; ++j) total = Scan::combine(total, value(i, j));
    const Value inclusive = scanned_over_lanes<Scan>(total);
    const Value last = value_of_lane(inclusive, 31);
    before[i] = value_of_lane_before(inclusive, 1);
    if (i > 0) {
      before[i] = lane == 0 ? carried : Scan::combine(carried, before[i]);
      carried = Scan::combine(carried, last);
    } else {
      carried = last;
    }
  }
  if (lane == 0) totals[warp] = carried;
  __syncthreads();
  Prefix<Scan> prefix = {{}, false};
  for (uint32 i = 0; i < member; ++i) prefix.append(totals[warp - member + i]);

  Prefix<Scan> entering = {{}, false};
  if constexpr (kLookBack) {
    Prefix<Scan> aggregate = prefix;
    aggregate.append(carried);
    entering = before_tile(scan, slots, row, tile, shape, aggregate.value);
  } else if constexpr (Scan::kInitial) {
    entering = {scan.initial(min_of(row, shape.rows - 1)), true};
  }
  if (prefix.is_some) entering.append(prefix.value);

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    Prefix<Scan> running = entering;
    if (i > 0 || lane > 0) running.append(before[i]);
    Value results[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      running.append(value(i, j));
      results[Scan::kReverse ? kVector - 1 - j : j] = running.value;
    }
    scan.store(at(i), count(i), results);
  }
}

}  // namespace tilekern

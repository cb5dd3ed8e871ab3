// Scans along a dimension with adjacent columns after it.
#pragma once

#include "scans/look_back.cuh"

namespace tilekern {

// Tiles of a group.
inline constexpr int kColumnGroup = 32;

// Run-time sizes; `ColumnScan` in `plans/scans/column_scan.py` packs the same fields in the same
// order.
struct ColumnScanShape {
  int64 columns;
  uint32 length;
  uint32 outer;
  // Tiles of a sequence, and blocks of columns.
  uint32 tiles;
  uint32 blocks;
};

// A thread has kSteps elements of kVector adjacent sequences. kLanes threads are side by side on
// the columns, and kRows of these come one after the other along the sequences. Without kLookBack a
// sequence is one tile.
template <class Scan, int kLanes, int kRows, int kSteps, bool kLookBack, typename... Fields>
__global__ void __launch_bounds__(kLanes* kRows, 1)
    scan_columns(uint64* slots, const __grid_constant__ ColumnScanShape shape,
                 const __grid_constant__ Fields... fields) {
  using Value = typename Scan::Value;
  constexpr int kVector = Scan::kVector, kColumns = kLanes * kVector;
  constexpr int kParts = kLookBack ? max_of(kRows, kColumnGroup) : kRows;
  __shared__ Value parts[kParts][kColumns], entries[kLookBack ? kColumns : 1];
  const Scan scan{fields...};
  const uint32 lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  const uint32 ticket = kLookBack ? take_ticket(slots) : blockIdx.x;
  const uint32 block = ticket % shape.blocks, sequences = ticket / shape.blocks;
  const uint32 outer = sequences % shape.outer, tile = sequences / shape.outer;
  const int64 column = (static_cast<int64>(block) * kLanes + lane) * kVector;
  const bool inside = column < shape.columns;
  const int64 begin = static_cast<int64>(outer) * shape.length * shape.columns;
  const Row place = {begin, begin + shape.length * shape.columns,
                     Scan::kReverse ? shape.columns : -shape.columns};
  const uint32 first = (tile * kRows + row) * kSteps;
  const auto at = [&](int i) {
    const uint32 step = first + i;
    return begin + (Scan::kReverse ? shape.length - 1 - step : step) * shape.columns + column;
  };

  typename Scan::Vector loaded[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const bool exists = inside && first + i < shape.length;
    loaded[i] = exists ? scan.load(at(i), kVector, place) : typename Scan::Vector{};
  }
  Value totals[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    totals[j] = Scan::value(loaded[0], j);
#pragma unroll
    for (int i = 1; i < kSteps; ++i) {
      totals[j] = Scan::combine(totals[j], Scan::value(loaded[i], j));
    }
    parts[row][lane * kVector + j] = totals[j];
  }
  __syncthreads();
  Prefix<Scan> prefixes[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    prefixes[j] = {{}, false};
    for (uint32 i = 0; i < row; ++i) prefixes[j].append(parts[i][lane * kVector + j]);
  }

  Prefix<Scan> entering[kVector];
  const int64 sequence = static_cast<int64>(outer) * shape.columns + column;
  if constexpr (kLookBack) {
    constexpr int kWords = ValueWords<Value>::kCount;
    const uint32 group = tile / kColumnGroup, before = tile % kColumnGroup;
    const int64 count = static_cast<int64>(shape.outer) * shape.columns;
    uint64* const aggregates = slots + 1;
    uint64* const groups = aggregates + count * shape.tiles * kWords;
    const bool publishes = inside && row == kRows - 1 && tile + 1 < shape.tiles;
    if (publishes) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        Prefix<Scan> aggregate = prefixes[j];
        aggregate.append(totals[j]);
        totals[j] = aggregate.value;
        publish(aggregates, tile * count + sequence + j, aggregate.value);
      }
    }
    __syncthreads();
    if (inside) {
      for (uint32 i = row; i < before; i += kRows) {
        const int64 number = (static_cast<int64>(group) * kColumnGroup + i) * count + sequence;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          parts[i][lane * kVector + j] = awaited<Value>(aggregates, number + j);
        }
      }
      if (row == kRows - 1) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          Value& entry = entries[lane * kVector + j];
          if (group > 0) entry = awaited<Value>(groups, group * count + sequence + j);
          if constexpr (Scan::kInitial) {
            if (group == 0) entry = scan.initial(sequence + j);
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      entering[j] = {entries[lane * kVector + j], Scan::kInitial || group > 0};
      for (uint32 i = 0; i < before; ++i) entering[j].append(parts[i][lane * kVector + j]);
      if (publishes && before == kColumnGroup - 1) {
        Prefix<Scan> next = entering[j];
        next.append(totals[j]);
        publish(groups, (group + 1) * count + sequence + j, next.value);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      entering[j] = {{}, false};
      if constexpr (Scan::kInitial) {
        if (inside) entering[j] = {scan.initial(sequence + j), true};
      }
    }
  }
  if (!inside) return;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (prefixes[j].is_some) entering[j].append(prefixes[j].value);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    Value results[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      entering[j].append(Scan::value(loaded[i], j));
      results[j] = entering[j].value;
    }
    if (first + i < shape.length) scan.store(at(i), kVector, results);
  }
}

}  // namespace tilekern

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

// A tile of a block of columns, in the order of tickets.
struct ColumnTile {
  uint32 block;
  uint32 outer;
  uint32 tile;

  ColumnTile(uint32 ticket, const ColumnScanShape& shape)
      : block(ticket % shape.blocks),
        outer(ticket / shape.blocks % shape.outer),
        tile(ticket / shape.blocks / shape.outer) {}
};

// A thread's elements of a tile.
struct ColumnPart {
  int64 at;
  // Elements along each sequence, and whether the first of them has none before it.
  int count;
  bool is_first;
};

// A thread has kSteps elements of kVector adjacent sequences. kLanes threads are side by side on
// the columns, and kRows of these come one after the other along the sequences. Without kLookBack a
// sequence is one tile.
//
// With kRepeats a CTA computes tile after tile. It loads the next one as soon as registers become
// free, when it stores the one before. Without it there is a CTA for each tile, so that no tile
// waits for a CTA that is at work on another one.
template <class Scan, int kLanes, int kRows, int kSteps, bool kLookBack, bool kRepeats,
          typename... Fields>
__global__ void __launch_bounds__(kLanes* kRows,
                                  sizeof(typename Scan::Value) * Scan::kVector <= 16 ? 2 : 1)
    scan_columns(uint64* slots, const __grid_constant__ ColumnScanShape shape,
                 const __grid_constant__ Fields... fields) {
  using Value = typename Scan::Value;
  constexpr int kVector = Scan::kVector, kColumns = kLanes * kVector;
  constexpr int kParts = kLookBack ? max_of(kRows, kColumnGroup) : kRows;
  __shared__ Value parts[kParts][kColumns], entries[kLookBack ? kColumns : 1];
  __shared__ uint32 next_ticket;
  const Scan scan{fields...};
  const uint32 lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  const uint32 tickets = shape.blocks * shape.outer * shape.tiles;
  const int64 step = Scan::kReverse ? -shape.columns : shape.columns;
  const auto column_of = [&](const ColumnTile& own) {
    return (static_cast<int64>(own.block) * kLanes + lane) * kVector;
  };
  const auto part_of = [&](uint32 ticket) {
    const ColumnTile own(ticket, shape);
    const uint32 first = (own.tile * kRows + row) * kSteps;
    const bool exists = ticket < tickets && column_of(own) < shape.columns && first < shape.length;
    const uint32 place = Scan::kReverse ? shape.length - 1 - first : first;
    return ColumnPart{
        (static_cast<int64>(own.outer) * shape.length + place) * shape.columns + column_of(own),
        exists ? min_of<int>(kSteps, shape.length - first) : 0, first == 0};
  };
  const auto load = [&](const ColumnPart& part, int i) {
    const Before before = {-step, i > 0 || !part.is_first};
    return i < part.count ? scan.load(part.at + i * step, kVector, before)
                          : typename Scan::Vector{};
  };

  uint32 ticket = kLookBack ? take_ticket(slots) : blockIdx.x;
  ColumnPart part = part_of(ticket);
  typename Scan::Vector loaded[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) loaded[i] = load(part, i);
  while (ticket < tickets) {
    const ColumnTile own(ticket, shape);
    const bool is_column = column_of(own) < shape.columns;
    const int64 sequence = own.outer * shape.columns + column_of(own);
    uint32 next = kRepeats ? ticket + gridDim.x : tickets;
    if (kRepeats && kLookBack && threadIdx.x == 0) next = request_ticket(slots);
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
    if (kRepeats && kLookBack && threadIdx.x == 0) next_ticket = next;
    __syncthreads();
    if (kRepeats && kLookBack) next = next_ticket;
    Prefix<Scan> prefixes[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      prefixes[j] = {{}, false};
      for (uint32 i = 0; i < row; ++i) prefixes[j].append(parts[i][lane * kVector + j]);
    }
    // Nobody reads the parts any more.
    if (kLookBack || kRepeats) __syncthreads();

    Prefix<Scan> entering[kVector];
    const bool exists = part.count > 0;
    if constexpr (kLookBack) {
      constexpr int kWords = ValueWords<Value>::kCount;
      const uint32 group = own.tile / kColumnGroup, before = own.tile % kColumnGroup;
      const int64 count = static_cast<int64>(shape.outer) * shape.columns;
      uint64* const aggregates = slots + 1;
      uint64* const groups = aggregates + count * shape.tiles * kWords;
      const bool publishes = exists && row == kRows - 1 && own.tile + 1 < shape.tiles;
      if (publishes) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          Prefix<Scan> aggregate = prefixes[j];
          aggregate.append(totals[j]);
          totals[j] = aggregate.value;
          publish(aggregates, own.tile * count + sequence + j, aggregate.value);
        }
      }
      // Where the thread has nothing of the last tile, it waits for others all the same.
      if (is_column) {
        for (uint32 i = row; i < before; i += kRows) {
          const int64 number = (group * kColumnGroup + i) * count + sequence;
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
          Prefix<Scan> next_group = entering[j];
          next_group.append(totals[j]);
          publish(groups, (group + 1) * count + sequence + j, next_group.value);
        }
      }
      // The next tile's parts may be written.
      if (kRepeats) __syncthreads();
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        entering[j] = {{}, false};
        if constexpr (Scan::kInitial) {
          if (exists) entering[j] = {scan.initial(sequence + j), true};
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (prefixes[j].is_some) entering[j].append(prefixes[j].value);
    }
    const ColumnPart later = part_of(next);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Value results[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        entering[j].append(Scan::value(loaded[i], j));
        results[j] = entering[j].value;
      }
      if constexpr (kRepeats) loaded[i] = load(later, i);
      if (i < part.count) scan.store(part.at + i * step, kVector, results);
    }
    ticket = next;
    part = later;
  }
}

}  // namespace tilekern

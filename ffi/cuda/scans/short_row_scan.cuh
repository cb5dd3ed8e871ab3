// Scans of short rows, of which a warp has several: along the innermost dimension, or along one
// with few columns after it.
#pragma once

#include "scans/look_back.cuh"

namespace tilekern {

inline constexpr int kShortRowThreads = 128;

// Run-time sizes; `ShortRowScan` in `plans/scans/short_row_scan.py` packs the same fields in the
// same order.
struct ShortRowShape {
  // Elements of all columns.
  uint32 length;
  uint32 rows;
  // Rows of a warp, and the whole vectors that these are.
  uint32 warp_rows;
  uint32 warp_vectors;
  // Bits of the elements that begin a sequence, where a vector begins with a row.
  uint32 starts;
};

// The rows of a warp are adjacent whole vectors, in which rows begin anywhere, and columns repeat.
// A lane has every 32nd vector in the order of the scan. A row has elements of at most kSpan
// vectors, or of 32.
template <class Scan, int kVectors, int kSpan, int kColumns, typename... Fields>
__global__ void __launch_bounds__(kShortRowThreads)
    scan_short_rows(const __grid_constant__ ShortRowShape shape,
                    const __grid_constant__ Fields... fields) {
  using Value = typename Scan::Value;
  constexpr int kVector = Scan::kVector;
  const Scan scan{fields...};
  const uint32 lane = threadIdx.x % 32, length = shape.length;
  const uint32 warp = blockIdx.x * (kShortRowThreads / 32) + threadIdx.x / 32;
  const uint32 first_row = warp * shape.warp_rows;
  const int64 begin = static_cast<int64>(first_row) * length;
  const int64 end = static_cast<int64>(shape.rows) * length;

  const auto at = [&](int i) {
    const uint32 number = 32 * i + lane;
    const uint32 place = Scan::kReverse ? shape.warp_vectors - 1 - number : number;
    return begin + static_cast<int64>(place) * kVector;
  };
  const auto count = [&](int i) {
    const int64 left = 32 * i + lane < shape.warp_vectors ? end - at(i) : 0;
    return static_cast<int>(max_of<int64>(0, min_of<int64>(kVector, left)));
  };
  // Elements of a vector's first row before it, and the elements that begin a row, as bits.
  uint32 offsets[kVectors], starts[kVectors];
  typename Scan::Vector loaded[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    offsets[i] = (32 * i + lane) * kVector % length;
    const uint32 first = offsets[i] == 0 ? 0 : length - offsets[i];
    starts[i] = first < kVector ? shape.starts << first : 0;
    const RowStarts place = {starts[i], Scan::kReverse ? kColumns : -kColumns};
    loaded[i] = scan.load(at(i), count(i), place);
  }

  const auto is_start = [&](int i, int j) { return (starts[i] >> j & 1) != 0; };
  // Element j of a vector in the order of the scan, combined with what precedes its row.
  const auto value = [&](int i, int j) {
    const Value own = Scan::value(loaded[i], Scan::kReverse ? kVector - 1 - j : j);
    if constexpr (Scan::kInitial) {
      if (is_start(i, j)) {
        const uint32 number = ((32 * i + lane) * kVector + j) / length;
        const uint32 row = first_row + (Scan::kReverse ? shape.warp_rows - 1 - number : number);
        const int column = Scan::kReverse ? kColumns - 1 - j % kColumns : j % kColumns;
        const int64 sequence = static_cast<int64>(min_of(row, shape.rows - 1)) * kColumns + column;
        return Scan::combine(scan.initial(sequence), own);
      }
    }
    return own;
  };
  const auto next = [&](const Value& before, int i, int j) {
    const Value own = value(i, j);
    return is_start(i, j) ? own : Scan::combine(before, own);
  };

  Value carried[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    // By column, the elements of the row of the vector's last ones, in the vector and before.
    Value running[kColumns];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Value& total = running[j % kColumns];
      total = j < kColumns ? value(i, j) : next(total, i, j);
    }
    const uint32 before = starts[i] != 0 ? 0 : (offsets[i] + kVector - 1) / kVector;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Value total = running[c];
#pragma unroll
      for (uint32 step = 1; step < kSpan; step *= 2) {
        const Value earlier = value_of_lane_before(total, step);
        if (step <= min_of(before, lane)) total = Scan::combine(earlier, total);
      }
      if (i > 0 && before > lane) total = Scan::combine(carried[c], total);
      running[c] = value_of_lane_before(total, 1);
      if (i > 0 && lane == 0) running[c] = carried[c];
      carried[c] = value_of_lane(total, 31);
    }
    Value results[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Value& last = running[j % kColumns];
      last = next(last, i, j);
      results[Scan::kReverse ? kVector - 1 - j : j] = last;
    }
    scan.store(at(i), count(i), results);
  }
}

}  // namespace tilekern

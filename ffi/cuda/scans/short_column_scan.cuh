// Scans of few elements along a dimension with adjacent columns after it: a thread has whole
// sequences.
#pragma once

#include "scans/look_back.cuh"

namespace tilekern {

inline constexpr int kShortColumnThreads = 128;

// kLength elements of kVector adjacent sequences to each of `threads`, of which `row_threads` are
// side by side.
template <class Scan, int kLength, typename... Fields>
__global__ void __launch_bounds__(kShortColumnThreads)
    scan_short_columns(uint32 threads, uint32 row_threads,
                       const __grid_constant__ Fields... fields) {
  constexpr int kVector = Scan::kVector;
  const Scan scan{fields...};
  const uint32 thread = blockIdx.x * kShortColumnThreads + threadIdx.x;
  if (thread >= threads) return;
  const int64 columns = static_cast<int64>(row_threads) * kVector;
  const int64 sequence = static_cast<int64>(thread) * kVector;
  const int64 step = Scan::kReverse ? -columns : columns;
  const int64 first = thread / row_threads * (columns * kLength) + thread % row_threads * kVector +
                      (Scan::kReverse ? columns * (kLength - 1) : 0);
  typename Scan::Vector loaded[kLength];
#pragma unroll
  for (int i = 0; i < kLength; ++i) {
    loaded[i] = scan.load(first + i * step, kVector, Before{-step, i > 0});
  }
  Prefix<Scan> running[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    running[j] = {{}, false};
    if constexpr (Scan::kInitial) running[j] = {scan.initial(sequence + j), true};
  }
#pragma unroll
  for (int i = 0; i < kLength; ++i) {
    typename Scan::Value results[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      running[j].append(Scan::value(loaded[i], j));
      results[j] = running[j].value;
    }
    scan.store(first + i * step, kVector, results);
  }
}

}  // namespace tilekern

// The k largest elements of long rows of which k is a small part. Warps find the largest element of
// each segment of a row. At least k elements reach the k-th largest of these, and hardly more where
// large elements lie anywhere in the row. They are candidates, which are in segments whose largest
// element is one, and are sorted. Where they are too many, `top_k_of_tiles` finds the elements.
#pragma once

#include "selection/top_k_of_tiles.cuh"

namespace tilekern {

inline constexpr int kTopKSegmentThreads = 256;
// Elements of a lane, and of a warp.
inline constexpr int kSegmentItems = 32;
inline constexpr uint32 kBlock = 32 * kSegmentItems;
// Threads of CTAs that have a row.
inline constexpr int kRowThreads = 512;

// `plan_segments` in `plans/selection/top_k_segments.py` packs the same fields in the same order.
struct TopKSegmentShape {
  uint32 rows;
  uint32 columns;
  // Blocks of a row, each of which a warp has.
  uint32 blocks;
  uint32 k;
};

// The elements of a warp.
struct Block {
  uint32 number;
  uint32 row;
  uint32 first;  // column

  explicit Block(const TopKSegmentShape& shape)
      : number(blockIdx.x * (kTopKSegmentThreads / 32) + threadIdx.x / 32),
        row(number / shape.blocks),
        first(number % shape.blocks * kBlock) {}

  // The columns of a lane are 32 apart.
  uint32 column(int i) const { return first + threadIdx.x % 32 + 32 * i; }
  template <typename T>
  OrderedBits<T> bits(const T* x, int i, const TopKSegmentShape& shape) const {
    const int64 start = static_cast<int64>(row) * shape.columns;
    return column(i) < shape.columns ? ordered_bits(x[start + column(i)]) : 0;
  }
};

// A segment is what kLanes lanes have of a block.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kTopKSegmentThreads)
    find_segment_maxima(const T* x, OrderedBits<T>* maxima,
                        const __grid_constant__ TopKSegmentShape shape) {
  launch_dependents();
  const Block own(shape);
  if (own.row >= shape.rows) return;
  OrderedBits<T> most = 0;
#pragma unroll
  for (int i = 0; i < kSegmentItems; ++i) most = max_of(most, own.bits(x, i, shape));
#pragma unroll
  for (uint32 step = kLanes / 2; step >= 1; step /= 2) {
    most = max_of(most, __shfl_xor_sync(~0u, most, step));
  }
  wait_for_prerequisites();
  const uint32 lane = threadIdx.x % 32;
  if (lane % kLanes == 0) maxima[own.number * (32 / kLanes) + lane / kLanes] = most;
}

// A CTA has the maxima of a row.
template <typename T, int kLanes, int kItems>
__global__ void __launch_bounds__(kRowThreads)
    find_segment_bounds(const OrderedBits<T>* maxima, OrderedBits<T>* bounds, uint32* counts,
                        const __grid_constant__ TopKSegmentShape shape) {
  using Bits = OrderedBits<T>;
  const uint32 row = blockIdx.x, segments = shape.blocks * (32 / kLanes);
  launch_dependents();
  wait_for_prerequisites();
  Bits own[kItems];
#pragma unroll
  for (uint32 i = 0; i < kItems; ++i) {
    const uint32 segment = threadIdx.x + i * kRowThreads;
    own[i] = segment < segments ? maxima[row * segments + segment] : 0;
  }
  const auto at = find_threshold<8 * sizeof(T), kRowThreads, false>(own, shape.k);
  if (threadIdx.x == 0) {
    bounds[row] = at.prefix << at.shift;
    counts[row] = 0;
  }
}

// Elements that reach the bound of their row, in any order.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kTopKSegmentThreads)
    gather_candidates(const T* x, const OrderedBits<T>* maxima, const OrderedBits<T>* bounds,
                      uint32* counts, OrderedBits<T>* candidates, uint32* columns,
                      const __grid_constant__ TopKSegmentShape shape) {
  using Bits = OrderedBits<T>;
  launch_dependents();
  wait_for_prerequisites();
  const Block own(shape);
  if (own.row >= shape.rows) return;
  const Bits bound = bounds[own.row];
  const uint32 lane = threadIdx.x % 32;
  const bool reaches = maxima[own.number * (32 / kLanes) + lane / kLanes] >= bound;
  // Those that are too many are not read.
  if (!__any_sync(~0u, reaches && counts[own.row] <= kMostFound)) return;
  Bits elements[kSegmentItems];
#pragma unroll
  for (int i = 0; i < kSegmentItems; ++i) elements[i] = reaches ? own.bits(x, i, shape) : 0;
  const auto is_candidate = [&](int i) {
    return reaches && elements[i] >= bound && own.column(i) < shape.columns;
  };
  uint32 count = 0;
#pragma unroll
  for (int i = 0; i < kSegmentItems; ++i) count += is_candidate(i);
  uint32 place = count;
#pragma unroll
  for (uint32 step = 1; step < 32; step *= 2) {
    const uint32 before = __shfl_up_sync(~0u, place, step);
    if (lane >= step) place += before;
  }
  uint32 first = 0;
  if (lane == 31) first = atomicAdd(&counts[own.row], place);
  place += __shfl_sync(~0u, first, 31) - count;
#pragma unroll
  for (int i = 0; i < kSegmentItems; ++i) {
    if (!is_candidate(i)) continue;
    if (place < kMostFound) {
      candidates[own.row * kMostFound + place] = elements[i];
      columns[own.row * kMostFound + place] = own.column(i);
    }
    ++place;
  }
}

// A CTA has the candidates of a row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    sort_candidates(const OrderedBits<T>* candidates, const uint32* columns, const uint32* counts,
                    T* values, int32* columns_found,
                    const __grid_constant__ TopKSegmentShape shape) {
  using Bits = OrderedBits<T>;
  __shared__ Bits bits[kMostFound];
  __shared__ uint32 columns_of_bits[kMostFound];
  const uint32 row = blockIdx.x, thread = threadIdx.x;
  launch_dependents();
  wait_for_prerequisites();
  const uint32 count = counts[row];
  if (count > kMostFound) return;
  for (uint32 i = thread; i < count; i += kRowThreads) {
    bits[i] = candidates[row * kMostFound + i];
    columns_of_bits[i] = columns[row * kMostFound + i];
  }
  const FoundElements<Bits, kMostFound> found{bits, columns_of_bits};
  sort_found<kRowThreads>(found, count);
  for (uint32 i = thread; i < shape.k; i += kRowThreads) {
    const int64 to = static_cast<int64>(row) * shape.k + i;
    values[to] = element_of<T>(bits[i]);
    columns_found[to] = static_cast<int32>(columns_of_bits[i]);
  }
}

}  // namespace tilekern

// The groups of a grouped GEMM: the rows of each, and the tiles that cover them.
#pragma once

#include "types.cuh"

namespace tilekern {

inline constexpr int kGroupBatchDims = 3;

// Run-time sizes; `pack_groups` in `plans/grouped_gemm/problem.py` packs the same fields in the
// same order. "Rows" are indices along the ragged dimension, which a kernel may contract.
struct GroupShape {
  // The strides of the bounds, in elements. Group g of a batch has rows bounds[g] to bounds[g + 1],
  // which are in order and at most `rows`.
  int64 bounds_strides[kGroupBatchDims];
  // Batch dimensions, outermost first; unused ones come first with size 1.
  int32 batch[kGroupBatchDims];
  int32 batches;
  int32 groups;
  int32 rows;

  // The rows before the first group and those after the last are spans that belong to no group.
  int spans_per_batch() const { return groups + 2; }
  int spans() const { return batches * spans_per_batch(); }
};

// A range of rows that belongs to one group, or to none.
struct Span {
  int batch;
  // Negative if the rows belong to no group.
  int group;
  int begin;
  int end;

  bool is_group() const { return group >= 0; }
  int rows() const { return end - begin; }
};

inline const int32* bounds_of_batch(const GroupShape& shape, const int32* bounds, int batch) {
#pragma unroll
  for (int dim = kGroupBatchDims - 1; dim >= 0; --dim) {
    bounds += batch % shape.batch[dim] * shape.bounds_strides[dim];
    batch /= shape.batch[dim];
  }
  return bounds;
}

inline Span group_span(const GroupShape& shape, const int32* bounds, int batch, int group) {
  const int32* of_batch = bounds_of_batch(shape, bounds, batch);
  return {batch, group, of_batch[group], of_batch[group + 1]};
}

// Returns the `index`-th span of a batch, whose bounds are at `of_batch`.
inline Span span_of_batch(const GroupShape& shape, const int32* of_batch, int batch, int index) {
  const int group = index - 1;
  const bool first = group < 0, last = group == shape.groups;
  return {batch, first || last ? -1 : group, first ? 0 : of_batch[group],
          last ? shape.rows : of_batch[group + 1]};
}

inline Span span_at(const GroupShape& shape, const int32* bounds, int index) {
  const int batch = index / shape.spans_per_batch();
  return span_of_batch(shape, bounds_of_batch(shape, bounds, batch), batch,
                       index % shape.spans_per_batch());
}

// Writes the number of tiles of `block_rows` rows in all spans before i to `first_tiles[i]`, for i
// from 0 to the number of spans: an exclusive scan. All threads of the CTA take part.
inline void number_tiles(const GroupShape& shape, const int32* bounds, int block_rows,
                         int32* first_tiles) {
  const int spans = shape.spans();
  for (int i = threadIdx.x; i < spans; i += blockDim.x) {
    first_tiles[i] = (span_at(shape, bounds, i).rows() + block_rows - 1) / block_rows;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int before = 0;
    for (int first = 0; first < spans; first += 32) {
      const int tiles = first + lane < spans ? first_tiles[first + lane] : 0;
      int sum = tiles;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int lower = __shfl_up_sync(0xffffffff, sum, distance);
        if (lane >= distance) sum += lower;
      }
      if (first + lane < spans) first_tiles[first + lane] = before + sum - tiles;
      before += __shfl_sync(0xffffffff, sum, 31);
    }
    if (lane == 0) first_tiles[spans] = before;
  }
  __syncthreads();
}

// Returns the span that contains a tile: the last one with first_tiles[span] <= tile, by binary
// search. `tile` is less than first_tiles[spans].
inline int span_of_tile(const int32* first_tiles, int spans, int tile) {
  int low = 0, high = spans;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tiles[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace tilekern

// The mainloop of a grouped GEMM: one CTA computes one tile of one group's product.
#pragma once

#include "gemm/sm80/matmul_block.cuh"
#include "grouped_gemm/groups.cuh"

namespace tilekern {

// Returns the first of a span's tile rows in the grid. A span has floor(end / block_rows) -
// floor(begin / block_rows) + 1 of them, as many as it needs or one more. So they are numbered
// without a sum over the preceding spans, and the grid does not depend on the sizes of the groups.
inline int first_tile_row(const Span& span, int index, int block_rows) {
  return span.begin / block_rows + index;
}

// Returns the span that may contain a tile row: the last one whose first tile row is not greater.
inline int span_of_tile_row(const GroupShape& groups, const int32* of_batch, int block_rows,
                            int tile_row) {
  int low = 0, high = groups.spans_per_batch();
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    const Span span = span_of_batch(groups, of_batch, 0, middle);
    if (first_tile_row(span, middle, block_rows) <= tile_row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Rows of `lhs` and `out` belong to groups. The grid has shape.tiles_m tile rows for each batch.
template <template <typename, typename, MatmulConfig> class EngineOf, MatmulConfig config,
          typename Lhs, typename Rhs, typename Out, class Epilogue>
inline void ragged_rows_tile(const Lhs* lhs, const Rhs* rhs, const int32* bounds, Out* out,
                             const MatmulShape& shape, const GroupShape& groups,
                             const Epilogue& epilogue) {
  const int tiles = shape.tiles_m * shape.tiles_n;
  const int batch = blockIdx.x / tiles;
  const int32* of_batch = bounds_of_batch(groups, bounds, batch);
  const int index =
      span_of_tile_row(groups, of_batch, config.block_m, blockIdx.x % tiles / shape.tiles_n);
  const Span span = span_of_batch(groups, of_batch, batch, index);
  const int first = first_tile_row(span, index, config.block_m) * shape.tiles_n;
  const int tiles_m = (span.rows() + config.block_m - 1) / config.block_m;
  const int tile_of_span = blockIdx.x % tiles - first;
  // The whole CTA exits before any barrier.
  if (tile_of_span >= tiles_m * shape.tiles_n) return;

  const TileCoordinates tile =
      rasterized_tile(tile_of_span, tiles_m, shape.tiles_n, shape.raster_height);
  const int product = batch * groups.groups + max_of(span.group, 0);
  const BatchOffsets offsets = batch_offsets(shape, product);
  // Rows of no group are empty sums, zeros.
  const int32 end_k = span.is_group() ? shape.k : 0;
  compute_tile<EngineOf, config>(
      lhs, rhs, out, shape, offsets,
      {span.begin + tile.m * config.block_m, tile.n * config.block_n, 0, span.end, shape.n, end_k},
      product, epilogue);
}

// The rows that belong to groups are contracted.
template <template <typename, typename, MatmulConfig> class EngineOf, MatmulConfig config,
          typename Lhs, typename Rhs, typename Out, class Epilogue>
inline void ragged_k_tile(const Lhs* lhs, const Rhs* rhs, const int32* bounds, Out* out,
                          const MatmulShape& shape, const GroupShape& groups,
                          const Epilogue& epilogue) {
  const int tiles = shape.tiles_m * shape.tiles_n;
  const int product = blockIdx.x / tiles;
  const Span span = group_span(groups, bounds, product / groups.groups, product % groups.groups);
  const TileCoordinates tile =
      rasterized_tile(blockIdx.x % tiles, shape.tiles_m, shape.tiles_n, shape.raster_height);
  compute_tile<EngineOf, config>(
      lhs, rhs, out, shape, batch_offsets(shape, product),
      {tile.m * config.block_m, tile.n * config.block_n, span.begin, shape.m, shape.n, span.end},
      product, epilogue);
}

template <template <typename, typename, MatmulConfig> class EngineOf, MatmulConfig config,
          bool kRaggedK, typename Lhs, typename Rhs, typename Out, class Epilogue>
inline void ragged_matmul_tile(const Lhs* lhs, const Rhs* rhs, const int32* bounds, Out* out,
                               const MatmulShape& shape, const GroupShape& groups,
                               const Epilogue& epilogue) {
  if constexpr (kRaggedK) {
    ragged_k_tile<EngineOf, config>(lhs, rhs, bounds, out, shape, groups, epilogue);
  } else {
    ragged_rows_tile<EngineOf, config>(lhs, rhs, bounds, out, shape, groups, epilogue);
  }
}

}  // namespace tilekern

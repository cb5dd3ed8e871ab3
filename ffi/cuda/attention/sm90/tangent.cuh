// The tangent of attention (sm_90a), given the logsumexp of the scores.
//
// With weights P and the tangents of products, dS = scale * (dQ K^T + Q dK^T), times the derivative
// of the score function, the tangent of the logsumexp is m = rowsum(P * dS), and that of the result
// is (P * dS) V + P dV - m O. P and P * dS are lhs of products from registers.
//
// `statistics` is as in query_tile.cuh.
#pragma once

#include "attention/sm90/query_tile.cuh"

namespace tilekern {

// Which operands have tangents.
struct Moving {
  bool query, key, value;

  constexpr bool scores() const { return query || key; }
};

template <AttentionConfig config, Moving moving>
struct TangentLayout {
  using Queries = SequenceTile<config.queries, config.features>;
  using Keys = SequenceTile<config.keys, config.features>;
  using Values = SequenceTile<config.keys, config.value_features>;
  static constexpr int kLoadedBytes = (1 + moving.query) * Queries::kBytes;
  // A stage has keys, their tangents, values and their tangents, as far as products read them.
  static constexpr int kMovedKeys = Keys::kBytes;
  static constexpr int kValues = kMovedKeys + moving.key * Keys::kBytes;
  static constexpr int kMovedValues = kValues + moving.scores() * Values::kBytes;
  static constexpr int kStageBytes = kMovedValues + moving.value * Values::kBytes;
};

template <typename T, AttentionConfig config, Moving moving, class Functions>
class AttentionTangent {
  using Layout = TangentLayout<config, moving>;
  using Queries = typename Layout::Queries;
  using Keys = typename Layout::Keys;
  using Values = typename Layout::Values;
  using Tile = QueryTile<T, config, Layout, Functions>;

 public:
  AttentionTangent(const AttentionShape& shape, const Functions& functions, const int32* counts,
                   const int32* lists, const float* statistics)
      : tile_(shape, functions, counts, lists, statistics) {}

  // Maps of what has no tangent are not read.
  void run(const TensorMap* const (&maps)[6], const T* out, T* out_dot, float* logsumexp_dot,
           int value_features) {
    const int batch = tile_.batch;
    tile_.run(
        [&](uint32 to, int first, uint32 barrier) {
          Queries::load(to, *maps[0], first, tile_.head, batch, barrier);
          if constexpr (moving.query) {
            Queries::load(to + Queries::kBytes, *maps[3], first, tile_.head, batch, barrier);
          }
        },
        [&](uint32 to, int first, int head, uint32 barrier) {
          Keys::load(to, *maps[1], first, head, batch, barrier);
          if constexpr (moving.key) {
            Keys::load(to + Layout::kMovedKeys, *maps[4], first, head, batch, barrier);
          }
          if constexpr (moving.scores()) {
            Values::load(to + Layout::kValues, *maps[2], first, head, batch, barrier);
          }
          if constexpr (moving.value) {
            Values::load(to + Layout::kMovedValues, *maps[5], first, head, batch, barrier);
          }
        },
        [&] {
          consume();
          store(out, out_dot, logsumexp_dot, value_features);
        });
  }

 private:
  void consume() {
#pragma unroll
    for (int i = 0; i < config.value_features / 2; ++i) sums_[i] = 0;
    const uint32 queries = tile_.loaded;
    const int row = 64 * tile_.consumer;
    RowLogarithm logarithms[2];
    tile_.read_rows(logarithms);
    tile_.for_each_tile([&](uint32 keys, int first_key, bool masked) {
      float scores[Tile::kCount], moved[Tile::kCount];
      uint32 weights[Tile::kCount / 8][4];
      warpgroup_fence_operand(scores);
      warpgroup_arrive();
      multiply_by_features<T, Queries, Keys, config.features>(scores, queries, row, keys);
      warpgroup_commit_batch();
      if constexpr (moving.scores()) {
        warpgroup_fence_operand(moved);
        if constexpr (moving.query) {
          multiply_by_features<T, Queries, Keys, config.features>(moved, queries + Queries::kBytes,
                                                                  row, keys);
        }
        if constexpr (moving.key) {
          multiply_by_features<T, Queries, Keys, config.features>(
              moved, queries, row, keys + Layout::kMovedKeys, moving.query);
        }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
      } else {
        warpgroup_wait<0>();
      }
      warpgroup_fence_operand(scores);
      BiasFragment<T, config, false> bias(keys, row);
      tile_.weigh(scores, weights, logarithms, first_key, masked, bias, Unused());
      warpgroup_fence_operand(sums_);
      if constexpr (moving.value) {
        warpgroup_arrive();
        multiply_by_positions<T, Values>(sums_, weights, keys + Layout::kMovedValues);
        warpgroup_commit_batch();
      }
      uint32 moved_weights[Tile::kCount / 8][4];
      if constexpr (moving.scores()) {
        warpgroup_wait<moving.value ? 1 : 0>();
        warpgroup_fence_operand(moved);
#pragma unroll
        for (int j = 0; j < Tile::kCount; ++j) {
          scores[j] *= moved[j] * tile_.shape.scale;
          totals_[j >> 1 & 1] += scores[j];
        }
        as_lhs<T>(moved_weights, scores);
        warpgroup_fence_operand(sums_);
        warpgroup_arrive();
        multiply_by_positions<T, Values>(sums_, moved_weights, keys + Layout::kValues);
        warpgroup_commit_batch();
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums_);
    });
  }

  void store(const T* out, T* out_dot, float* logsumexp_dot, int value_features) {
    const AttentionShape& shape = tile_.shape;
    const AccumulatorPlace& place = tile_.place;
    const int rows = shape.queries - tile_.first_query;
    const int64 row_elements = static_cast<int64>(shape.heads) * value_features;
    const int64 origin =
        (static_cast<int64>(tile_.batch) * shape.queries + tile_.first_query) * row_elements +
        tile_.head * value_features;
    logsumexp_dot += (static_cast<int64>(tile_.batch) * shape.heads + tile_.head) * shape.queries +
                     tile_.first_query;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      totals_[r] = reduced_over_row(totals_[r], [](float x, float y) { return x + y; });
      const int row = place.row + 8 * r;
      if (threadIdx.x % 4 == 0 && row < rows) logsumexp_dot[row] = totals_[r];
    }
    if constexpr (moving.scores()) {
#pragma unroll
      for (int i = 0; i < config.value_features / 2; ++i) {
        const int row = place.row_of(i), column = place.column_of(i);
        if (row < rows && column < value_features) {
          sums_[i] -= totals_[i >> 1 & 1] * to_float(out[origin + row * row_elements + column]);
        }
      }
    }
    store_rows(out_dot + origin, row_elements, rows, value_features, sums_, {1, 1});
  }

  Tile tile_;
  float sums_[config.value_features / 2];
  float totals_[2] = {0, 0};
};

template <typename T, AttentionConfig config, Moving moving, class Functions, typename... Operands>
__global__ void __launch_bounds__(config.threads(config.queries), 1) attention_tangent(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
    const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap d_query,
    const __grid_constant__ TensorMap d_key, const __grid_constant__ TensorMap d_value,
    const T* out, const float* statistics, T* out_dot, float* logsumexp_dot, const int32* counts,
    const int32* lists, int value_features, const __grid_constant__ AttentionShape shape,
    const __grid_constant__ Operands... operands) {
  Functions functions{operands...};
  functions.stage();
  AttentionTangent<T, config, moving, Functions>(shape, functions, counts, lists, statistics)
      .run({&query, &key, &value, &d_query, &d_key, &d_value}, out, out_dot, logsumexp_dot,
           value_features);
}

}  // namespace tilekern

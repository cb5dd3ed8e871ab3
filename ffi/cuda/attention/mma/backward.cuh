// The gradient of attention by `mma.sync`, in two kernels with fixed bits, as
// attention/sm90/backward.cuh has them and reads statistics: one has a tile of keys for each CTA
// and runs over queries, the other a tile of queries and runs over keys.
#pragma once

#include "attention/mma/tiles.cuh"
#include "attention/weights.cuh"

namespace tilekern {

// What a CTA of either kernel has: two tiles of its own rows, and two of others for each step.
// Lhs are its rows, of the scores and of their gradients.
template <typename T, AttentionConfig config, class Functions, bool kOfKeys>
class MmaAttentionBackward {
  static constexpr int kRows = kOfKeys ? config.keys : config.queries;
  static constexpr int kOthers = kOfKeys ? config.queries : config.keys;
  static constexpr int kCount = kOthers / 2;
  using Rows = RowTile<T, kRows, config.features>;
  using WideRows = RowTile<T, kRows, config.value_features>;
  using Others = RowTile<T, kOthers, config.features>;
  using WideOthers = RowTile<T, kOthers, config.value_features>;
  static_assert(kRows == 64);

 public:
  MmaAttentionBackward(const AttentionShape& shape, const Functions& functions, const int32* counts,
                       const int32* lists, const float* statistics, int64 deltas, int features,
                       int value_features)
      : shape_(shape),
        functions_(functions),
        counts_(counts),
        lists_(lists),
        statistics_(statistics),
        deltas_(deltas),
        features_(features),
        value_features_(value_features),
        tile_(kOfKeys ? blockIdx.x : shape.tiles - 1 - blockIdx.x),
        head_(blockIdx.y),
        batch_(blockIdx.z) {
    rows_ = shared_address(attention_shared);
    wide_rows_ = rows_ + Rows::kBytes;
    others_ = wide_rows_ + WideRows::kBytes;
    wide_others_ = others_ + Others::kBytes;
  }

  // The gradients of keys and values, of one head of keys.
  void run_keys(const T* query, const T* key, const T* value, const T* d_out, T* d_key,
                T* d_value) {
    float d_keys[1][config.features / 2] = {}, d_values[1][config.value_features / 2] = {};
    const int first_key = tile_ * config.keys, heads = shape_.heads / shape_.group;
    load<Rows>(rows_, key, heads, head_, shape_.keys, first_key, features_);
    load<WideRows>(wide_rows_, value, heads, head_, shape_.keys, first_key, value_features_);
    for (int head = head_ * shape_.group; head < (head_ + 1) * shape_.group; ++head) {
      for_each_tile(head, shape_.queries, shape_.keys, [&](int first_query, bool masked) {
        load<Others>(others_, query, shape_.heads, head, shape_.queries, first_query, features_);
        load<WideOthers>(wide_others_, d_out, shape_.heads, head, shape_.queries, first_query,
                         value_features_);
        arrive();
        float scores[1][kCount] = {}, d_weights[1][kCount] = {}, weights[1][kCount];
        multiply_by_features<T, false, Rows, Others>(scores, rows_, others_);
        NoBias bias;
        weigh_again<T>(
            scores[0], weights[0], shape_, functions_, batch_, head, masked,
            ScorePlaces<false>(first_query, first_key), bias,
            [&](int j) { return logarithm(head, first_query + place_.column_of(j)); }, Unused());
        multiply_by_positions<T, false, WideOthers>(d_values, weights, wide_others_);
        multiply_by_features<T, false, WideRows, WideOthers>(d_weights, wide_rows_, wide_others_);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          scores[0][j] *= d_weights[0][j] - delta(head, first_query + place_.column_of(j));
        }
        multiply_by_positions<T, false, Others>(d_keys, scores, others_);
      });
    }
    store(d_key, d_keys[0], heads, shape_.keys, first_key, features_, shape_.scale);
    store(d_value, d_values[0], heads, shape_.keys, first_key, value_features_, 1);
    cp_async_wait<0>();
  }

  void run_queries(const T* query, const T* key, const T* value, const T* d_out, T* d_query) {
    float d_queries[1][config.features / 2] = {};
    const int first_query = tile_ * config.queries, key_heads = shape_.heads / shape_.group;
    load<Rows>(rows_, query, shape_.heads, head_, shape_.queries, first_query, features_);
    load<WideRows>(wide_rows_, d_out, shape_.heads, head_, shape_.queries, first_query,
                   value_features_);
    RowLogarithm logarithms[2];
    float deltas[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      logarithms[r] = logarithm(head_, first_query + place_.row + 8 * r);
      deltas[r] = delta(head_, first_query + place_.row + 8 * r);
    }
    for_each_tile(head_, shape_.keys, shape_.queries, [&](int first_key, bool masked) {
      const int head = head_ / shape_.group;
      load<Others>(others_, key, key_heads, head, shape_.keys, first_key, features_);
      load<WideOthers>(wide_others_, value, key_heads, head, shape_.keys, first_key,
                       value_features_);
      arrive();
      float scores[1][kCount] = {}, d_weights[1][kCount] = {}, unused[kCount];
      multiply_by_features<T, false, Rows, Others>(scores, rows_, others_);
      multiply_by_features<T, false, WideRows, WideOthers>(d_weights, wide_rows_, wide_others_);
      NoBias bias;
      weigh_again<T>(
          scores[0], unused, shape_, functions_, batch_, head_, masked,
          ScorePlaces<true>(first_query, first_key), bias,
          [&](int j) { return logarithms[j >> 1 & 1]; }, Unused());
#pragma unroll
      for (int j = 0; j < kCount; ++j) scores[0][j] *= d_weights[0][j] - deltas[j >> 1 & 1];
      multiply_by_positions<T, false, Others>(d_queries, scores, others_);
    });
    store(d_query, d_queries[0], shape_.heads, shape_.queries, first_query, features_,
          shape_.scale);
    cp_async_wait<0>();
  }

 private:
  // Calls f with the first row of each tile of others, of which all threads have read the last.
  template <class F>
  void for_each_tile(int head, int others, int rows, const F& f) const {
    const TileList<config.listed> list(counts_, lists_, shape_, batch_, head, tile_,
                                       (others + kOthers - 1) / kOthers);
#pragma unroll 1
    for (int i = 0; i < list.count(); ++i) {
      const Tile tile = list.tile(i);
      const int first = tile.number * kOthers;
      const bool at_end =
          first + kOthers > others || (Functions::kReads && (tile_ + 1) * kRows > rows);
      __syncthreads();
      f(first, tile.masked || at_end);
    }
  }

  template <class Tile>
  void load(uint32 to, const T* from, int heads, int head, int length, int first, int width) const {
    const int64 row = static_cast<int64>(batch_) * length + first;
    Tile::load(to, from + (row * heads + head) * width, static_cast<int64>(heads) * width,
               length - first, width);
    cp_async_commit();
  }

  static void arrive() {
    cp_async_wait<0>();
    __syncthreads();
  }

  // The place of a query, within padded rows, among those of all heads.
  int64 row_of(int head, int query) const {
    return (static_cast<int64>(batch_) * shape_.heads + head) * ((shape_.queries + 63) / 64 * 64) +
           query;
  }
  RowLogarithm logarithm(int head, int query) const {
    const float* own = statistics_ + (1 + config.based) * row_of(head, query);
    if constexpr (config.based) return {own[0], own[1]};
    return {0, own[0]};
  }
  float delta(int head, int query) const { return statistics_[deltas_ + row_of(head, query)]; }

  template <int kSums>
  void store(T* to, const float (&sums)[kSums], int heads, int length, int first, int width,
             float factor) const {
    const int64 row = static_cast<int64>(batch_) * length + first;
    store_rows(to + (row * heads + head_) * width, static_cast<int64>(heads) * width,
               length - first, width, sums, {factor, factor});
  }

  const AttentionShape& shape_;
  const Functions& functions_;
  const int32 *counts_, *lists_;
  const float* statistics_;
  int64 deltas_;
  int features_, value_features_;
  int tile_, head_, batch_;
  uint32 rows_, wide_rows_, others_, wide_others_;
  AccumulatorPlace place_;
};

template <typename T, AttentionConfig config, class Functions, typename... Operands>
__global__ void __launch_bounds__(kMmaThreads, 2)
    mma_attention_backward_keys(const T* query, const T* key, const T* value, const T* d_out,
                                const float* statistics, T* d_key, T* d_value, const int32* counts,
                                const int32* lists, int64 deltas, int features, int value_features,
                                const __grid_constant__ AttentionShape shape,
                                const __grid_constant__ Operands... operands) {
  Functions functions{operands...};
  functions.stage();
  MmaAttentionBackward<T, config, Functions, true>(shape, functions, counts, lists, statistics,
                                                   deltas, features, value_features)
      .run_keys(query, key, value, d_out, d_key, d_value);
}

template <typename T, AttentionConfig config, class Functions, typename... Operands>
__global__ void __launch_bounds__(kMmaThreads, 2)
    mma_attention_backward_queries(const T* query, const T* key, const T* value, const T* d_out,
                                   const float* statistics, T* d_query, const int32* counts,
                                   const int32* lists, int64 deltas, int features,
                                   int value_features, const __grid_constant__ AttentionShape shape,
                                   const __grid_constant__ Operands... operands) {
  Functions functions{operands...};
  functions.stage();
  MmaAttentionBackward<T, config, Functions, false>(shape, functions, counts, lists, statistics,
                                                    deltas, features, value_features)
      .run_queries(query, key, value, d_out, d_query);
}

}  // namespace tilekern

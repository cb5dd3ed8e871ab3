// Attention of queries to keys by `mma.sync`, as FlashAttention-2 computes it (arXiv:2307.08691):
// the scores never leave registers, and are lhs of the product with the values.
//
// While the tensor cores multiply queries by a tile of keys its values are copied to shared memory,
// and the next keys while they multiply the weights by the values.
#pragma once

#include "attention/mma/tiles.cuh"
#include "attention/softmax.cuh"

namespace tilekern {

template <typename T, bool kSplit, AttentionConfig config, class Functions>
class MmaAttentionForward {
  using Queries = RowTile<T, config.queries, config.features>;
  using Keys = RowTile<T, config.keys, config.features>;
  using Values = RowTile<T, config.keys, config.value_features>;
  using Work = QueryWork<config.listed>;
  static constexpr int kBlocks = config.queries / 64;

 public:
  // Under a causal mask the last tiles take longest.
  MmaAttentionForward(const AttentionShape& shape, const Functions& functions, const int32* counts,
                      const int32* lists)
      : shape_(shape),
        functions_(functions),
        tile_(shape.tiles - 1 - blockIdx.x),
        work_{tile_ * config.queries, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z),
              TileList<config.listed>(counts, lists, shape, blockIdx.z, blockIdx.y, tile_,
                                      (shape.keys + config.keys - 1) / config.keys)} {}

  void run(const T* query, const T* key, const T* value, T* out, float* logsumexp, float* bases,
           int features, int value_features) {
    float sums[kBlocks][config.value_features / 2] = {};
    RowSoftmax<config, Functions> softmax[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) softmax[b].reset();
    const uint32 queries = shared_address(attention_shared), keys = queries + Queries::kBytes;
    const uint32 values = keys + Keys::kBytes;
    const int64 first = static_cast<int64>(work_.batch) * shape_.queries + work_.first_query;
    const int key_heads = shape_.heads / shape_.group;
    const auto load = [&](auto tile, uint32 to, const T* from, int number, int width) {
      const int first_key = number * config.keys;
      const int64 row = static_cast<int64>(work_.batch) * shape_.keys + first_key;
      decltype(tile)::load(to, from + (row * key_heads + work_.head / shape_.group) * width,
                           static_cast<int64>(key_heads) * width, shape_.keys - first_key, width);
      cp_async_commit();
    };
    const int count = work_.list.count();
    if (count > 0) {
      Queries::load(queries, query + (first * shape_.heads + work_.head) * features,
                    static_cast<int64>(shape_.heads) * features, shape_.queries - work_.first_query,
                    features);
      load(Keys(), keys, key, work_.list.tile(0).number, features);
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Tile tile = work_.list.tile(i);
      float scores[kBlocks][config.keys / 2] = {};
      arrive();
      load(Values(), values, value, tile.number, value_features);
      multiply_by_features<T, kSplit, Queries, Keys>(scores, queries, keys);
      arrive();
      if (i + 1 < count) load(Keys(), keys, key, work_.list.tile(i + 1).number, features);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) weigh(scores[b], sums[b], softmax[b], 64 * b, tile);
      multiply_by_positions<T, kSplit, Values>(sums, scores, values);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      softmax[b].store(sums[b], shape_, work_, work_.first_query + 64 * b, out, logsumexp, bases,
                       value_features);
    }
  }

 private:
  // Waits for the copies of all threads, and until all have read what is copied to next.
  static void arrive() {
    cp_async_wait<0>();
    __syncthreads();
  }

  // Turns products into weights, and brings earlier sums to their maxima.
  template <int kCount, int kSums>
  void weigh(float (&scores)[kCount], float (&sums)[kSums], RowSoftmax<config, Functions>& softmax,
             int row, Tile tile) const {
    const int first_query = work_.first_query + row;
    NoBias bias;
    softmax.score(scores, shape_, functions_, work_, first_query, tile.number * config.keys, bias);
    float factors[2];
    softmax.weigh(scores, factors, shape_, functions_, work_, first_query, tile);
    if constexpr (!Functions::kIsUpToOne) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) sums[j] *= factors[j >> 1 & 1];
    }
  }

  const AttentionShape& shape_;
  const Functions& functions_;
  int tile_;
  Work work_;
};

template <typename T, bool kSplit, AttentionConfig config, class Functions, typename... Operands>
__global__ void __launch_bounds__(kMmaThreads, 2)
    mma_attention_forward(const T* query, const T* key, const T* value, T* out, float* logsumexp,
                          float* bases, const int32* counts, const int32* lists, int features,
                          int value_features, const __grid_constant__ AttentionShape shape,
                          const __grid_constant__ Operands... operands) {
  Functions functions{operands...};
  functions.stage();
  MmaAttentionForward<T, kSplit, config, Functions>(shape, functions, counts, lists)
      .run(query, key, value, out, logsumexp, bases, features, value_features);
}

}  // namespace tilekern

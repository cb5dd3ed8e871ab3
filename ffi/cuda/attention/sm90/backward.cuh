// The gradient of attention (sm_90a), in two kernels with fixed bits: one has a tile of keys for
// each CTA and runs over queries, the other a tile of queries and runs over keys. Both compute
// weights again from the logsumexp of the scores.
//
// With weights P, their gradient dP = dO V^T and d = rowsum(dO * O), the gradient of scores is
// dS = P * (dP - d), times the derivative of the score function. Then dV = P^T dO, dK = dS^T Q and
// dQ = dS K. Accumulators of P and dS are lhs of these products.
//
// `Functions` has besides those of the forward kernel
//
//   derivative(s, b, h, q, k, score, slope)    the score and its derivative with respect to s
//
// `statistics` has, for each head and row up to a whole number of tiles, the logsumexp in base 2
// (infinity for rows that see no key or are none), and behind all of them d.
#pragma once

#include "attention/sm90/forward.cuh"

namespace tilekern {

template <bool kValue>
struct BoolConstant {
  static constexpr bool value = kValue;
};

// Scores in, P times the slope out; P goes to `weights` as lhs. `logsumexp(j)` is that of
// accumulator j, and query(j) and key(j) its place.
template <typename T, bool kMasked, class Functions, int kCount, class Query, class Key,
          class Logsumexp>
inline void weigh_again(float (&scores)[kCount], uint32 (&weights)[kCount / 8][4],
                        const AttentionShape& shape, const Functions& functions, int batch,
                        int head, const Query& query, const Key& key, const Logsumexp& logsumexp) {
#pragma unroll
  for (int j = 0; j < kCount; j += 2) {
    float both[2];
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const int q = query(j + of), k = key(j + of);
      float score = scores[j + of] * shape.scale, slope = 1;
      if constexpr (Functions::kScore) {
        functions.derivative(score, batch, head, readable<Functions>(q, shape.queries),
                             readable<Functions>(k, shape.keys), score, slope);
      }
      float weight = exp2_approximate(score * kLog2E - logsumexp(j + of));
      if constexpr (kMasked) {
        bool visible = q < shape.queries && k < shape.keys;
        if constexpr (Functions::kMask) {
          visible = visible && functions.visible(batch, head, q, k);
        }
        weight = visible ? weight : 0;
        slope = visible ? slope : 0;
      }
      both[of] = weight;
      scores[j + of] = weight * slope;
    }
    uint32 pair[1];
    pack_pair(pair, static_cast<T*>(nullptr), both[0], both[1]);
    weights[j / 8][j / 2 % 4] = pair[0];
  }
}

template <typename T, AttentionConfig config, class Functions>
class AttentionBackwardKeys {
  using Queries = SequenceTile<config.queries, config.features>;
  using Outs = SequenceTile<config.queries, config.value_features>;
  using Keys = SequenceTile<config.keys, config.features>;
  using Values = SequenceTile<config.keys, config.value_features>;
  static constexpr int kStatisticsBytes = config.queries * static_cast<int>(sizeof(float));
  static constexpr int kLoadedBytes = Queries::kBytes + Outs::kBytes + 2 * kStatisticsBytes;
  // Tiles begin at multiples of 1024 bytes.
  static constexpr int kStageBytes = (kLoadedBytes + 1023) / 1024 * 1024;
  using Ring = TileRing<config.stages, kStageBytes>;
  static constexpr int kConsumers = config.keys / 64;
  static constexpr int kCount = config.queries / 2;

 public:
  AttentionBackwardKeys(const AttentionShape& shape, const Functions& functions,
                        const int32* counts, const int32* lists, const float* statistics,
                        int64 deltas)
      : shape_(shape),
        functions_(functions),
        counts_(counts),
        lists_(lists),
        statistics_(statistics),
        deltas_(deltas),
        tile_(blockIdx.x),
        head_(blockIdx.y),
        batch_(blockIdx.z) {
    keys_ = shared_address(attention_shared);
    values_ = keys_ + Keys::kBytes;
    ring_.stages = values_ + Values::kBytes;
    ring_.barriers = ring_.stages + config.stages * kStageBytes;
    loaded_ = ring_.barriers + Ring::kBarriersBytes;
  }

  void run(const TensorMap& query, const TensorMap& key, const TensorMap& value,
           const TensorMap& d_out, T* d_key, T* d_value, int features, int value_features) {
    if (threadIdx.x == 0) {
      ring_.init(kConsumers);
      mbarrier_init(loaded_, 1);
      fence_barrier_init();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == kConsumers) {
      warpgroup_reg_dealloc<24>();
      if (threadIdx.x % 128 == 0) produce(query, key, value, d_out);
    } else {
      warpgroup_reg_alloc<240>();
      consume(warpgroup);
      const int first = tile_ * config.keys + 64 * warpgroup;
      const int64 row = static_cast<int64>(batch_) * shape_.keys + first;
      const int heads = shape_.heads / shape_.group, rows = shape_.keys - first;
      store_rows(d_key + (row * heads + head_) * features, static_cast<int64>(heads) * features,
                 rows, features, d_keys_, {shape_.scale, shape_.scale});
      store_rows(d_value + (row * heads + head_) * value_features,
                 static_cast<int64>(heads) * value_features, rows, value_features, d_values_,
                 {1, 1});
    }
  }

 private:
  // Calls f with the head and the number of each tile of queries, and whether it is masked.
  template <class F>
  void for_each_tile(const F& f) const {
    for (int head = head_ * shape_.group; head < (head_ + 1) * shape_.group; ++head) {
      const TileList<config.listed> list(counts_, lists_, shape_, batch_, head, tile_,
                                         (shape_.queries + config.queries - 1) / config.queries);
      for (int i = 0; i < list.count(); ++i) {
        const Tile tile = list.tile(i);
        const int first = tile.number * config.queries;
        f(head, first, tile.masked || first + config.queries > shape_.queries);
      }
    }
  }

  void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value,
               const TensorMap& d_out) const {
    mbarrier_arrive_expect_tx(loaded_, Keys::kBytes + Values::kBytes);
    Keys::load(keys_, key, tile_ * config.keys, head_, batch_, loaded_);
    Values::load(values_, value, tile_ * config.keys, head_, batch_, loaded_);
    typename Ring::State state;
    const int padded = (shape_.queries + config.queries - 1) / config.queries * config.queries;
    for_each_tile([&](int head, int first, bool) {
      const uint32 stage = ring_.stage(state), full = ring_.full(state);
      ring_.acquire(state, kLoadedBytes);
      Queries::load(stage, query, first, head, batch_, full);
      Outs::load(stage + Queries::kBytes, d_out, first, head, batch_, full);
      const float* row =
          statistics_ + (static_cast<int64>(batch_) * shape_.heads + head) * padded + first;
      bulk_load(stage + Queries::kBytes + Outs::kBytes, row, kStatisticsBytes, full);
      bulk_load(stage + Queries::kBytes + Outs::kBytes + kStatisticsBytes, row + deltas_,
                kStatisticsBytes, full);
      state.advance();
    });
  }

  void consume(int consumer) {
#pragma unroll
    for (int i = 0; i < config.features / 2; ++i) d_keys_[i] = 0;
#pragma unroll
    for (int i = 0; i < config.value_features / 2; ++i) d_values_[i] = 0;
    mbarrier_wait(loaded_, 0);
    typename Ring::State state;
    const int first_key = tile_ * config.keys + 64 * consumer;
    for_each_tile([&](int head, int first_query, bool masked) {
      float scores[kCount], d_weights[kCount];
      uint32 weights[kCount / 8][4], d_scores[kCount / 8][4];
      const uint32 queries = ring_.stage(state), outs = queries + Queries::kBytes;
      const uint32 statistics = outs + Outs::kBytes;
      ring_.wait(state);
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(d_weights);
      warpgroup_arrive();
      multiply_by_features<T, Keys, Queries, config.features>(scores, keys_, 64 * consumer,
                                                              queries);
      warpgroup_commit_batch();
      multiply_by_features<T, Values, Outs, config.value_features>(d_weights, values_,
                                                                   64 * consumer, outs);
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      float statistic[2];
      const auto weigh = [&](auto is_masked) {
        weigh_again<T, decltype(is_masked)::value>(
            scores, weights, shape_, functions_, batch_, head,
            [&](int j) { return first_query + place_.column_of(j); },
            [&](int j) { return first_key + place_.row_of(j); },
            [&](int j) {
              if (j % 2 == 0) load_shared(statistic, statistics + 4 * place_.column_of(j));
              return statistic[j % 2];
            });
      };
      if (masked) {
        weigh(BoolConstant<true>());
      } else {
        weigh(BoolConstant<false>());
      }
      warpgroup_fence_operand(d_values_);
      warpgroup_arrive();
      multiply_by_positions<T, Outs>(d_values_, weights, outs);
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      warpgroup_fence_operand(d_weights);
#pragma unroll
      for (int j = 0; j < kCount; j += 2) {
        load_shared(statistic, statistics + kStatisticsBytes + 4 * place_.column_of(j));
        scores[j] *= d_weights[j] - statistic[0];
        scores[j + 1] *= d_weights[j + 1] - statistic[1];
      }
      as_lhs<T>(d_scores, scores);
      warpgroup_fence_operand(d_keys_);
      warpgroup_arrive();
      multiply_by_positions<T, Queries>(d_keys_, d_scores, queries);
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(d_keys_);
      warpgroup_fence_operand(d_values_);
      // All of the consumer's threads have read the statistics.
      sync_consumer(1 + consumer);
      ring_.release(state);
      state.advance();
    });
  }

  const AttentionShape& shape_;
  const Functions& functions_;
  const int32 *counts_, *lists_;
  const float* statistics_;
  int64 deltas_;
  int tile_, head_, batch_;
  uint32 keys_, values_, loaded_;
  Ring ring_;
  AccumulatorPlace place_;
  float d_keys_[config.features / 2], d_values_[config.value_features / 2];
};

template <typename T, AttentionConfig config, class Functions>
class AttentionBackwardQueries {
  using Queries = SequenceTile<config.queries, config.features>;
  using Outs = SequenceTile<config.queries, config.value_features>;
  using Keys = SequenceTile<config.keys, config.features>;
  using Values = SequenceTile<config.keys, config.value_features>;
  static constexpr int kStageBytes = Keys::kBytes + Values::kBytes;
  using Ring = TileRing<config.stages, kStageBytes>;
  static constexpr int kConsumers = config.queries / 64;
  static constexpr int kCount = config.keys / 2;

 public:
  AttentionBackwardQueries(const AttentionShape& shape, const Functions& functions,
                           const int32* counts, const int32* lists, const float* statistics,
                           int64 deltas)
      : shape_(shape),
        functions_(functions),
        statistics_(statistics),
        deltas_(deltas),
        // Under a causal mask the last tiles take longest.
        tile_(shape.tiles - 1 - blockIdx.x),
        head_(blockIdx.y),
        batch_(blockIdx.z),
        list_(counts, lists, shape, batch_, head_, tile_,
              (shape.keys + config.keys - 1) / config.keys) {
    queries_ = shared_address(attention_shared);
    outs_ = queries_ + Queries::kBytes;
    ring_.stages = outs_ + Outs::kBytes;
    ring_.barriers = ring_.stages + config.stages * kStageBytes;
    loaded_ = ring_.barriers + Ring::kBarriersBytes;
  }

  void run(const TensorMap& query, const TensorMap& key, const TensorMap& value,
           const TensorMap& d_out, T* d_query, int features) {
    if (threadIdx.x == 0) {
      ring_.init(kConsumers);
      mbarrier_init(loaded_, 1);
      fence_barrier_init();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == kConsumers) {
      warpgroup_reg_dealloc<24>();
      if (threadIdx.x % 128 == 0) produce(query, key, value, d_out);
    } else {
      warpgroup_reg_alloc<240>();
      consume(warpgroup);
      const int first = tile_ * config.queries + 64 * warpgroup;
      const int64 row = static_cast<int64>(batch_) * shape_.queries + first;
      store_rows(d_query + (row * shape_.heads + head_) * features,
                 static_cast<int64>(shape_.heads) * features, shape_.queries - first, features,
                 d_queries_, {shape_.scale, shape_.scale});
    }
  }

 private:
  void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value,
               const TensorMap& d_out) const {
    // A copy that no thread waits for could end after the CTA.
    if (list_.count() == 0) return;
    mbarrier_arrive_expect_tx(loaded_, Queries::kBytes + Outs::kBytes);
    Queries::load(queries_, query, tile_ * config.queries, head_, batch_, loaded_);
    Outs::load(outs_, d_out, tile_ * config.queries, head_, batch_, loaded_);
    typename Ring::State state;
    for (int i = 0; i < list_.count(); ++i, state.advance()) {
      const int first = list_.tile(i).number * config.keys, head = head_ / shape_.group;
      ring_.acquire(state, kStageBytes);
      Keys::load(ring_.stage(state), key, first, head, batch_, ring_.full(state));
      Values::load(ring_.stage(state) + Keys::kBytes, value, first, head, batch_,
                   ring_.full(state));
    }
  }

  void consume(int consumer) {
#pragma unroll
    for (int i = 0; i < config.features / 2; ++i) d_queries_[i] = 0;
    if (list_.count() == 0) return;
    const int first_query = tile_ * config.queries + 64 * consumer;
    const int padded = (shape_.queries + 63) / 64 * 64;
    float logsumexp[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + place_.row + 8 * r;
      const int64 row = (static_cast<int64>(batch_) * shape_.heads + head_) * padded + query;
      const bool inside = query < padded;
      logsumexp[r] = inside ? statistics_[row] : INFINITY;
      delta[r] = inside ? statistics_[row + deltas_] : 0;
    }
    mbarrier_wait(loaded_, 0);
    typename Ring::State state;
    for (int i = 0; i < list_.count(); ++i, state.advance()) {
      float scores[kCount], d_weights[kCount];
      uint32 d_scores[kCount / 8][4];
      const Tile tile = list_.tile(i);
      const int first_key = tile.number * config.keys;
      const uint32 keys = ring_.stage(state), values = keys + Keys::kBytes;
      ring_.wait(state);
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(d_weights);
      warpgroup_arrive();
      multiply_by_features<T, Queries, Keys, config.features>(scores, queries_, 64 * consumer,
                                                              keys);
      warpgroup_commit_batch();
      multiply_by_features<T, Outs, Values, config.value_features>(d_weights, outs_, 64 * consumer,
                                                                   values);
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      uint32 unused[kCount / 8][4];
      const auto weigh = [&](auto is_masked) {
        weigh_again<T, decltype(is_masked)::value>(
            scores, unused, shape_, functions_, batch_, head_,
            [&](int j) { return first_query + place_.row_of(j); },
            [&](int j) { return first_key + place_.column_of(j); },
            [&](int j) { return logsumexp[j >> 1 & 1]; });
      };
      if (tile.masked || first_key + config.keys > shape_.keys) {
        weigh(BoolConstant<true>());
      } else {
        weigh(BoolConstant<false>());
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(d_weights);
#pragma unroll
      for (int j = 0; j < kCount; ++j) scores[j] *= d_weights[j] - delta[j >> 1 & 1];
      as_lhs<T>(d_scores, scores);
      warpgroup_fence_operand(d_queries_);
      warpgroup_arrive();
      multiply_by_positions<T, Keys>(d_queries_, d_scores, keys);
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(d_queries_);
      ring_.release(state);
    }
  }

  const AttentionShape& shape_;
  const Functions& functions_;
  const float* statistics_;
  int64 deltas_;
  int tile_, head_, batch_;
  TileList<config.listed> list_;
  uint32 queries_, outs_, loaded_;
  Ring ring_;
  AccumulatorPlace place_;
  float d_queries_[config.features / 2];
};

template <typename T, AttentionConfig config, class Functions, typename... Operands>
__global__ void __launch_bounds__(config.threads(config.keys), 1)
    attention_backward_keys(const __grid_constant__ TensorMap query,
                            const __grid_constant__ TensorMap key,
                            const __grid_constant__ TensorMap value,
                            const __grid_constant__ TensorMap d_out, const float* statistics,
                            T* d_key, T* d_value, const int32* counts, const int32* lists,
                            int64 deltas, int features, int value_features,
                            const __grid_constant__ AttentionShape shape,
                            const __grid_constant__ Operands... operands) {
  const Functions functions{operands...};
  AttentionBackwardKeys<T, config, Functions>(shape, functions, counts, lists, statistics, deltas)
      .run(query, key, value, d_out, d_key, d_value, features, value_features);
}

template <typename T, AttentionConfig config, class Functions, typename... Operands>
__global__ void __launch_bounds__(config.threads(config.queries), 1)
    attention_backward_queries(const __grid_constant__ TensorMap query,
                               const __grid_constant__ TensorMap key,
                               const __grid_constant__ TensorMap value,
                               const __grid_constant__ TensorMap d_out, const float* statistics,
                               T* d_query, const int32* counts, const int32* lists, int64 deltas,
                               int features, const __grid_constant__ AttentionShape shape,
                               const __grid_constant__ Operands... operands) {
  const Functions functions{operands...};
  AttentionBackwardQueries<T, config, Functions>(shape, functions, counts, lists, statistics,
                                                 deltas)
      .run(query, key, value, d_out, d_query, features);
}

}  // namespace tilekern

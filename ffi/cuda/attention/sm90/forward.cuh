// Attention of queries to keys (sm_90a), as FlashAttention-3 computes it (arXiv:2407.08608): the
// scores never leave registers, and are lhs of the product with the values.
//
// One warpgroup loads by TMA. Each of the others has 64 queries. While the tensor cores multiply
// the weights of a tile of keys by its values, a consumer turns the scores of the next tile into
// weights.
#pragma once

#include "attention/sm90/bias.cuh"
#include "attention/softmax.cuh"

namespace tilekern {

template <typename T, AttentionConfig config, class Functions>
class AttentionForward {
  using Queries = SequenceTile<config.queries, config.features>;
  using Keys = SequenceTile<config.keys, config.features>;
  using Values = SequenceTile<config.keys, config.value_features>;
  using Biases = BiasTile<config>;
  using QueryRing = TileRing<1, Queries::kBytes>;
  using KeyRing = TileRing<config.stages, Keys::kBytes>;
  using ValueRing = TileRing<config.stages, Values::kBytes>;
  using BiasRing = TileRing<config.stages, Biases::kBytes>;
  static constexpr int kConsumers = config.queries / 64;
  static constexpr bool kScore = Functions::kScore || config.biased;
  static constexpr int kCount = config.keys / 2;

 public:
  AttentionForward(const AttentionShape& shape, const Functions& functions, const int32* counts,
                   const int32* lists)
      : shape_(shape), functions_(functions), counts_(counts), lists_(lists) {
    queries_.stages = shared_address(attention_shared);
    keys_.stages = queries_.stages + Queries::kBytes;
    values_.stages = keys_.stages + config.stages * Keys::kBytes;
    biases_.stages = values_.stages + config.stages * Values::kBytes;
    queries_.barriers = biases_.stages + config.stages * Biases::kBytes;
    keys_.barriers = queries_.barriers + QueryRing::kBarriersBytes;
    values_.barriers = keys_.barriers + KeyRing::kBarriersBytes;
    biases_.barriers = values_.barriers + ValueRing::kBarriersBytes;
  }

  // The map of the bias is not read if there is none.
  void run(const TensorMap& query, const TensorMap& key, const TensorMap& value,
           const TensorMap& bias, T* out, float* logsumexp, float* bases, int value_features) {
    if (threadIdx.x == 0) {
      queries_.init(kConsumers);
      keys_.init(kConsumers);
      values_.init(kConsumers);
      biases_.init(kConsumers);
      fence_barrier_init();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == kConsumers) {
      warpgroup_reg_dealloc<24>();
      if (threadIdx.x % 128 == 0) produce(query, key, value, bias);
    } else {
      warpgroup_reg_alloc<240>();
      typename QueryRing::State of_queries;
      typename KeyRing::State state;
      for_each_work([&](const Work& work) {
        consume(warpgroup, work, of_queries, state);
        softmax_.store(sums_, shape_, work, work.first_query + 64 * warpgroup, out, logsumexp,
                       bases, value_features);
      });
    }
  }

 private:
  using Work = QueryWork<config.listed>;

  // CTAs are persistent: the loads of the next tile run beside the end of one. Neighbouring tiles
  // are of the same head, whose keys and values are in L2. Every other round is in the opposite
  // order, so that CTAs have long and short lists alike.
  template <class F>
  void for_each_work(const F& f) const {
    const int ctas = gridDim.x, cta = blockIdx.x;
    for (int first = 0, round = 0; first < shape_.works; first += ctas, ++round) {
      const int i = first + (round % 2 == 0 ? cta : ctas - 1 - cta);
      if (i >= shape_.works) continue;
      const int tile = shape_.tiles - 1 - i % shape_.tiles, row = i / shape_.tiles;
      const int head = row % shape_.heads, batch = row / shape_.heads;
      f(Work{tile * config.queries, head, batch,
             TileList<config.listed>(counts_, lists_, shape_, batch, head, tile,
                                     (shape_.keys + config.keys - 1) / config.keys)});
    }
  }

  void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value,
               const TensorMap& bias) const {
    typename QueryRing::State of_queries;
    typename KeyRing::State state;
    for_each_work([&](const Work& work) {
      if (work.list.count() == 0) return;
      queries_.acquire(of_queries, Queries::kBytes);
      Queries::load(queries_.stage(of_queries), query, work.first_query, work.head, work.batch,
                    queries_.full(of_queries));
      of_queries.advance();
      for (int i = 0; i < work.list.count(); ++i, state.advance()) {
        const int first = work.list.tile(i).number * config.keys, head = work.head / shape_.group;
        keys_.acquire(state, Keys::kBytes);
        Keys::load(keys_.stage(state), key, first, head, work.batch, keys_.full(state));
        if constexpr (config.biased) {
          biases_.acquire(state, Biases::kBytes);
          Biases::load(biases_.stage(state), bias, shape_, work.first_query, first, work.head,
                       work.batch, biases_.full(state));
        }
        values_.acquire(state, Values::kBytes);
        Values::load(values_.stage(state), value, first, head, work.batch, values_.full(state));
      }
    });
  }

  void consume(int consumer, const Work& work, typename QueryRing::State& of_queries,
               typename KeyRing::State& state) {
#pragma unroll
    for (int i = 0; i < config.value_features / 2; ++i) sums_[i] = 0;
    softmax_.reset();
    if (work.list.count() == 0) return;
    queries_.wait(of_queries);
    typename KeyRing::State before;
    float scores[kCount];
    uint32 weights[config.keys / 16][4];

    issue_scores(scores, consumer, state);
    warpgroup_wait<0>();
    warpgroup_fence_operand(scores);
    keys_.release(state);
    float factors[2];
    weigh(scores, factors, consumer, work, work.list.tile(0), state);
    as_lhs<T>(weights, scores);
    for (int i = 1; i < work.list.count(); ++i) {
      const Tile tile = work.list.tile(i);
      before = state;
      state.advance();
      issue_scores(scores, consumer, state);
      issue_sums(weights, before);
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      keys_.release(state);
      weigh(scores, factors, consumer, work, tile, state);
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums_);
      values_.release(before);
      if constexpr (!Functions::kIsUpToOne) {
#pragma unroll
        for (int j = 0; j < config.value_features / 2; ++j) sums_[j] *= factors[j >> 1 & 1];
      }
      as_lhs<T>(weights, scores);
    }
    queries_.release(of_queries);
    of_queries.advance();
    issue_sums(weights, state);
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums_);
    values_.release(state);
    state.advance();
  }

  void issue_scores(float (&scores)[kCount], int consumer, const typename KeyRing::State& state) {
    keys_.wait(state);
    warpgroup_fence_operand(scores);
    warpgroup_arrive();
    multiply_by_features<T, Queries, Keys, config.features>(scores, queries_.stages, 64 * consumer,
                                                            keys_.stage(state));
    warpgroup_commit_batch();
  }

  void issue_sums(const uint32 (&weights)[config.keys / 16][4],
                  const typename KeyRing::State& state) {
    values_.wait(state);
    warpgroup_fence_operand(sums_);
    warpgroup_arrive();
    multiply_by_positions<T, Values>(sums_, weights, values_.stage(state));
    warpgroup_commit_batch();
  }

  void weigh(float (&scores)[kCount], float (&factors)[2], int consumer, const Work& work,
             Tile tile, const typename KeyRing::State& state) {
    const int first_query = work.first_query + 64 * consumer;
    if constexpr (kScore) {
      const int row = 64 * consumer + threadIdx.x / 32 % 4 * 16;
      if constexpr (config.biased) biases_.wait(state);
      BiasFragment<T, config, false> bias(biases_.stage(state), row);
      softmax_.score(scores, shape_, functions_, work, first_query, tile.number * config.keys,
                     bias);
      if constexpr (config.biased) {
        // All of the consumer's threads have read the tile.
        sync_consumer(1 + consumer);
        biases_.release(state);
      }
    }
    softmax_.weigh(scores, factors, shape_, functions_, work, first_query, tile);
  }

  const AttentionShape& shape_;
  const Functions& functions_;
  const int32 *counts_, *lists_;
  QueryRing queries_;
  KeyRing keys_;
  ValueRing values_;
  BiasRing biases_;
  float sums_[config.value_features / 2];
  RowSoftmax<config, Functions> softmax_;
};

template <typename T, AttentionConfig config, class Functions, typename... Operands>
__global__ void __launch_bounds__(config.threads(config.queries), 1)
    attention_forward(const __grid_constant__ TensorMap query,
                      const __grid_constant__ TensorMap key,
                      const __grid_constant__ TensorMap value,
                      const __grid_constant__ TensorMap bias, T* out, float* logsumexp,
                      float* bases, const int32* counts, const int32* lists, int value_features,
                      const __grid_constant__ AttentionShape shape,
                      const __grid_constant__ Operands... operands) {
  Functions functions{operands...};
  functions.stage();
  AttentionForward<T, config, Functions>(shape, functions, counts, lists)
      .run(query, key, value, bias, out, logsumexp, bases, value_features);
}

}  // namespace tilekern

// Attention of queries to keys (sm_90a), as FlashAttention-3 computes it (arXiv:2407.08608): the
// scores never leave registers, and are lhs of the product with the values.
//
// One warpgroup loads by TMA. Each of the others has 64 queries. While the tensor cores multiply
// the weights of a tile of keys by its values, a consumer turns the scores of the next tile into
// weights.
//
// `Functions` has the score function and the mask as CUDA:
//
//   kScore, kMask                   whether there are any
//   kReads                          whether they read arrays, by indices within the sequences
//   stage()                         copies small arrays to shared memory, before __syncthreads()
//   score(s, b, h, at)              the score, of scale times the product of query and key
//   kInner, kOuter                  numbers that s and the score have to be multiplied by; rows
//                                   that have a base have one for the latter
//   kIsUpToOne                      whether score() is from -1 to 1, and kOuter so small that the
//                                   exponentials of scores and of their negatives are normal
//                                   numbers
//   visible(b, h, at)               whether the query sees the key
#pragma once

#include "attention/sm90/bias.cuh"

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
  static_assert(!config.based || (kScore && Functions::kOuter == 1));
  // From this on, scores that differ do so by 16 or more.
  static constexpr float kLargestBase = 1 << 27;

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
        store(warpgroup, work, out, logsumexp, bases, value_features);
      });
    }
  }

 private:
  // A tile of queries of one head.
  struct Work {
    int first_query, head, batch;
    TileList<config.listed> list;
  };

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
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maxima_[r] = Functions::kIsUpToOne ? 0 : -INFINITY;
      totals_[r] = 0;
      roundings_[r] = 0;
    }
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

  // Turns products of queries and keys into weights relative to the maxima so far, and returns the
  // factors that bring earlier sums to these maxima. Neither is computed of scores up to one.
  void weigh(float (&scores)[kCount], float (&factors)[2], int consumer, const Work& work,
             Tile tile, const typename KeyRing::State& state) {
    const int first_key = tile.number * config.keys;
    const int first_query = work.first_query + 64 * consumer;
    const ScorePlaces<true> places(first_query, first_key);
    if constexpr (kScore) {
      const int row = 64 * consumer + threadIdx.x / 32 % 4 * 16;
      if constexpr (config.biased) biases_.wait(state);
      BiasFragment<T, config, false> bias(biases_.stage(state), row);
      const auto evaluate = [&](auto clamps) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          float score = bias.biased(scores[j], j, shape_.scale, Functions::kInner);
          if constexpr (Functions::kScore) {
            const ScoreIndices at =
                decltype(clamps)::value ? places.readable(j, shape_) : places.at(j);
            score = functions_.score(score, work.batch, work.head, at);
          }
          scores[j] = score;
        }
      };
      if (Functions::kReads &&
          (first_query + 64 > shape_.queries || first_key + config.keys > shape_.keys)) {
        evaluate(BoolConstant<true>());
      } else {
        evaluate(BoolConstant<false>());
      }
      if constexpr (config.biased) {
        // All of the consumer's threads have read the tile.
        sync_consumer(1 + consumer);
        biases_.release(state);
      }
    }
    const auto hide = [&](float hidden) {
      if (!tile.masked && first_key + config.keys <= shape_.keys) return;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        bool visible = places.at(j).key < shape_.keys;
        if constexpr (Functions::kMask) {
          const ScoreIndices at = Functions::kReads ? places.readable(j, shape_) : places.at(j);
          visible = visible && functions_.visible(work.batch, work.head, at);
        }
        scores[j] = visible ? scores[j] : hidden;
      }
    };
    // Weights are powers of two of the scores less the maximum, times this.
    // One FMA computes the exponent, less the rounding of the maximum's product, which rows that
    // have a base take from their logarithm.
    const float rate = kScore ? Functions::kOuter * kLog2E : shape_.scale * kLog2E;
    if constexpr (Functions::kIsUpToOne) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        scores[j] = exp2_approximate(scores[j] * rate);
      }
      hide(0);
    } else {
      hide(-INFINITY);
      const auto larger = [](float x, float y) { return fmaxf(x, y); };
      float rates[2], products[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float maximum = maxima_[r];
#pragma unroll
        for (int j = 2 * r; j < kCount; j += 4) {
          maximum = fmaxf(maximum, fmaxf(scores[j], scores[j + 1]));
        }
        maximum = reduced_over_row(maximum, larger);
        // Before the first visible key, weights are zero.
        const float base = maximum == -INFINITY ? 0 : maximum;
        rates[r] = config.based ? rate_of(base, rate) : rate;
        products[r] = base * rates[r];
        if constexpr (config.based) {
          const float rounding = fmaf(base, rates[r], -products[r]);
          factors[r] =
              exp2_approximate((maxima_[r] - base) * rates[r] + (rounding - roundings_[r]));
          roundings_[r] = rounding;
        } else {
          factors[r] = exp2_approximate(fmaf(maxima_[r], rates[r], -products[r]));
        }
        maxima_[r] = maximum;
        totals_[r] *= factors[r];
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const int r = j >> 1 & 1;
        scores[j] = exp2_approximate(fmaf(scores[j], rates[r], -products[r]));
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) totals_[j >> 1 & 1] += scores[j];
  }

  // Returns the rate of a row with this maximum. That of large scores is a power of two, since
  // weights are one or none, and rounded products with another rate are far apart.
  static float rate_of(float base, float rate) {
    // It brings the maximum to between 2**29 and 2**30.
    const uint32 exponent = __float_as_uint(base) & 0x7f800000;
    return fabsf(base) < kLargestBase ? rate : __uint_as_float((283u << 23) - exponent);
  }

  void store(int consumer, const Work& work, T* out, float* logsumexp, float* bases,
             int value_features) {
    const int first = work.first_query + 64 * consumer;
    const int rows = shape_.queries - first;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = reduced_over_row(totals_[r], [](float x, float y) { return x + y; });
      factors[r] = total == 0 ? 0 : 1 / total;
      const int row = place_.row + 8 * r;
      if (threadIdx.x % 4 == 0 && row < rows) {
        const int64 own =
            (static_cast<int64>(work.batch) * shape_.heads + work.head) * shape_.queries + first +
            row;
        float base = total == 0 ? 0 : maxima_[r] * (kScore ? Functions::kOuter : shape_.scale);
        if constexpr (config.based) {
          bases[own] = base;
          base = -roundings_[r] * kLn2;
        }
        logsumexp[own] = total == 0 ? -INFINITY : base + logf(total);
      }
    }
    const int64 row_elements = static_cast<int64>(shape_.heads) * value_features;
    out += (static_cast<int64>(work.batch) * shape_.queries + first) * row_elements +
           work.head * value_features;
    store_rows(out, row_elements, rows, value_features, sums_, factors);
  }

  const AttentionShape& shape_;
  const Functions& functions_;
  const int32 *counts_, *lists_;
  QueryRing queries_;
  KeyRing keys_;
  ValueRing values_;
  BiasRing biases_;
  AccumulatorPlace place_;
  float sums_[config.value_features / 2];
  float maxima_[2], totals_[2], roundings_[2];
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

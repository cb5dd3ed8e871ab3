// The gradient of attention (sm_90a), in two kernels with fixed bits: one has a tile of keys for
// each CTA and runs over queries, the other a tile of queries and runs over keys. Both compute
// weights again from the logsumexp of the scores.
//
// With weights P, their gradient dP = dO V^T and d = rowsum(dO * O), the gradient of scores is
// dS = P * (dP - d), times the derivative of the score function. Then dV = P^T dO, dK = dS^T Q and
// dQ = dS K. Accumulators of P and dS are lhs of these products.
//
// A score may be a function of numbers of each batch and head. The kernel of queries adds up their
// gradients, sum(P * (dP - d) * p) with the derivatives p. The rounding of O in d matters there,
// since these sums cancel, so it computes rowsum(P * dP) again. Or a score is a function of a
// number of each batch, head, and difference of query and key, whose gradients are sums for each
// difference of 64 queries (difference_sums.cuh).
//
// `statistics` has, for each head and row up to a whole number of tiles, the numbers of a
// RowLogarithm (the logsumexp is infinity for rows that see no key or are none), of which the base
// only if rows have one, at `deltas` d less the gradient of the logsumexp, and behind these that
// gradient.
#pragma once

#include "attention/sm90/difference_sums.cuh"
#include "attention/sm90/query_tile.cuh"

namespace tilekern {

template <typename T, AttentionConfig config, class Functions>
class AttentionBackwardKeys {
  using Queries = SequenceTile<config.queries, config.features>;
  using Outs = SequenceTile<config.queries, config.value_features>;
  using Keys = SequenceTile<config.keys, config.features>;
  using Values = SequenceTile<config.keys, config.value_features>;
  static constexpr int kDeltasBytes = config.queries * static_cast<int>(sizeof(float));
  static constexpr int kLogarithmsBytes = (1 + config.based) * kDeltasBytes;
  using Biases = BiasTile<config>;
  static constexpr int kBias = Queries::kBytes + Outs::kBytes;
  static constexpr int kLogarithms = kBias + Biases::kBytes;
  static constexpr int kDeltas = kLogarithms + kLogarithmsBytes;
  static constexpr int kLoadedBytes = kDeltas + kDeltasBytes;
  // Tiles begin at multiples of 1024 bytes.
  static constexpr int kStageBytes = (kLoadedBytes + 1023) / 1024 * 1024;
  using Ring = TileRing<config.stages, kStageBytes>;
  // Two consumers have 64 keys each. Or they have the same, of which one computes the gradients of
  // keys and the other those of values: accumulators of both may exceed the registers.
  static constexpr int kConsumers = 2;
  static constexpr bool kShared = config.keys == 64;
  static constexpr int kCount = config.queries / 2;

 public:
  static constexpr int kThreads = 128 * (kConsumers + 1);

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
           const TensorMap& d_out, const TensorMap& bias, T* d_key, T* d_value, int features,
           int value_features) {
    if (threadIdx.x == 0) {
      ring_.init(kConsumers);
      mbarrier_init(loaded_, 1);
      fence_barrier_init();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == kConsumers) {
      warpgroup_reg_dealloc<24>();
      if (threadIdx.x % 128 == 0) produce(query, key, value, d_out, bias);
      return;
    }
    warpgroup_reg_alloc<240>();
    const auto store = [&](T* to, int width, int row, const auto& sums, float factor) {
      const int64 position = static_cast<int64>(batch_) * shape_.keys + tile_ * config.keys + row;
      const int heads = shape_.heads / shape_.group;
      const int rows = shape_.keys - tile_ * config.keys - row;
      store_rows(to + (position * heads + head_) * width, static_cast<int64>(heads) * width, rows,
                 width, sums, {factor, factor});
    };
    const auto store_keys = [&](int row, const auto& sums) {
      store(d_key, features, row, sums, shape_.scale);
    };
    const auto store_values = [&](int row, const auto& sums) {
      store(d_value, value_features, row, sums, 1);
    };
    if constexpr (!kShared) {
      consume<true, true>(64 * warpgroup, store_keys, store_values);
    } else if (warpgroup == 0) {
      consume<true, false>(0, store_keys, store_values);
    } else {
      consume<false, true>(0, store_keys, store_values);
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
        const bool at_end = first + config.queries > shape_.queries ||
                            (Functions::kReads && (tile_ + 1) * config.keys > shape_.keys);
        f(head, first, tile.masked || at_end);
      }
    }
  }

  void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value,
               const TensorMap& d_out, const TensorMap& bias) const {
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
      const int64 row = (static_cast<int64>(batch_) * shape_.heads + head) * padded + first;
      bulk_load(stage + kLogarithms, statistics_ + (1 + config.based) * row, kLogarithmsBytes,
                full);
      bulk_load(stage + kDeltas, statistics_ + deltas_ + row, kDeltasBytes, full);
      if constexpr (config.biased) {
        Biases::load(stage + kBias, bias, shape_, first, tile_ * config.keys, head, batch_, full);
      }
      state.advance();
    });
  }

  // Computes the gradients of 64 keys, of values, or of both, and stores them.
  template <bool kOfKeys, bool kOfValues, class StoreKeys, class StoreValues>
  void consume(int row, const StoreKeys& store_keys, const StoreValues& store_values) {
    float d_keys[kOfKeys ? config.features / 2 : 1] = {};
    float d_values[kOfValues ? config.value_features / 2 : 1] = {};
    mbarrier_wait(loaded_, 0);
    typename Ring::State state;
    const int first_key = tile_ * config.keys + row;
    for_each_tile([&](int head, int first_query, bool masked) {
      float scores[kCount], d_weights[kCount];
      uint32 weights[kCount / 8][4], d_scores[kCount / 8][4];
      const uint32 queries = ring_.stage(state), outs = queries + Queries::kBytes;
      BiasFragment<T, config, true> bias(queries + kBias, row + threadIdx.x / 32 % 4 * 16);
      ring_.wait(state);
      warpgroup_fence_operand(scores);
      warpgroup_arrive();
      multiply_by_features<T, Keys, Queries, config.features>(scores, keys_, row, queries);
      warpgroup_commit_batch();
      if constexpr (kOfKeys) {
        warpgroup_fence_operand(d_weights);
        multiply_by_features<T, Values, Outs, config.value_features>(d_weights, values_, row, outs);
        warpgroup_commit_batch();
      }
      warpgroup_wait<kOfKeys ? 1 : 0>();
      warpgroup_fence_operand(scores);
      float numbers[2];
      weigh_again<T>(
          scores, weights, shape_, functions_, batch_, head, masked,
          ScorePlaces<false>(first_query, first_key), bias,
          [&](int j) {
            // Those of a query, or of two neighbouring ones.
            if (config.based || j % 2 == 0) {
              load_shared(numbers, queries + kLogarithms +
                                       place_.column_of(j) * (kLogarithmsBytes / config.queries));
            }
            if constexpr (config.based) return RowLogarithm{numbers[0], numbers[1]};
            return RowLogarithm{0, numbers[j % 2]};
          },
          Unused());
      if constexpr (kOfValues) {
        warpgroup_fence_operand(d_values);
        warpgroup_arrive();
        multiply_by_positions<T, Outs>(d_values, weights, outs);
        warpgroup_commit_batch();
      }
      if constexpr (kOfKeys) {
        warpgroup_wait<kOfValues ? 1 : 0>();
        warpgroup_fence_operand(d_weights);
#pragma unroll
        for (int j = 0; j < kCount; j += 2) {
          float delta[2];
          load_shared(delta, queries + kDeltas + 4 * place_.column_of(j));
          scores[j] *= d_weights[j] - delta[0];
          scores[j + 1] *= d_weights[j + 1] - delta[1];
        }
        as_lhs<T>(d_scores, scores);
        warpgroup_fence_operand(d_keys);
        warpgroup_arrive();
        multiply_by_positions<T, Queries>(d_keys, d_scores, queries);
        warpgroup_commit_batch();
      }
      warpgroup_wait<0>();
      if constexpr (kOfKeys) warpgroup_fence_operand(d_keys);
      if constexpr (kOfValues) warpgroup_fence_operand(d_values);
      ring_.release(state);
      state.advance();
    });
    if constexpr (kOfKeys) store_keys(row, d_keys);
    if constexpr (kOfValues) store_values(row, d_values);
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
};

template <AttentionConfig config>
struct BackwardQueriesLayout {
  using Queries = SequenceTile<config.queries, config.features>;
  using Outs = SequenceTile<config.queries, config.value_features>;
  using Keys = SequenceTile<config.keys, config.features>;
  using Values = SequenceTile<config.keys, config.value_features>;
  static constexpr int kLoadedBytes = Queries::kBytes + Outs::kBytes;
  static constexpr int kBias = Keys::kBytes + Values::kBytes;
  static constexpr int kStageBytes = kBias + BiasTile<config>::kBytes;
};

// Sums over a row of the gradients by numbers.
template <int kNumbers>
struct NumberSums {
  float totals[kNumbers + 1] = {}, shares[kNumbers + 1] = {};
  // The sum of P * (dP - d), of which the exact d would leave the gradient of the logsumexp.
  float rest = 0;

  void add(float weight, float d_score, const float* partials) {
    rest += weight * d_score;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      // A derivative may be infinite at keys that have no weight.
      const float share = weight == 0 ? 0 : weight * partials[i];
      totals[i] += share * d_score;
      shares[i] += share;
    }
  }

  float corrected(int i) const { return totals[i] - rest * shares[i]; }
};

template <typename T, AttentionConfig config, class Functions>
class AttentionBackwardQueries {
  using Layout = BackwardQueriesLayout<config>;
  using Queries = typename Layout::Queries;
  using Outs = typename Layout::Outs;
  using Keys = typename Layout::Keys;
  using Values = typename Layout::Values;
  using Tile = QueryTile<T, config, Layout, Functions>;
  static constexpr int kNumbers = Functions::kNumbers;
  static constexpr bool kByDifference = Functions::kByDifference;
  static_assert(!kByDifference || (kNumbers == 1 && config.keys == 64));

 public:
  AttentionBackwardQueries(const AttentionShape& shape, const Functions& functions,
                           const int32* counts, const int32* lists, const float* statistics,
                           int64 deltas)
      : tile_(shape, functions, counts, lists, statistics), deltas_(deltas) {}

  void run(const TensorMap& query, const TensorMap& key, const TensorMap& value,
           const TensorMap& d_out, const TensorMap& bias, T* d_query, float* d_numbers,
           int features) {
    tile_.run(
        [&](uint32 to, int first, uint32 barrier) {
          Queries::load(to, query, first, tile_.head, tile_.batch, barrier);
          Outs::load(to + Queries::kBytes, d_out, first, tile_.head, tile_.batch, barrier);
        },
        [&](uint32 to, int first, int head, uint32 barrier) {
          Keys::load(to, key, first, head, tile_.batch, barrier);
          Values::load(to + Keys::kBytes, value, first, head, tile_.batch, barrier);
          if constexpr (config.biased) {
            BiasTile<config>::load(to + Layout::kBias, bias, tile_.shape,
                                   tile_.tile * config.queries, first, tile_.head, tile_.batch,
                                   barrier);
          }
        },
        [&] {
          if constexpr (kByDifference) {
            const int keys = tile_.shape.keys, consumer = tile_.consumer;
            const int64 strip = head_tile() * Tile::kConsumers + consumer;
            DifferenceSums differences(
                tile_.loaded_barrier + kBarrierBytes + consumer * DifferenceSums::kBytes, consumer,
                d_numbers + strip * DifferenceSums::count(keys), keys);
            consume(differences);
            differences.finish();
          } else {
            consume(Unused());
          }
          const AttentionShape& shape = tile_.shape;
          const int64 row = static_cast<int64>(tile_.batch) * shape.queries + tile_.first_query;
          store_rows(d_query + (row * shape.heads + tile_.head) * features,
                     static_cast<int64>(shape.heads) * features, shape.queries - tile_.first_query,
                     features, d_queries_, {shape.scale, shape.scale});
          if constexpr (kNumbers > 0 && !kByDifference) store_numbers(d_numbers);
        });
  }

 private:
  // The number of the tile among those of all heads.
  int64 head_tile() const {
    const AttentionShape& shape = tile_.shape;
    return (static_cast<int64>(tile_.batch) * shape.heads + tile_.head) * shape.tiles + tile_.tile;
  }

  template <class Differences>
  void consume(Differences&& differences) {
#pragma unroll
    for (int i = 0; i < config.features / 2; ++i) d_queries_[i] = 0;
    const int row = 64 * tile_.consumer;
    float delta[2];
    RowLogarithm logarithms[2];
    tile_.read_rows(logarithms);
    tile_.read_rows(delta, deltas_);
    tile_.for_each_tile([&](uint32 keys, int first_key, bool masked) {
      float scores[Tile::kCount], d_weights[Tile::kCount];
      uint32 d_scores[Tile::kCount / 8][4], unused[Tile::kCount / 8][4];
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(d_weights);
      warpgroup_arrive();
      multiply_by_features<T, Queries, Keys, config.features>(scores, tile_.loaded, row, keys);
      warpgroup_commit_batch();
      multiply_by_features<T, Outs, Values, config.value_features>(
          d_weights, tile_.loaded + Queries::kBytes, row, keys + Keys::kBytes);
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      BiasFragment<T, config, false> bias(keys + Layout::kBias, row + threadIdx.x / 32 % 4 * 16);
      if constexpr (kNumbers > 0) {
        warpgroup_wait<0>();
        warpgroup_fence_operand(d_weights);
        tile_.weigh(scores, unused, logarithms, first_key, masked, bias,
                    [&](int j, float weight, const float* partials) {
                      const int r = j >> 1 & 1;
                      const float d_score = d_weights[j] - delta[r];
                      if constexpr (kByDifference) {
                        // A derivative may be infinite at keys that have no weight.
                        differences.set(j, weight == 0 ? 0 : weight * partials[0] * d_score);
                      } else {
                        numbers_[r].add(weight, d_score, partials);
                      }
                    });
      } else {
        tile_.weigh(scores, unused, logarithms, first_key, masked, bias, Unused());
        warpgroup_wait<0>();
        warpgroup_fence_operand(d_weights);
      }
#pragma unroll
      for (int j = 0; j < Tile::kCount; ++j) scores[j] *= d_weights[j] - delta[j >> 1 & 1];
      as_lhs<T>(d_scores, scores);
      warpgroup_fence_operand(d_queries_);
      warpgroup_arrive();
      multiply_by_positions<T, Keys>(d_queries_, d_scores, keys);
      warpgroup_commit_batch();
      if constexpr (kByDifference) differences.add(first_key);
      warpgroup_wait<0>();
      warpgroup_fence_operand(d_queries_);
    });
  }

  // Stores the sums of each warp's 16 queries.
  void store_numbers(float* d_numbers) {
    float d_logsumexp[2];
    tile_.read_rows(d_logsumexp, deltas_ + deltas_ / (1 + config.based));
    const auto sum = [](float x, float y) { return x + y; };
    d_numbers += (head_tile() * 4 * Tile::kConsumers + threadIdx.x / 32) * kNumbers;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      numbers_[r].rest = reduced_over_row(numbers_[r].rest, sum) - d_logsumexp[r];
    }
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      float total = numbers_[0].corrected(i) + numbers_[1].corrected(i);
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
      if (threadIdx.x % 32 == 0) d_numbers[i] = total;
    }
  }

  Tile tile_;
  int64 deltas_;
  float d_queries_[config.features / 2];
  NumberSums<kNumbers> numbers_[2];
};

template <typename T, AttentionConfig config, class Functions, typename... Operands>
__global__ void __launch_bounds__(AttentionBackwardKeys<T, config, Functions>::kThreads, 1)
    attention_backward_keys(const __grid_constant__ TensorMap query,
                            const __grid_constant__ TensorMap key,
                            const __grid_constant__ TensorMap value,
                            const __grid_constant__ TensorMap d_out,
                            const __grid_constant__ TensorMap bias, const float* statistics,
                            T* d_key, T* d_value, const int32* counts, const int32* lists,
                            int64 deltas, int features, int value_features,
                            const __grid_constant__ AttentionShape shape,
                            const __grid_constant__ Operands... operands) {
  Functions functions{operands...};
  functions.stage();
  AttentionBackwardKeys<T, config, Functions>(shape, functions, counts, lists, statistics, deltas)
      .run(query, key, value, d_out, bias, d_key, d_value, features, value_features);
}

template <typename T, AttentionConfig config, class Functions, typename... Operands>
__global__ void __launch_bounds__(config.threads(config.queries), 1) attention_backward_queries(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
    const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap d_out,
    const __grid_constant__ TensorMap bias, const float* statistics, T* d_query, float* d_numbers,
    const int32* counts, const int32* lists, int64 deltas, int features,
    const __grid_constant__ AttentionShape shape, const __grid_constant__ Operands... operands) {
  Functions functions{operands...};
  functions.stage();
  AttentionBackwardQueries<T, config, Functions>(shape, functions, counts, lists, statistics,
                                                 deltas)
      .run(query, key, value, d_out, bias, d_query, d_numbers, features);
}

}  // namespace tilekern

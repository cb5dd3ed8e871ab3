// The tangent of attention (sm_90a), given the logsumexp of the scores.
//
// With weights P and the tangents of products, dS = scale * (dQ K^T + Q dK^T), times the derivative
// of the score function, the tangent of the logsumexp is m = rowsum(P * dS), and that of the result
// is (P * dS) V + P dV - m O. P and P * dS are lhs of products from registers.
//
// `statistics` has the logsumexp as in backward.cuh.
#pragma once

#include "attention/sm90/backward.cuh"

namespace tilekern {

// Which operands have tangents.
struct Moving {
  bool query, key, value;

  constexpr bool scores() const { return query || key; }
};

template <typename T, AttentionConfig config, Moving moving, class Functions>
class AttentionTangent {
  using Queries = SequenceTile<config.queries, config.features>;
  using Keys = SequenceTile<config.keys, config.features>;
  using Values = SequenceTile<config.keys, config.value_features>;
  static constexpr int kQueriesBytes = (1 + moving.query) * Queries::kBytes;
  // A stage has keys, their tangents, values and their tangents, as far as products read them.
  static constexpr int kKeys = 0, kMovedKeys = Keys::kBytes;
  static constexpr int kValues = kMovedKeys + moving.key * Keys::kBytes;
  static constexpr int kMovedValues = kValues + moving.scores() * Values::kBytes;
  static constexpr int kStageBytes = kMovedValues + moving.value * Values::kBytes;
  using Ring = TileRing<config.stages, kStageBytes>;
  static constexpr int kConsumers = config.queries / 64;
  static constexpr int kCount = config.keys / 2;

 public:
  AttentionTangent(const AttentionShape& shape, const Functions& functions, const int32* counts,
                   const int32* lists, const float* statistics)
      : shape_(shape),
        functions_(functions),
        statistics_(statistics),
        // Under a causal mask the last tiles take longest.
        tile_(shape.tiles - 1 - blockIdx.x),
        head_(blockIdx.y),
        batch_(blockIdx.z),
        list_(counts, lists, shape, batch_, head_, tile_,
              (shape.keys + config.keys - 1) / config.keys) {
    queries_ = shared_address(attention_shared);
    ring_.stages = queries_ + kQueriesBytes;
    ring_.barriers = ring_.stages + config.stages * kStageBytes;
    loaded_ = ring_.barriers + Ring::kBarriersBytes;
  }

  // Maps of what has no tangent are not read.
  void run(const TensorMap* const (&maps)[6], const T* out, T* out_dot, float* logsumexp_dot,
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
      if (threadIdx.x % 128 == 0) produce(maps);
    } else {
      warpgroup_reg_alloc<240>();
      consume(warpgroup);
      store(warpgroup, out, out_dot, logsumexp_dot, value_features);
    }
  }

 private:
  void produce(const TensorMap* const (&maps)[6]) const {
    // A copy that no thread waits for could end after the CTA.
    if (list_.count() == 0) return;
    mbarrier_arrive_expect_tx(loaded_, kQueriesBytes);
    const int query = tile_ * config.queries;
    Queries::load(queries_, *maps[0], query, head_, batch_, loaded_);
    if constexpr (moving.query) {
      Queries::load(queries_ + Queries::kBytes, *maps[3], query, head_, batch_, loaded_);
    }
    typename Ring::State state;
    for (int i = 0; i < list_.count(); ++i, state.advance()) {
      const int first = list_.tile(i).number * config.keys, head = head_ / shape_.group;
      const uint32 stage = ring_.stage(state), full = ring_.full(state);
      ring_.acquire(state, kStageBytes);
      Keys::load(stage + kKeys, *maps[1], first, head, batch_, full);
      if constexpr (moving.key) {
        Keys::load(stage + kMovedKeys, *maps[4], first, head, batch_, full);
      }
      if constexpr (moving.scores()) {
        Values::load(stage + kValues, *maps[2], first, head, batch_, full);
      }
      if constexpr (moving.value) {
        Values::load(stage + kMovedValues, *maps[5], first, head, batch_, full);
      }
    }
  }

  void consume(int consumer) {
#pragma unroll
    for (int i = 0; i < config.value_features / 2; ++i) sums_[i] = 0;
    if (list_.count() == 0) return;
    const int first_query = tile_ * config.queries + 64 * consumer;
    const int padded = (shape_.queries + 63) / 64 * 64;
    float logsumexp[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + place_.row + 8 * r;
      const int64 row = (static_cast<int64>(batch_) * shape_.heads + head_) * padded + query;
      logsumexp[r] = query < padded ? statistics_[row] : INFINITY;
    }
    mbarrier_wait(loaded_, 0);
    typename Ring::State state;
    for (int i = 0; i < list_.count(); ++i, state.advance()) {
      float scores[kCount], moved[kCount];
      uint32 weights[kCount / 8][4];
      const Tile tile = list_.tile(i);
      const int first_key = tile.number * config.keys;
      const uint32 stage = ring_.stage(state);
      ring_.wait(state);
      warpgroup_fence_operand(scores);
      warpgroup_arrive();
      multiply_by_features<T, Queries, Keys, config.features>(scores, queries_, 64 * consumer,
                                                              stage + kKeys);
      warpgroup_commit_batch();
      if constexpr (moving.scores()) {
        warpgroup_fence_operand(moved);
        if constexpr (moving.query) {
          multiply_by_features<T, Queries, Keys, config.features>(moved, queries_ + Queries::kBytes,
                                                                  64 * consumer, stage + kKeys);
        }
        if constexpr (moving.key) {
          multiply_by_features<T, Queries, Keys, config.features>(moved, queries_, 64 * consumer,
                                                                  stage + kMovedKeys, moving.query);
        }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
      } else {
        warpgroup_wait<0>();
      }
      warpgroup_fence_operand(scores);
      const auto weigh = [&](auto is_masked) {
        weigh_again<T, decltype(is_masked)::value>(
            scores, weights, shape_, functions_, batch_, head_,
            [&](int j) { return first_query + place_.row_of(j); },
            [&](int j) { return first_key + place_.column_of(j); },
            [&](int j) { return logsumexp[j >> 1 & 1]; });
      };
      if (tile.masked || first_key + config.keys > shape_.keys) {
        weigh(BoolConstant<true>());
      } else {
        weigh(BoolConstant<false>());
      }
      warpgroup_fence_operand(sums_);
      if constexpr (moving.value) {
        warpgroup_arrive();
        multiply_by_positions<T, Values>(sums_, weights, stage + kMovedValues);
        warpgroup_commit_batch();
      }
      uint32 moved_weights[kCount / 8][4];
      if constexpr (moving.scores()) {
        warpgroup_wait<moving.value ? 1 : 0>();
        warpgroup_fence_operand(moved);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          scores[j] *= moved[j] * shape_.scale;
          totals_[j >> 1 & 1] += scores[j];
        }
        as_lhs<T>(moved_weights, scores);
        warpgroup_fence_operand(sums_);
        warpgroup_arrive();
        multiply_by_positions<T, Values>(sums_, moved_weights, stage + kValues);
        warpgroup_commit_batch();
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums_);
      ring_.release(state);
    }
  }

  void store(int consumer, const T* out, T* out_dot, float* logsumexp_dot, int value_features) {
    const int first = tile_ * config.queries + 64 * consumer;
    const int rows = shape_.queries - first;
    const int64 row_elements = static_cast<int64>(shape_.heads) * value_features;
    const int64 origin = (static_cast<int64>(batch_) * shape_.queries + first) * row_elements +
                         head_ * value_features;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      totals_[r] = reduced_over_row(totals_[r], [](float x, float y) { return x + y; });
      const int row = place_.row + 8 * r;
      if (threadIdx.x % 4 == 0 && row < rows) {
        logsumexp_dot[(static_cast<int64>(batch_) * shape_.heads + head_) * shape_.queries + first +
                      row] = totals_[r];
      }
    }
    if constexpr (moving.scores()) {
#pragma unroll
      for (int i = 0; i < config.value_features / 2; ++i) {
        const int row = place_.row_of(i), column = place_.column_of(i);
        if (row < rows && column < value_features) {
          sums_[i] -= totals_[i >> 1 & 1] * to_float(out[origin + row * row_elements + column]);
        }
      }
    }
    store_rows(out_dot + origin, row_elements, rows, value_features, sums_, {1, 1});
  }

  const AttentionShape& shape_;
  const Functions& functions_;
  const float* statistics_;
  int tile_, head_, batch_;
  TileList<config.listed> list_;
  uint32 queries_, loaded_;
  Ring ring_;
  AccumulatorPlace place_;
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
  const Functions functions{operands...};
  AttentionTangent<T, config, moving, Functions>(shape, functions, counts, lists, statistics)
      .run({&query, &key, &value, &d_query, &d_key, &d_value}, out, out_dot, logsumexp_dot,
           value_features);
}

}  // namespace tilekern

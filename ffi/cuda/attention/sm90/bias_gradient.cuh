// The gradient of a bias of attention's scores (sm_90a): dS, summed over the batch and the heads
// that share an element of the bias, in their order.
//
// A CTA takes tiles of (queries, keys) of the bias, one after another. For each element of the
// batch and head it computes S and dP again, and adds dS = P * (dP - d), times the derivative of
// the score function, to sums in registers.
//
// `statistics` is as in backward.cuh.
#pragma once

#include "attention/sm90/bias.cuh"
#include "attention/weights.cuh"

namespace tilekern {

// `BiasShape` of plans/attention/sm90.py.
struct BiasShape {
  int32 batches;
  // Those of the bias: 1, or that of the call.
  int32 own_batches, own_heads;
  // Chunks of tiles of queries, and tiles of a chunk: one if the bias has queries.
  int32 chunks, chunk_tiles;
  int64 deltas;
};

// `kHasQueries` says whether the bias has queries. Otherwise the result has a part for each warp of
// each chunk. `Functions` read a bias that is not staged.
template <typename T, typename Sum, AttentionConfig config, bool kHasQueries, class Functions>
class AttentionBiasGradient {
  using Queries = SequenceTile<config.queries, config.features>;
  using Keys = SequenceTile<config.keys, config.features>;
  using Outs = SequenceTile<config.queries, config.value_features>;
  using Values = SequenceTile<config.keys, config.value_features>;
  using Biases = BiasTile<config>;
  // Stages have queries and keys, and gradients of results and values, alternately.
  static constexpr int kScoreBytes = Queries::kBytes + Keys::kBytes;
  static constexpr int kWeightBytes = Outs::kBytes + Values::kBytes;
  using Ring = TileRing<config.stages, max_of(kScoreBytes, kWeightBytes)>;
  using BiasRing = TileRing<1, Biases::kBytes>;
  static constexpr int kConsumers = config.queries / 64;
  static constexpr int kCount = config.keys / 2;
  static constexpr int kWarps = 4 * kConsumers;

 public:
  AttentionBiasGradient(const AttentionShape& shape, const BiasShape& bias_shape,
                        const Functions& functions, const int8* kinds, const float* statistics)
      : shape_(shape),
        bias_shape_(bias_shape),
        functions_(functions),
        kinds_(kinds),
        statistics_(statistics) {
    biases_.stages = shared_address(attention_shared);
    ring_.stages = biases_.stages + Biases::kBytes;
    ring_.barriers = ring_.stages + config.stages * max_of(kScoreBytes, kWeightBytes);
    biases_.barriers = ring_.barriers + Ring::kBarriersBytes;
  }

  // The map of the bias is not read if that is not staged.
  void run(const TensorMap& query, const TensorMap& key, const TensorMap& value,
           const TensorMap& d_out, const TensorMap& bias, Sum* d_bias) {
    if (threadIdx.x == 0) {
      ring_.init(kConsumers);
      biases_.init(kConsumers);
      fence_barrier_init();
    }
    __syncthreads();
    const int consumer = threadIdx.x / 128;
    if (consumer < kConsumers) {
      warpgroup_reg_alloc<240>();
      consume(consumer, d_bias);
    } else {
      warpgroup_reg_dealloc<24>();
      if (threadIdx.x % 128 == 0) produce(query, key, value, d_out, bias);
    }
  }

 private:
  // A tile of the bias, or of a part.
  struct Work {
    int chunk, key_tile, head, batch;
  };

  // CTAs are persistent. Those that run at a time have queries and keys of few heads.
  template <class F>
  void for_each_work(const F& f) const {
    for (int i = blockIdx.x; i < shape_.works; i += gridDim.x) {
      const int row = i / shape_.listed, heads = row / bias_shape_.chunks;
      f(Work{row % bias_shape_.chunks, i % shape_.listed, heads % bias_shape_.own_heads,
             heads / bias_shape_.own_heads});
    }
  }

  // Calls f(tile of queries, batch, head, masked) for those that share the work and see its keys.
  template <class F>
  void for_each_part(const Work& work, const F& f) const {
    const bool all_batches = bias_shape_.own_batches == 1, all_heads = bias_shape_.own_heads == 1;
    const int batches = all_batches ? bias_shape_.batches : work.batch + 1;
    const int heads = all_heads ? shape_.heads : work.head + 1;
    const auto of_tile = [&](int tile) {
      const bool at_end = (tile + 1) * config.queries > shape_.queries ||
                          (work.key_tile + 1) * config.keys > shape_.keys;
      for (int batch = all_batches ? 0 : work.batch; batch < batches; ++batch) {
        for (int head = all_heads ? 0 : work.head; head < heads; ++head) {
          bool masked = at_end;
          if constexpr (config.listed) {
            const int64 row =
                static_cast<int64>(batch) * shape_.batch_lists + head * shape_.head_lists + tile;
            const int kind = kinds_[row * shape_.listed + work.key_tile];
            if (kind == 0) continue;
            masked = masked || kind == 1;
          }
          f(tile, batch, head, masked);
        }
      }
    };
    if constexpr (kHasQueries) {
      of_tile(work.chunk);
    } else {
      const int first = work.chunk * bias_shape_.chunk_tiles;
      const int last = min_of(first + bias_shape_.chunk_tiles, shape_.tiles);
      for (int tile = first; tile < last; ++tile) of_tile(tile);
    }
  }

  void produce(const TensorMap& query, const TensorMap& key, const TensorMap& value,
               const TensorMap& d_out, const TensorMap& bias) const {
    typename Ring::State state;
    typename BiasRing::State of_bias;
    for_each_work([&](const Work& work) {
      const int first_key = work.key_tile * config.keys;
      bool is_first = true;
      for_each_part(work, [&](int tile, int batch, int head, bool) {
        const int first_query = tile * config.queries;
        if (config.biased && is_first) {
          biases_.acquire(of_bias, Biases::kBytes);
          Biases::load(biases_.stage(of_bias), bias, shape_, first_query, first_key, work.head,
                       work.batch, biases_.full(of_bias));
          of_bias.advance();
        }
        is_first = false;
        const int of_keys = head / shape_.group;
        uint32 stage = ring_.stage(state), full = ring_.full(state);
        ring_.acquire(state, kScoreBytes);
        Queries::load(stage, query, first_query, head, batch, full);
        Keys::load(stage + Queries::kBytes, key, first_key, of_keys, batch, full);
        state.advance();
        stage = ring_.stage(state), full = ring_.full(state);
        ring_.acquire(state, kWeightBytes);
        Outs::load(stage, d_out, first_query, head, batch, full);
        Values::load(stage + Outs::kBytes, value, first_key, of_keys, batch, full);
        state.advance();
      });
    });
  }

  void consume(int consumer, Sum* d_bias) {
    typename Ring::State state;
    typename BiasRing::State of_bias;
    for_each_work([&](const Work& work) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums_[j] = 0;
      bool is_first = true;
      for_each_part(work, [&](int tile, int batch, int head, bool masked) {
        if (config.biased && is_first) biases_.wait(of_bias);
        is_first = false;
        add(consumer, tile, work.key_tile, batch, head, masked, state);
      });
      if (config.biased && !is_first) {
        // All of the consumer's threads have read the tile.
        sync_consumer(1 + consumer);
        biases_.release(of_bias);
        of_bias.advance();
      }
      store(consumer, work, d_bias);
    });
  }

  void add(int consumer, int query_tile, int key_tile, int batch, int head, bool masked,
           typename Ring::State& state) {
    const int row = 64 * consumer, first_query = query_tile * config.queries + row;
    const int first_key = key_tile * config.keys;
    float scores[kCount], d_weights[kCount], delta[2];
    RowLogarithm logarithms[2];
    read_logarithms<config.based>(logarithms, statistics_, shape_, batch, head,
                                  first_query + place_.row);
    read_statistics(delta, statistics_ + bias_shape_.deltas, shape_, batch, head,
                    first_query + place_.row, 0.f);
    const typename Ring::State of_scores = state;
    state.advance();
    const uint32 queries = ring_.stage(of_scores), outs = ring_.stage(state);
    ring_.wait(of_scores);
    warpgroup_fence_operand(scores);
    warpgroup_arrive();
    multiply_by_features<T, Queries, Keys, config.features>(scores, queries, row,
                                                            queries + Queries::kBytes);
    warpgroup_commit_batch();
    ring_.wait(state);
    warpgroup_fence_operand(d_weights);
    warpgroup_arrive();
    multiply_by_features<T, Outs, Values, config.value_features>(d_weights, outs, row,
                                                                 outs + Outs::kBytes);
    warpgroup_commit_batch();
    warpgroup_wait<1>();
    warpgroup_fence_operand(scores);
    ring_.release(of_scores);
    uint32 unused[kCount / 8][4];
    BiasFragment<T, config, false> bias(biases_.stages, row + threadIdx.x / 32 % 4 * 16);
    weigh_again<T>(
        scores, unused, shape_, functions_, batch, head, masked,
        ScorePlaces<true>(first_query, first_key), bias,
        [&](int j) { return logarithms[j >> 1 & 1]; }, Unused());
    warpgroup_wait<0>();
    warpgroup_fence_operand(d_weights);
    ring_.release(state);
    state.advance();
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums_[j] += scores[j] * (d_weights[j] - delta[j >> 1 & 1]);
  }

  void store(int consumer, const Work& work, Sum* d_bias) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_query = work.chunk * config.queries + 64 * consumer;
    const int first_key = work.key_tile * config.keys;
    const int rows = kHasQueries ? shape_.queries : bias_shape_.chunks * kWarps;
    const int64 own = static_cast<int64>(work.batch) * bias_shape_.own_heads + work.head;
    d_bias += own * rows * shape_.keys;
    if constexpr (!kHasQueries) {
#pragma unroll
      for (int j = 0; j < kCount; j += j & 1 ? 3 : 1) {
        sums_[j] += sums_[j + 2];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          sums_[j] += __shfl_xor_sync(~0u, sums_[j], lanes);
        }
      }
      if (lane / 4 != 0) return;
    }
#pragma unroll
    for (int j = 0; j < kCount; j += kHasQueries ? 2 : 4) {
      const int row = kHasQueries ? first_query + place_.row_of(j) : work.chunk * kWarps + warp;
      const int column = first_key + place_.column_of(j);
      if (row >= rows || column >= shape_.keys) continue;
      Sum* to = d_bias + static_cast<int64>(row) * shape_.keys + column;
      if (shape_.keys % 2 == 0) {
        store_pair(to, sums_[j], sums_[j + 1]);
      } else {
        to[0] = from_float<Sum>(sums_[j]);
        if (column + 1 < shape_.keys) to[1] = from_float<Sum>(sums_[j + 1]);
      }
    }
  }

  const AttentionShape& shape_;
  const BiasShape& bias_shape_;
  const Functions& functions_;
  const int8* kinds_;
  const float* statistics_;
  BiasRing biases_;
  Ring ring_;
  AccumulatorPlace place_;
  float sums_[kCount];
};

template <typename T, AttentionConfig config, bool kHasQueries, typename Sum, class Functions,
          typename... Operands>
__global__ void __launch_bounds__(config.threads(config.queries), 1) attention_bias_gradient(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
    const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap d_out,
    const __grid_constant__ TensorMap bias, const float* statistics, Sum* d_bias, const int8* kinds,
    const __grid_constant__ BiasShape bias_shape, const __grid_constant__ AttentionShape shape,
    const __grid_constant__ Operands... operands) {
  Functions functions{operands...};
  functions.stage();
  AttentionBiasGradient<T, Sum, config, kHasQueries, Functions>(shape, bias_shape, functions, kinds,
                                                                statistics)
      .run(query, key, value, d_out, bias, d_bias);
}

}  // namespace tilekern

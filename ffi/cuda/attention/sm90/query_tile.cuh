// A CTA with a tile of queries of one head, which runs over tiles of keys: what the kernels of
// queries' gradients and of tangents share.
//
// `Layout` has kLoadedBytes, which are loaded once, and kStageBytes, which are loaded for each tile
// of keys. `statistics` has, for each head and row up to a whole number of tiles, the numbers of a
// RowLogarithm (the logsumexp is infinity for rows that see no key or are none), of which the base
// only if rows have one; other arrays of rows follow.
#pragma once

#include "attention/sm90/bias.cuh"
#include "attention/weights.cuh"

namespace tilekern {

template <typename T, AttentionConfig config, class Layout, class Functions>
struct QueryTile {
  using Ring = TileRing<config.stages, Layout::kStageBytes>;
  static constexpr int kConsumers = config.queries / 64;
  static constexpr int kCount = config.keys / 2;

  const AttentionShape& shape;
  const Functions& functions;
  const float* statistics;
  int tile, head, batch;
  TileList<config.listed> list;
  uint32 loaded, loaded_barrier;
  Ring ring;
  AccumulatorPlace place;
  // A consumer's number and the first of its queries.
  int consumer = threadIdx.x / 128, first_query;

  QueryTile(const AttentionShape& shape, const Functions& functions, const int32* counts,
            const int32* lists, const float* statistics)
      : shape(shape),
        functions(functions),
        statistics(statistics),
        // Under a causal mask the last tiles take longest.
        tile(shape.tiles - 1 - blockIdx.x),
        head(blockIdx.y),
        batch(blockIdx.z),
        list(counts, lists, shape, batch, head, tile, (shape.keys + config.keys - 1) / config.keys),
        first_query(tile * config.queries + 64 * consumer) {
    loaded = shared_address(attention_shared);
    ring.stages = loaded + Layout::kLoadedBytes;
    ring.barriers = ring.stages + config.stages * Layout::kStageBytes;
    loaded_barrier = ring.barriers + Ring::kBarriersBytes;
  }

  // One thread loads, by load_queries(to, query, barrier) once, and for each tile of keys by
  // load_keys(to, key, head of keys, barrier); the other warpgroups consume.
  template <class LoadQueries, class LoadKeys, class Consume>
  void run(const LoadQueries& load_queries, const LoadKeys& load_keys, const Consume& consume) {
    if (threadIdx.x == 0) {
      ring.init(kConsumers);
      mbarrier_init(loaded_barrier, 1);
      fence_barrier_init();
    }
    __syncthreads();
    if (consumer < kConsumers) {
      warpgroup_reg_alloc<240>();
      consume();
      return;
    }
    warpgroup_reg_dealloc<24>();
    // A copy that no thread waits for could end after the CTA.
    if (threadIdx.x % 128 != 0 || list.count() == 0) return;
    mbarrier_arrive_expect_tx(loaded_barrier, Layout::kLoadedBytes);
    load_queries(loaded, tile * config.queries, loaded_barrier);
    typename Ring::State state;
    for (int i = 0; i < list.count(); ++i, state.advance()) {
      ring.acquire(state, Layout::kStageBytes);
      load_keys(ring.stage(state), list.tile(i).number * config.keys, head / shape.group,
                ring.full(state));
    }
  }

  // Calls step(stage, first key, masked) for each tile of keys.
  template <class Step>
  void for_each_tile(const Step& step) const {
    if (list.count() == 0) return;
    mbarrier_wait(loaded_barrier, 0);
    typename Ring::State state;
    for (int i = 0; i < list.count(); ++i, state.advance()) {
      const Tile keys = list.tile(i);
      const int first_key = keys.number * config.keys;
      ring.wait(state);
      const bool at_end = first_key + config.keys > shape.keys ||
                          (Functions::kReads && first_query + 64 > shape.queries);
      step(ring.stage(state), first_key, keys.masked || at_end);
      ring.release(state);
    }
  }

  // Read the statistics of the thread's two rows; other rows have zeros.
  void read_rows(RowLogarithm (&values)[2]) const {
    read_logarithms<config.based>(values, statistics, shape, batch, head, first_query + place.row);
  }
  void read_rows(float (&values)[2], int64 offset) const {
    read_statistics(values, statistics + offset, shape, batch, head, first_query + place.row, 0.f);
  }

  template <class Bias, class Use>
  void weigh(float (&scores)[kCount], uint32 (&weights)[kCount / 8][4],
             const RowLogarithm (&logarithms)[2], int first_key, bool masked, Bias& bias,
             const Use& use) const {
    weigh_again<T>(
        scores, weights, shape, functions, batch, head, masked,
        ScorePlaces<true>(first_query, first_key), bias,
        [&](int j) { return logarithms[j >> 1 & 1]; }, use);
  }
};

}  // namespace tilekern

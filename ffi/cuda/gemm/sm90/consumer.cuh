// The consumers' side of the mainloop: a consumer warpgroup multiplies the k-tiles of a work tile
// as they come in through the pipeline.
#pragma once

#include "gemm/sm90/config.cuh"
#include "gemm/sm90/operand.cuh"
#include "gemm/sm90/pipeline.cuh"

namespace tilekern {

template <int kValue>
struct IntConstant {
  static constexpr int value = kValue;
};

// Calls f with the first of the constants kFirst, kFirst + kStep, ..., kLast that `value` does not
// exceed, or with kLast. Each has its own copy of f's code.
template <int kFirst, int kStep, int kLast, class F>
inline void with_constant(int value, const F& f) {
  if constexpr (kFirst < kLast) {
    if (value > kFirst) {
      with_constant<kFirst + kStep, kStep, kLast>(value, f);
      return;
    }
  }
  f(IntConstant<kFirst>());
}

// `Mma` is an MMA policy (mma_policy.cuh). With `kClears`, accumulators are zeros before the first
// MMA of each work tile.
template <class Mma, WgmmaConfig config, class Pipeline, class Scheduler, bool kClears>
class ConsumerMainloop {
  using State = typename Pipeline::State;
  // Whether a work tile may have no k-tiles.
  static constexpr bool kMayBeEmpty =
      Scheduler::kPartialM || Scheduler::kPartialN || Scheduler::kPartialK;

 public:
  ConsumerMainloop(const Pipeline& pipeline, const typename Mma::Params& params, int row,
                   int warp_row)
      : pipeline_(pipeline), mma_(params, row, warp_row) {}

  Mma& mma() { return mma_; }

  // Accumulates the scheduler's work tile in mma.result(), with all threads of the consumer.
  //
  // `in_flight(k_tile, k_tiles)` is called while MMAs of a k-tile run, for work that does not touch
  // the accumulators. `all_issued()` is called when the last MMAs have been issued and still run.
  template <class InFlight, class AllIssued>
  void run(State& state, const Scheduler& scheduler, const InFlight& in_flight,
           const AllIssued& all_issued) {
    if constexpr (kClears || !Mma::kInPlace || kMayBeEmpty) mma_.clear();
    mma_.start(scheduler);
    if constexpr (Scheduler::kPartialK) {
      // Whole MMA steps are left out, and what is left of the first step that is not is cleared.
      const int rest = scheduler.skipped_k() % kMmaStep;
      if (rest > 0) {
        pipeline_.wait_full(state);
        clear_k(pipeline_.stage(state.stage), scheduler.skipped_k() - rest, rest);
      }
    }
    // An MMA's number of columns is part of the instruction.
    with_constant<Scheduler::kColumnStep, Scheduler::kColumnStep, config.block_n>(
        scheduler.columns(), [&](auto columns) {
          multiply<decltype(columns)::value>(state, scheduler, in_flight, all_issued);
        });
  }

 private:
  static constexpr int kMmaStep = config.block_k / kMmaStepsPerTile;

  template <int kColumns, class InFlight, class AllIssued>
  void multiply(State& state, const Scheduler& scheduler, const InFlight& in_flight,
                const AllIssued& all_issued) {
    const int k_tiles = scheduler.k_tiles();
    // The stage that MMAs in flight read.
    int reading = -1, k_tile = 0;
    if constexpr (Scheduler::kPartialK) {
      if (k_tiles > 0) {
        with_constant<0, 1, kMmaStepsPerTile - 1>(
            scheduler.skipped_k() / kMmaStep,
            [&](auto first_step) { multiply_first_tile<decltype(first_step)::value>(state); });
      }
      k_tile = 1;
    }
    if constexpr (Mma::kFragmentSets == 2) {
      // Registers are named, not indexed, so each set has its copy of the loop's body.
      for (; k_tile + 2 <= k_tiles; k_tile += 2) {
        multiply_tile<0, kColumns>(state, k_tile, k_tiles, reading, in_flight);
        multiply_tile<1, kColumns>(state, k_tile + 1, k_tiles, reading, in_flight);
      }
      // With one finish() after both, ptxas would copy accumulators that MMAs still add to.
      if (k_tile < k_tiles) {
        multiply_tile<0, kColumns>(state, k_tile, k_tiles, reading, in_flight);
        finish(reading, all_issued);
      } else {
        finish(reading, all_issued);
      }
    } else {
      for (; k_tile < k_tiles; ++k_tile) {
        multiply_tile<0, kColumns>(state, k_tile, k_tiles, reading, in_flight);
      }
      finish(reading, all_issued);
    }
  }

  // The first k-tile of a group, from an MMA step on. Its MMAs retire before others are issued:
  // ptxas would make them wait anyway.
  template <int kFirstStep>
  void multiply_first_tile(State& state) {
    pipeline_.wait_full(state);
    const uint32 stage = pipeline_.stage(state.stage);
    mma_.template issue<0, config.block_n, kFirstStep>(stage, Mma::kInPlace);
    mma_.retire(stage, pipeline_.scales(state.stage));
    pipeline_.release(state.stage);
    state.advance();
  }

  template <int kSet, int kColumns, class InFlight>
  void multiply_tile(State& state, int k_tile, int k_tiles, int& reading,
                     const InFlight& in_flight) {
    const uint32 stage = pipeline_.stage(state.stage);
    pipeline_.wait_full(state);
    mma_.template load<kSet>(stage);
    mma_.template issue<kSet, kColumns>(stage, Mma::kInPlace && (kMayBeEmpty || k_tile > 0));
    if constexpr (Mma::kRetireEachTile) {
      in_flight(k_tile, k_tiles);
      mma_.retire(stage, pipeline_.scales(state.stage));
      pipeline_.release(state.stage);
    } else {
      // The MMAs before these have retired, so their stage is free.
      warpgroup_wait<1>();
      if (kMayBeEmpty ? reading >= 0 : k_tile > 0) pipeline_.release(reading);
      in_flight(k_tile, k_tiles);
    }
    reading = state.stage;
    state.advance();
  }

  template <class AllIssued>
  void finish(int reading, const AllIssued& all_issued) {
    all_issued();
    if constexpr (!Mma::kRetireEachTile) {
      mma_.retire(pipeline_.stage(reading), pipeline_.scales(reading));
      if (!kMayBeEmpty || reading >= 0) pipeline_.release(reading);
    }
  }

  // Clears `count` rows of k of both operands, which are another group's and may not be finite. It
  // is called by all threads that read the stage.
  static void clear_k(uint32 stage, int first, int count) {
    static_assert(!config.lhs_k_major && !config.rhs_k_major && config.parts == 1);
    constexpr int kThreads = 128 * config.tile_consumers();
    constexpr int kChunkBytes = config.block_k * kTileRowBytes;
    const uint32 zeros[4] = {};
    for (int chunk = 0; chunk < Mma::kStageBytes; chunk += kChunkBytes) {
      for (int byte = threadIdx.x % kThreads * 16; byte < count * kTileRowBytes;
           byte += kThreads * 16) {
        store_shared(stage + chunk + first * kTileRowBytes + byte, zeros);
      }
    }
    fence_async_proxy();
    // Named barriers 1 to `consumers` are those of the consumers' stores; these are behind them,
    // one for each consumer of ping-pong and one for both cooperative ones.
    const int barrier = 1 + config.consumers + (config.cooperative ? 0 : threadIdx.x / 128);
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
  }

  const Pipeline& pipeline_;
  Mma mma_;
};

}  // namespace tilekern

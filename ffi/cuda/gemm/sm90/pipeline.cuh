// The barriers between the producer and the consumers of a CTA or cluster, and of a consumer.
#pragma once

#include "cluster.cuh"
#include "gemm/sm90/config.cuh"
#include "mbarrier.cuh"

namespace tilekern {

// The ring of stages of the mainloop. Each stage has a full barrier, which completes when the
// stage's bytes have come in, and an empty barrier, which completes when all who read the stage
// have released it. With multicast these are the consumers of all CTAs of the cluster, since the
// producer of each CTA writes to the stage of all. A producer waits for its own CTA's empty barrier
// alone, which therefore counts the cluster's consumers.
//
// A stage may have kScaleBytes of scales besides, which threads read by themselves. They lie in an
// array of their own, because stages begin at multiples of 1024 bytes.
template <WgmmaConfig config, int kStageBytes, int kScaleBytes>
class MainloopPipeline {
 public:
  using State = PipelineState<config.stages>;

  static constexpr int kStagesBytes = config.stages * kStageBytes;
  static constexpr int kScalesBytes = config.stages * kScaleBytes;
  static constexpr int kBarriersBytes = 2 * config.stages * kBarrierBytes;

  MainloopPipeline(uint32 stages, uint32 scales, uint32 barriers)
      : stages_(stages),
        scales_(scales),
        full_(barriers),
        empty_(barriers + config.stages * kBarrierBytes) {}

  // Called by one thread; fence_barrier_init() and a barrier of the cluster follow.
  void init() const {
#pragma unroll
    for (int stage = 0; stage < config.stages; ++stage) {
      mbarrier_init(full_ + stage * kBarrierBytes, 1);
      mbarrier_init(empty_ + stage * kBarrierBytes, config.cluster * config.tile_consumers());
    }
  }

  uint32 stage(int stage) const { return stages_ + stage * kStageBytes; }
  uint32 scales(int stage) const { return scales_ + stage * kScaleBytes; }
  uint32 full(int stage) const { return full_ + stage * kBarrierBytes; }

  void wait_full(const State& state) const {
    mbarrier_wait(full_ + state.stage * kBarrierBytes, state.parity);
  }
  void wait_empty(const State& state) const {
    mbarrier_wait(empty_ + state.stage * kBarrierBytes, state.parity ^ 1);
  }

  // Called by all threads of a consumer: tells the producers of the cluster that it has read a
  // stage. Threads that read it by themselves, and not by MMAs, synchronise before.
  void release(int stage) const {
    const int thread = threadIdx.x % 128;
    const uint32 barrier = empty_ + stage * kBarrierBytes;
    if constexpr (config.cluster > 1) {
      if (thread < config.cluster) mbarrier_arrive_cluster(barrier, thread);
    } else {
      if (thread == 0) mbarrier_arrive(barrier);
    }
  }

 private:
  uint32 stages_;
  uint32 scales_;
  uint32 full_;
  uint32 empty_;
};

// The ordered barrier of ping-pong consumers, which issue the MMAs of alternate work tiles: a
// consumer waits until the one before has issued its last MMA, and then lets the next one go.
//
// It also keeps a consumer from falling behind: the parity of a stage's barrier tells only
// neighbouring rounds of the ring apart, so a consumer waits for its tile's stages no earlier than
// all stages of the tile before have come in. For the same reason each warp of a consumer arrives:
// no warp may still wait for a turn whose end another warp has told.
template <WgmmaConfig config>
class OrderedBarrier {
  static constexpr int kConsumers = config.consumers;
  // Cooperative consumers do not use it.
  static constexpr int kArrivals = config.cooperative ? 1 : 4;

 public:
  static constexpr int kBytes = kConsumers * kBarrierBytes;

  // The first consumer does not wait the first time: its parity starts as that of the phase before.
  OrderedBarrier(uint32 barriers, int consumer) : barriers_(barriers), parity_(consumer == 0) {}

  static void init(uint32 barriers) {
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) mbarrier_init(barriers + i * kBarrierBytes, kArrivals);
  }

  // Whether the next work tile is this consumer's.
  bool takes_next(int consumer) {
    const int turn = turn_;
    turn_ = turn + 1 == kConsumers ? 0 : turn + 1;
    return turn == consumer;
  }

  void wait(int consumer) {
    mbarrier_wait(barriers_ + consumer * kBarrierBytes, parity_);
    parity_ ^= 1;
  }

  static void arrive(uint32 barriers, int consumer) {
    const int next = consumer + 1 == kConsumers ? 0 : consumer + 1;
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers + next * kBarrierBytes);
  }

 private:
  uint32 barriers_;
  int turn_ = 0;
  uint32 parity_;
};

}  // namespace tilekern

// Work tiles that CTAs claim at run time from a counter in global memory.
//
// A static schedule waits for the slowest CTA. It is slow where tiles differ in their work (grouped
// GEMM) or SMs in their speed, as beside a collective operation that occupies some of them. Here a
// cluster claims its next tile when it is about to need it, so that the cluster that is free first
// gets it.
//
// To find a tile takes as long as a few k-tiles, so a thread of its own does it, the scheduling
// thread of the cluster's first CTA. It broadcasts tiles to the producers and consumers of the
// cluster through a ring of slots in the shared memory of each CTA:
//
//   producers            request                            ... wait for the slot
//   scheduling thread      wait for all requests and an empty slot, claim, find, broadcast
//   consumers                                               ... wait for the slot, release
#pragma once

#include "cluster.cuh"
#include "gemm/sm90/config.cuh"
#include "gemm/sm90/tile_scheduler.cuh"
#include "mbarrier.cuh"
#include "ptx.cuh"

namespace tilekern {

// Runs before each kernel with a dynamic scheduler: no tile has been claimed.
__global__ void clear_claimed_tiles(int32* claimed) { *claimed = 0; }

// What is broadcast of a work tile.
struct alignas(16) ScheduledTile {
  WorkTile work;
  // What columns(), rows() or skipped_k() returns.
  int partial;
  // 0 if the tile is zeros; kNoMoreTiles after the last tile.
  int k_tiles;
};

inline constexpr int kNoMoreTiles = -1;

// The ring of slots, and its barriers:
//   full       of each slot and CTA: the slot has been written. In the first CTA the scheduling
//              thread writes the slot and arrives. In the other CTAs st.async writes the slot, and
//              the CTA's producer arrived when it expected the bytes with its request. A phase
//              cannot complete on bytes alone, and the bytes cannot come before they are expected,
//              since the scheduling thread sends them after all requests.
//   empty      of each slot, in the first CTA: all consumer warps of the cluster have released it.
//   requested  in the first CTA: the producers of all CTAs have requested the next tile.
//
// Producers do not release slots. A producer requests a tile after its last look at the tile
// before: work_tile(), k_tiles() and columns() are read before the k-tiles that come after the
// request are loaded. A slot is written again kSlots tiles later, when the producer has requested
// that tile, hence is done with the tile in the slot. The same holds for the parity of a full
// barrier: no thread is a whole round of the ring behind, a consumer because it releases, a
// producer because it requests.
template <WgmmaConfig config, bool kPartialM>
class WorkTileRing {
  static constexpr int kSlots = 4;
  static constexpr int kSlotBytes = 64;
  static constexpr int kReleasingWarps = config.cluster * 4 * config.consumers;
  static_assert(sizeof(ScheduledTile) == kSlotBytes && kSlotBytes % 16 == 0);

 public:
  using State = PipelineState<kSlots>;
  static constexpr int kBytes = kSlots * kSlotBytes + (2 * kSlots + 1) * kBarrierBytes;
  // Before the first tile.
  static constexpr State kStart = {kSlots - 1, 1};

  // By all threads, before a barrier of the cluster.
  void prepare(unsigned char* shared) {
    slots_ = reinterpret_cast<ScheduledTile*>(shared);
    barriers_ = shared_address(shared + kSlots * kSlotBytes);
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < kSlots; ++slot) {
        mbarrier_init(full(slot), 1);
        mbarrier_init(empty(slot), kReleasingWarps);
      }
      mbarrier_init(requested(), config.cluster);
      // Other CTAs arrive at these barriers, after the cluster's barrier that follows.
      if (config.cluster > 1) fence_barrier_init();
    }
  }

  // By the producer thread of each CTA, for the tile after the one at `current`. Other CTAs than
  // the first expect the bytes that they will be sent, before the request allows them to be sent.
  void request(const State& current, int cta) const {
    if (config.cluster > 1 && cta > 0) {
      mbarrier_arrive_expect_tx(full((current.stage + 1) % kSlots), kSlotBytes);
    }
    arrive_at_first(requested());
  }

  void wait_full(const State& state) const { mbarrier_wait(full(state.stage), state.parity); }

  const ScheduledTile& operator[](const State& state) const { return slots_[state.stage]; }

  // By all consumer threads.
  void release(const State& state) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_at_first(empty(state.stage));
  }

  // By the scheduling thread: answers requests with the tiles that `claim(slot)` writes, until it
  // returns false.
  template <class Claim>
  void broadcast(const Claim& claim) const {
    State state;
    uint32 parity = 0;
    for (bool found = true; found; state.advance()) {
      mbarrier_wait(requested(), parity);
      parity ^= 1;
      mbarrier_wait(empty(state.stage), state.parity ^ 1);
      found = claim(slots_[state.stage]);
#pragma unroll
      for (int cta = 1; cta < config.cluster; ++cta) send(state.stage, cta);
      mbarrier_arrive(full(state.stage));
    }
  }

 private:
  uint32 full(int slot) const { return barriers_ + slot * kBarrierBytes; }
  uint32 empty(int slot) const { return full(kSlots + slot); }
  uint32 requested() const { return full(2 * kSlots); }

  // The first CTA's tile, moved to another one. It is sent by st.async because readers of a plain
  // remote store would need a fence before each look.
  void send(int slot, int cta) const {
    ScheduledTile tile = slots_[slot];
    tile.work.m += cta * config.out_m();
    if (kPartialM) tile.partial -= cta * config.out_m();
    constexpr int kParts = kSlotBytes / 16;
    const auto& words = reinterpret_cast<const uint32(&)[kParts][4]>(tile);
    const uint32 address = shared_address(slots_ + slot);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      st_async(address + 16 * part, full(slot), cta, words[part]);
    }
  }

  static void arrive_at_first(uint32 barrier) {
    if constexpr (config.cluster > 1) {
      mbarrier_arrive_cluster(barrier, 0);
    } else {
      mbarrier_arrive(barrier);
    }
  }

  ScheduledTile* slots_ = nullptr;
  uint32 barriers_ = 0;
};

// The tile scheduler of numbered tiles that are claimed in order. `Tiles` says what they are:
//   kMirrors, kPartialM, kPartialN, kPartialK, kColumnStep, kTmaColumnStep, kTmaColumns
//                                  as of a tile scheduler
//   Tiles(args...)                 constructed by the kernel
//   void prepare(shared)           by all threads, at the shared memory behind the ring
//   int count()                    how many tiles there are
//   int most()                     what the host knows to be their maximum
//   ScheduledTile find(number)     by the scheduling thread: what a tile is for the cluster's first
//                                  CTA
template <WgmmaConfig config, class Tiles>
class DynamicPersistentScheduler {
  using Ring = WorkTileRing<config, Tiles::kPartialM>;

 public:
  static constexpr bool kMirrors = Tiles::kMirrors;
  static constexpr bool kDynamic = true;
  static constexpr bool kPartialM = Tiles::kPartialM;
  static constexpr bool kPartialN = Tiles::kPartialN;
  static constexpr bool kPartialK = Tiles::kPartialK;
  static constexpr int kColumnStep = Tiles::kColumnStep;
  static constexpr int kTmaColumnStep = Tiles::kTmaColumnStep;
  static constexpr int kTmaColumns = Tiles::kTmaColumns;

  struct Params {
    Tiles tiles;
    // How many tiles all clusters have claimed, in global memory. Not used in a single round.
    int32* claimed;
    Ring ring = {};

    void prepare(unsigned char* shared) {
      ring.prepare(shared);
      tiles.prepare(shared + Ring::kBytes);
    }
  };

  DynamicPersistentScheduler(const Params& params, int cta) : params_(params), cta_(cta) {}

  void request() const { params_.ring.request(state_, cta_); }

  bool next() {
    state_.advance();
    params_.ring.wait_full(state_);
    return k_tiles() != kNoMoreTiles;
  }

  WorkTile work_tile() const { return tile().work; }
  int k_tiles() const { return tile().k_tiles; }
  int columns() const { return tile().partial; }
  int rows() const { return tile().partial; }
  int skipped_k() const { return tile().partial; }

  void release() const { params_.ring.release(state_); }

  static void schedule(const Params& params) {
    // In a single round each cluster has the tile of its own number, and nothing is counted.
    const int ctas = static_cast<int>(gridDim.x);
    const bool once = params.tiles.most() <= ctas / config.cluster;
    int own = static_cast<int>(blockIdx.x) / config.cluster - ctas;
    params.ring.broadcast([&](ScheduledTile& slot) {
      own += ctas;
      int number = own;
      if (!once) number = atomicAdd(params.claimed, 1);
      const bool found = number < params.tiles.count();
      if (found) {
        slot = params.tiles.find(number);
      } else {
        slot.k_tiles = kNoMoreTiles;
      }
      return found;
    });
  }

 private:
  const ScheduledTile& tile() const { return params_.ring[state_]; }

  const Params& params_;
  int cta_;
  typename Ring::State state_ = Ring::kStart;
};

}  // namespace tilekern

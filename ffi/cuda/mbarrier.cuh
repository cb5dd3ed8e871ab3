// mbarriers: barriers in shared memory that count arrivals and bytes (sm_90), named by 32-bit
// shared addresses.
//
// The phases of an mbarrier alternate in parity, from 0. A phase completes when no arrival and no
// expected byte is pending; mbarrier_wait(parity) returns once the phase of that parity has
// completed. A parity tells only neighbouring phases apart, so a thread may be at most one phase
// behind.
//
// Bytes that complete before they are expected make the pending count negative for a while. An
// arrival that is still pending keeps the phase from completing meanwhile, so the thread that
// expects the bytes also arrives, in the same instruction.
#pragma once

#include "types.cuh"

namespace tilekern {

inline constexpr int kBarrierBytes = 8;

inline void mbarrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the mbarriers that this thread has initialised visible to the other CTAs of the cluster and
// to TMA. It comes after the last mbarrier_init() and before the barrier of the CTA or cluster.
inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

inline void mbarrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the mbarrier at the same address in another CTA of the cluster.
inline void mbarrier_arrive_cluster(uint32 barrier, int cta) {
  asm volatile(
      "{\n"
      "  .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(cta)
      : "memory");
}

// Expects `bytes` more bytes in the current phase, and arrives.
inline void mbarrier_arrive_expect_tx(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

inline void mbarrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n"
      "  .reg .pred ended;\n"
      "again:\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "  @!ended bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Where a producer or a consumer is in a ring of stages: the stage, and the parity of the phase in
// which it becomes full. A producer waits for the stage to be empty with the other parity, which
// the first time round is that of the phase before the first and has completed.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32 parity = 0;

  void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  void skip(int stages) {
    stage += stages;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
};

// Synchronises the threads of a consumer. Named barriers 1 to `consumers` are theirs.
inline void sync_consumer(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

}  // namespace tilekern

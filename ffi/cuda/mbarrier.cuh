// Barriers in shared memory that count arrivals and bytes, named by 32-bit shared addresses.
//
// A barrier's phases alternate in parity, from 0. A phase ends when all arrivals and all expected
// bytes have come in; wait(parity) returns when the phase of that parity has ended.
#pragma once

#include "types.cuh"

namespace tilekern {

inline constexpr int kBarrierBytes = 8;

inline void init_barrier(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the other blocks of the cluster and to the copy engine.
inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

inline void arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier at the same address in another block of the cluster.
inline void arrive_remote(uint32 barrier, int block) {
  asm volatile(
      "{\n"
      "  .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// Arrives, and lets the phase wait for `bytes` that copies will bring.
inline void arrive_expecting(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

inline void wait(uint32 barrier, uint32 parity) {
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

// Where a producer or a consumer is in a ring of stages.
template <int kStages>
struct RingPosition {
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

}  // namespace tilekern

// Blocks that run together on neighbouring multiprocessors (sm_90).
#pragma once

#include "types.cuh"

namespace tilekern {

inline int block_in_cluster() {
  uint32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

inline void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Sends 16 bytes to the same address of a block's shared memory, whose barrier counts them.
inline void send(uint32 address, uint32 barrier, int block, const uint32 (&words)[4]) {
  asm volatile(
      "{\n"
      "  .reg .b32 remote, counting;\n"
      "  mapa.shared::cluster.u32 remote, %0, %2;\n"
      "  mapa.shared::cluster.u32 counting, %1, %2;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
      " [remote], {%3, %4, %5, %6}, [counting];\n"
      "}" ::"r"(address),
      "r"(barrier), "r"(block), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

}  // namespace tilekern

// Thread block clusters: CTAs that run together on neighbouring SMs and address each other's shared
// memory (sm_90).
#pragma once

#include "types.cuh"

namespace tilekern {

inline int cluster_cta_rank() {
  uint32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Waits for all threads of the cluster. Each warp has to be converged (`.aligned`).
inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Stores 16 bytes at the same address of a CTA's shared memory, where the mbarrier at the same
// address as `barrier` counts them as complete. The CTA has to expect them (expect_tx): see
// mbarrier.cuh.
inline void st_async(uint32 address, uint32 barrier, int cta, const uint32 (&words)[4]) {
  asm volatile(
      "{\n"
      "  .reg .b32 remote, counting;\n"
      "  mapa.shared::cluster.u32 remote, %0, %2;\n"
      "  mapa.shared::cluster.u32 counting, %1, %2;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
      " [remote], {%3, %4, %5, %6}, [counting];\n"
      "}" ::"r"(address),
      "r"(barrier), "r"(cta), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

}  // namespace tilekern

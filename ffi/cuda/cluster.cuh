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

}  // namespace tilekern

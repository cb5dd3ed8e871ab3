// The tensor memory accelerator: boxes of strided tensors to shared memory and back (sm_90).
#pragma once

#include "types.cuh"

namespace tilekern {

// What the driver's cuTensorMapEncodeTiled writes; a kernel takes it as a __grid_constant__
// parameter.
struct alignas(64) TensorMap {
  int64 opaque[16];
};

// Of a tensor of five dimensions, innermost first, in elements. May lie beyond the tensor: loads
// bring zeros from there and stores leave it out.
struct BoxOrigin {
  int32 at[5];
};

inline void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts the copy of a box to shared memory, whose bytes `barrier` counts.
inline void load_box(uint32 destination, const TensorMap& map, const BoxOrigin& origin,
                     uint32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(destination),
      "l"(&map), "r"(origin.at[0]), "r"(origin.at[1]), "r"(origin.at[2]), "r"(origin.at[3]),
      "r"(origin.at[4]), "r"(barrier)
      : "memory");
}

// The same to the same addresses of all blocks in `blocks`, a bit each, and to their barriers.
inline void load_box_multicast(uint32 destination, const TensorMap& map, const BoxOrigin& origin,
                               uint32 barrier, uint16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
      "l"(&map), "r"(origin.at[0]), "r"(origin.at[1]), "r"(origin.at[2]), "r"(origin.at[3]),
      "r"(origin.at[4]), "r"(barrier), "h"(blocks)
      : "memory");
}

// Starts the copy of a box from shared memory, as part of the thread's current group.
inline void store_box(const TensorMap& map, const BoxOrigin& origin, uint32 source) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group"
      " [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(origin.at[0]), "r"(origin.at[1]), "r"(origin.at[2]), "r"(origin.at[3]), "r"(origin.at[4]),
      "r"(source)
      : "memory");
}

inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups still read shared memory.
template <int kPending>
inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's writes to shared memory before what the copy engine and the tensor cores
// read after the next barrier.
inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tilekern

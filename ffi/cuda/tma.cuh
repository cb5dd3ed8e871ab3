// TMA, the tensor memory accelerator: tiles of strided tensors to shared memory and back (sm_90).
#pragma once

#include "types.cuh"

namespace tilekern {

// What the driver's cuTensorMapEncodeTiled writes; a kernel takes it as a __grid_constant__
// parameter.
struct alignas(64) TensorMap {
  int64 opaque[16];
};

// Where a tile starts in a tensor of five dimensions, innermost first, in elements. A tile may
// reach beyond the tensor: loads fill that part with zeros, and stores leave it out.
struct TmaCoordinates {
  int32 at[5];
};

inline void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts the load of a tile to shared memory; the mbarrier `barrier` counts its bytes.
inline void tma_load(uint32 destination, const TensorMap& map, const TmaCoordinates& origin,
                     uint32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(destination),
      "l"(&map), "r"(origin.at[0]), "r"(origin.at[1]), "r"(origin.at[2]), "r"(origin.at[3]),
      "r"(origin.at[4]), "r"(barrier)
      : "memory");
}

// Starts to copy adjacent bytes to shared memory; the mbarrier `barrier` counts them. Both
// addresses and the number are multiples of 16.
inline void bulk_load(uint32 destination, const void* source, int bytes, uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Starts to bring a tile to L2.
inline void tma_prefetch(const TensorMap& map, const TmaCoordinates& origin) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
               "r"(origin.at[0]), "r"(origin.at[1]), "r"(origin.at[2]), "r"(origin.at[3]),
               "r"(origin.at[4])
               : "memory");
}

// Loads the tile to the same address in each CTA whose bit of `ctas` is set; the mbarrier at the
// same address as `barrier` in each of them counts the bytes.
inline void tma_load_multicast(uint32 destination, const TensorMap& map,
                               const TmaCoordinates& origin, uint32 barrier, uint16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
      "l"(&map), "r"(origin.at[0]), "r"(origin.at[1]), "r"(origin.at[2]), "r"(origin.at[3]),
      "r"(origin.at[4]), "r"(barrier), "h"(ctas)
      : "memory");
}

// Starts the store of a tile from shared memory, in the thread's current bulk group.
inline void tma_store(const TensorMap& map, const TmaCoordinates& origin, uint32 source) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group"
      " [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(origin.at[0]), "r"(origin.at[1]), "r"(origin.at[2]), "r"(origin.at[3]), "r"(origin.at[4]),
      "r"(source)
      : "memory");
}

// Closes the thread's current bulk group, which may be empty.
inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's bulk groups still read shared memory.
template <int kPending>
inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's writes to shared memory before the reads by TMA and wgmma (the async proxy)
// that follow the next barrier.
inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tilekern

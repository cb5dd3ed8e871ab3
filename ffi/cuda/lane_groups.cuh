// What kernels call in which a group of threads, a CTA, evaluates a lane:
// jax_tilekern/ops/kernel/translation writes them.
#pragma once

#include "lanes.cuh"
#include "ptx.cuh"

namespace tilekern::lax {

// Loads neighbouring elements of an operand, 16 bytes at a time.
template <typename T, int kCount>
inline void load_row(T (&row)[kCount], const T* from) {
  constexpr int kPart = 16 / sizeof(T);
  static_assert(kCount % kPart == 0);
  struct Part {
    T x[kPart];
  };
#pragma unroll
  for (int i = 0; i < kCount; i += kPart) {
    const auto part = bitcast<Part>(__ldg(reinterpret_cast<const uint4*>(from + i)));
#pragma unroll
    for (int j = 0; j < kPart; ++j) row[i + j] = part.x[j];
  }
}

// Waits for all threads of the group; each sees what the others have written.
template <int kThreads>
inline void group_barrier() {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Begins to copy elements that are `step` apart to shared memory.
template <int kThreads, int kSize, typename T>
inline void begin_copy(T* to, const T* from, long long step) {
#pragma unroll 8
  for (int i = threadIdx.x % kThreads; i < kSize; i += kThreads) {
    cp_async<sizeof(T)>(shared_address(to + i), from + i * step, true);
  }
}

// The value of another thread of the warp.
template <typename T>
inline T value_across(T x, int mask) {
  // Shuffles have no types of fewer than 32 bits.
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_xor_sync(~0u, static_cast<int>(x), mask));
  } else {
    return __shfl_xor_sync(~0u, x, mask);
  }
}
// That of the thread so many places before.
template <typename T>
inline T value_before(T x, int places) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_up_sync(~0u, static_cast<int>(x), places));
  } else {
    return __shfl_up_sync(~0u, x, places);
  }
}
// That of one thread of the warp.
template <typename T>
inline T value_of(T x, int lane) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_sync(~0u, static_cast<int>(x), lane));
  } else {
    return __shfl_sync(~0u, x, lane);
  }
}

// Arrays of up to so many elements are reduced together.
inline constexpr int kMaxReduced = 16;

template <int kThreads>
inline void* reduction_memory() {
  __shared__ unsigned long long memory[kThreads / 32 * kMaxReduced];
  return memory;
}

// Reduces each element of `x` over the threads of the group, in a fixed order. All threads have the
// same bits then: those of one thread, because `combine` may tell zeros by their order.
template <int kThreads, typename T, int kCount, typename Combine>
inline void reduce_in_group(T (&x)[kCount], Combine combine) {
  static_assert(kCount <= kMaxReduced);
  constexpr int kPadded = kCount > 8 ? 16 : kCount > 4 ? 8 : kCount > 2 ? 4 : kCount;
  constexpr int kLanes = 32 / kPadded;  // For each element.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T own[kPadded];
#pragma unroll
  for (int i = 0; i < kPadded; ++i) own[i] = x[i < kCount ? i : 0];
  // Half of the threads goes on with half of the elements, until each thread has one.
  int mask = 16;
#pragma unroll
  for (int half = kPadded / 2; half > 0; half /= 2, mask /= 2) {
    const bool upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const T other = value_across(upper ? own[i] : own[i + half], mask);
      own[i] = combine(upper ? own[i + half] : own[i], other);
    }
  }
#pragma unroll
  for (; mask > 0; mask /= 2) own[0] = combine(own[0], value_across(own[0], mask));
  if constexpr (kThreads == 32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = value_of(own[0], i * kLanes);
  } else {
    T* const of_warps = static_cast<T*>(reduction_memory<kThreads>());
    __syncthreads();  // The memory has been read for the reduction before.
    if (lane % kLanes == 0 && lane / kLanes < kCount) {
      of_warps[warp * kCount + lane / kLanes] = own[0];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = of_warps[i];
#pragma unroll
      for (int other = 1; other < kThreads / 32; ++other) {
        x[i] = combine(x[i], of_warps[other * kCount + i]);
      }
    }
  }
}
template <int kThreads, typename T, typename Combine>
inline T reduced_in_group(T x, Combine combine) {
  T one[1] = {x};
  reduce_in_group<kThreads>(one, combine);
  return one[0];
}

// Reduces the values of the threads before this one.
template <int kThreads, typename T, typename Combine>
inline T reduced_before(T x, T identity, Combine combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = value_before(x, step);
    if (lane >= step) x = combine(other, x);
  }
  const T of_lane_before = value_before(x, 1);
  const T before = lane == 0 ? identity : of_lane_before;
  if constexpr (kThreads == 32) return before;
  T* const of_warps = static_cast<T*>(reduction_memory<kThreads>());
  __syncthreads();
  if (lane == 31) of_warps[warp] = x;
  __syncthreads();
  T sum = identity;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) sum = combine(sum, of_warps[i]);
  }
  return combine(sum, before);
}

// Finds the best of the threads' values, and where it is: the lowest index among equal ones.
template <int kThreads, typename T, typename Better>
inline void find_in_group(T& best, int& where, Better better) {
  const auto compare = [&](T x, int at) {
    if (better(x, best) || (!better(best, x) && at < where)) {
      best = x;
      where = at;
    }
  };
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    compare(value_across(best, mask), value_across(where, mask));
  }
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    T* const of_warps = static_cast<T*>(reduction_memory<kThreads>());
    int* const places = static_cast<int*>(reduction_memory<kThreads>()) + 2 * kWarps;
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      of_warps[threadIdx.x / 32] = best;
      places[threadIdx.x / 32] = where;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) compare(of_warps[warp], places[warp]);
  }
}

}  // namespace tilekern::lax

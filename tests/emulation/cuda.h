// CUDA's threads, barriers and warp functions on a CPU, for kernels without tensor cores, TMA or
// clusters. The threads of a CTA are fibers on one CPU thread, and CTAs run one after the other, so
// that what is static is shared by a CTA. See tests/test_emulated_kernels.py.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "instructions.h"

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) float4 {
  float x = 0, y = 0, z = 0, w = 0;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

namespace emulation {

// What a number of threads wait for.
struct Barrier {
  int threads = 0, arrived = 0;
  long generation = 0;
};

struct Thread {
  ucontext_t start;
  jmp_buf context;
  std::vector<char> stack;
  bool started, ended;
  int index;
};

inline std::vector<Thread> threads;
inline Thread* running;
inline jmp_buf scheduler;
inline std::function<void()> kernel;
inline Barrier cta, warps[32];
inline std::uint64_t lanes[32][32];
inline int block_index, block_row, grid_size;

inline int warp() { return running->index / 32; }
inline int lane() { return running->index % 32; }

// Switches from the scheduler to a fiber. Those of ucontext.h would make a system call each time,
// for the mask of signals.
inline void resume(Thread& thread) {
  running = &thread;
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.context, 1);
  thread.started = true;
  setcontext(&thread.start);
}
// Switches back.
inline void yield() {
  if (_setjmp(running->context) == 0) _longjmp(scheduler, 1);
}

inline void wait(Barrier& barrier) {
  const long generation = barrier.generation;
  if (++barrier.arrived == barrier.threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
}

// Calls `use` with the values of all lanes of a warp.
template <typename T, typename Use>
auto with_values_of_warp(T value, Use use) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::memcpy(&lanes[warp()][lane()], &value, sizeof value);
  wait(warps[warp()]);
  const auto result = use([](int lane) {
    T value;
    std::memcpy(&value, &lanes[warp()][lane], sizeof value);
    return value;
  });
  wait(warps[warp()]);
  return result;
}

inline void run() {
  kernel();
  running->ended = true;
  yield();
}

template <typename Kernel>
void launch(int grid, int block, Kernel body) {
  kernel = body;
  grid_size = grid;
  for (block_index = 0; block_index < grid; ++block_index) {
    cta = {block};
    std::fill(std::begin(warps), std::end(warps), Barrier{32});
    threads.resize(block);
    for (int i = 0; i < block; ++i) {
      Thread& thread = threads[i];
      thread.index = i;
      thread.started = thread.ended = false;
      thread.stack.resize(1 << 17);
      getcontext(&thread.start);
      thread.start.uc_stack.ss_sp = thread.stack.data();
      thread.start.uc_stack.ss_size = thread.stack.size();
      makecontext(&thread.start, run, 0);
    }
    for (bool any = true; any;) {
      any = false;
      for (Thread& thread : threads) {
        if (thread.ended) continue;
        any = true;
        resume(thread);
      }
    }
  }
}

struct Index {
  int x, y = 0;
};
struct Extent {
  unsigned x;
};

}  // namespace emulation

#define threadIdx (emulation::Index{emulation::running->index})
#define blockIdx (emulation::Index{emulation::block_index, emulation::block_row})
#define gridDim (emulation::Extent{static_cast<unsigned>(emulation::grid_size)})

inline void __syncthreads() { emulation::wait(emulation::cta); }
inline int __syncthreads_or(int vote) {
  static int votes;
  __syncthreads();
  votes = 0;
  __syncthreads();
  votes |= vote;
  __syncthreads();
  return votes;
}
inline void __syncwarp() { emulation::wait(emulation::warps[emulation::warp()]); }
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned, T value, int source, int width) {
  const int from = emulation::lane() / width * width + source % width;
  return emulation::with_values_of_warp(value, [&](auto of) { return of(from); });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned other) {
  const int from = emulation::lane() ^ static_cast<int>(other);
  return emulation::with_values_of_warp(value, [&](auto of) { return of(from); });
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned step) {
  const int lane = emulation::lane(), from = lane - static_cast<int>(step);
  return emulation::with_values_of_warp(value, [&](auto of) { return of(from < 0 ? lane : from); });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulation::with_values_of_warp(value, [](auto of) {
    unsigned largest = 0;
    for (int lane = 0; lane < 32; ++lane) largest = std::max(largest, of(lane));
    return largest;
  });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulation::with_values_of_warp(vote, [](auto of) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(of(lane)) << lane;
    return votes;
  });
}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address += value;
  return old;
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  const unsigned old = *address;
  *address = old >= last ? 0 : old + 1;
  return old;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(unsigned bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __double2hiint(double value) {
  return static_cast<int>(std::bit_cast<std::uint64_t>(value) >> 32);
}
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
// The sum of the products of four signed bytes, and a third number.
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) {
    sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  }
  return sum;
}
inline float __fsqrt_rn(float value) { return std::sqrt(value); }
inline double __dsqrt_rn(double value) { return std::sqrt(value); }
inline double __drcp_rn(double value) { return 1 / value; }

namespace tilekern {

template <int kBytes>
struct Bits;
// The bits of an aligned vector, with zeros above fewer than 4 bytes.
template <int kBytes>
Bits<kBytes> load(const void* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % kBytes != 0) std::abort();
  Bits<kBytes> bits = {};
  std::memcpy(&bits, address, kBytes);
  return bits;
}

inline void* shared_address(const void* pointer) { return const_cast<void*>(pointer); }
template <int kBytes>
void cp_async(void* destination, const void* source, bool inside) {
  if (inside) {
    std::memcpy(destination, source, kBytes);
  } else {
    std::memset(destination, 0, kBytes);
  }
}
inline void cp_async_commit() {}
template <int kPending>
void cp_async_wait() {}

}  // namespace tilekern

// The threads of a grid on one thread of a CPU: each is a fiber, which runs until it waits.
//
// The CTAs of a cluster run side by side, and clusters one after the other. Shared memory has
// 32-bit addresses: a window of 2^18 bytes for each CTA of a cluster, whose bits above are the
// CTA's rank. What is declared `__shared__` without `extern` is static, and so belongs to one CTA
// at a time.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace emulation {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  unsigned size() const { return x * y * z; }
};

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated kernel: %s\n", what);
  std::_Exit(3);
}

// Whether asynchronous operations take place when they are issued, or when they are waited for:
// those that read shared memory (MMAs, stores by TMA), and those that write it (copies). A right
// kernel gives the same results.
inline bool late_reads, late_writes;
// The order in which threads get their turns: forwards or backwards.
inline bool backwards;
// Unless zero, the seed of random choices of warps that get no turns for some time, while others
// make progress.
inline std::uint32_t held;

// What a number of threads wait for.
struct Barrier {
  int threads = 0, arrived = 0;
  long generation = 0;
};

using Action = std::function<void()>;

// Asynchronous operations of one thread: those since the last commit, and groups in their order.
class Groups {
 public:
  void add(Action action, bool late) {
    if (late) {
      open_.push_back(std::move(action));
    } else {
      action();
    }
  }
  void commit() {
    groups_.push_back(std::exchange(open_, {}));
    ++committed_;
  }
  long committed() const { return committed_; }
  // Runs the first groups, those up to a number of them, unless they have run.
  void run_first(long count) {
    if (count > 0) wait(static_cast<std::size_t>(std::max(0L, committed_ - count)));
  }
  void wait(std::size_t pending) {
    for (; groups_.size() > pending; groups_.pop_front()) {
      for (const Action& action : groups_.front()) action();
    }
  }
  void finish() {
    commit();
    wait(0);
  }

 private:
  std::vector<Action> open_;
  std::deque<std::vector<Action>> groups_;
  long committed_ = 0;
};

struct Cta;

struct Thread {
  Cta* cta;
  int index;
  ucontext_t start;
  jmp_buf context;
  std::vector<char> stack;
  bool started = false, ended = false;
  Groups copies, mmas, bulk_stores;
};

inline constexpr int kWindowBits = 18;
inline constexpr std::uint32_t kWindow = 1u << kWindowBits;
// Behind programs, their static variables, and their heaps, which start at most 1 GB later; before
// what AddressSanitizer takes.
inline constexpr std::uint32_t kShared = 0x60000000;

struct Cta {
  unsigned rank;
  Dim3 index;
  std::vector<Thread> threads;
  Barrier all, warps[32], named[16];
  std::uint64_t lanes[32][32];
  int votes;
  std::uint32_t base() const { return kShared + rank * kWindow; }
};

inline Dim3 grid, block, cluster;
inline std::uint32_t shared_bytes;
inline std::vector<Cta> ctas;
inline Thread* running;
inline jmp_buf scheduler;
inline Action kernel;
// What has been done since the threads last had their turns; if nothing has, they wait forever.
inline bool progress;
// What arrives at an mbarrier, by its address.
inline std::map<std::uint32_t, std::vector<Action>> arriving;

inline Cta& cta() { return *running->cta; }
inline int warp() { return running->index / 32; }
inline int lane() { return running->index % 32; }

inline char* shared_at(std::uint32_t address, std::size_t bytes) {
  if (address >= kShared) {
    const std::uint32_t offset = (address - kShared) % kWindow;
    if (offset + bytes > shared_bytes || (address - kShared) / kWindow >= ctas.size()) {
      fail("access beyond shared memory");
    }
  }
  if (address % std::min<std::size_t>(bytes, 16) != 0) fail("misaligned access to shared memory");
  return reinterpret_cast<char*>(static_cast<std::uintptr_t>(address));
}
// The same address in the window of another CTA of the cluster.
inline std::uint32_t in_cta(std::uint32_t address, unsigned rank) {
  return kShared + rank * kWindow + (address - kShared) % kWindow;
}

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

// Gives others their turns before an instruction.
inline void let_others() {
  progress = true;
  yield();
}

inline void wait(Barrier& barrier) {
  const long generation = barrier.generation;
  progress = true;
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
  Cta& own = cta();
  std::memcpy(&own.lanes[warp()][lane()], &value, sizeof value);
  wait(own.warps[warp()]);
  const auto result = use([&](int lane) {
    T value;
    std::memcpy(&value, &own.lanes[warp()][lane], sizeof value);
    return value;
  });
  wait(own.warps[warp()]);
  return result;
}

inline void run_thread() {
  kernel();
  running->copies.finish();
  running->mmas.finish();
  running->bulk_stores.finish();
  running->ended = true;
  progress = true;
  // A warp, or a CTA, does not wait for a thread that has ended.
  Cta& own = cta();
  for (Barrier* barrier : {&own.all, &own.warps[warp()]}) {
    if (--barrier->threads > 0 && barrier->arrived == barrier->threads) {
      barrier->arrived = 0;
      ++barrier->generation;
    }
  }
  yield();
}

// Warps that get no turns.
class HeldWarps {
 public:
  // None if the seed is zero.
  HeldWarps(std::uint32_t seed, std::size_t ctas) : random_(seed), rounds_(seed ? 32 * ctas : 0) {}

  bool contain(const Thread& thread) const {
    return !rounds_.empty() && rounds_[place(thread)] > 0;
  }
  // Holds others back. Without progress it lets all go, and returns whether there were any.
  bool next_round(bool progress) {
    bool any = false;
    for (std::size_t i = 0; i < rounds_.size(); ++i) {
      any |= rounds_[i] > 0;
      if (!progress) {
        rounds_[i] = 0;
      } else if (rounds_[i] > 0) {
        --rounds_[i];
      } else if (random_() % kOneIn == 0) {
        // A warp, or those of its warpgroup from it on.
        const std::size_t end = random_() % 4 == 0 ? i + 1 : (i / 4 + 1) * 4;
        std::fill(rounds_.begin() + i, rounds_.begin() + end, random_() % kMostRounds);
      }
    }
    return any && !progress;
  }

 private:
  static constexpr int kOneIn = 512, kMostRounds = 1024;
  static std::size_t place(const Thread& thread) {
    return 32 * thread.cta->rank + thread.index / 32;
  }

  std::minstd_rand random_;
  // For how many rounds each warp of each CTA is held.
  std::vector<int> rounds_;
};

inline void run_cluster(Dim3 first) {
  const int threads = block.size();
  for (Cta& one : ctas) {
    one.index = first;
    one.index.x += one.rank % cluster.x;
    one.index.y += one.rank / cluster.x % cluster.y;
    one.index.z += one.rank / cluster.x / cluster.y;
    one.all = {threads};
    for (int warp = 0; warp < 32; ++warp) one.warps[warp] = {std::min(32, threads - 32 * warp)};
    std::memset(reinterpret_cast<void*>(std::uintptr_t{one.base()}), 0xA5, kWindow);
    for (int i = 0; i < threads; ++i) {
      Thread& thread = one.threads[i];
      thread.cta = &one;
      thread.index = i;
      thread.started = thread.ended = false;
      thread.mmas = thread.copies = thread.bulk_stores = {};
      getcontext(&thread.start);
      thread.start.uc_stack.ss_sp = thread.stack.data();
      thread.start.uc_stack.ss_size = thread.stack.size();
      makecontext(&thread.start, run_thread, 0);
    }
  }
  const int count = threads * static_cast<int>(ctas.size());
  HeldWarps held_warps(held, ctas.size());
  int idle = 0;
  for (bool any = true; any;) {
    any = progress = false;
    for (int i = 0; i < count; ++i) {
      const int turn = backwards ? count - 1 - i : i;
      Thread& thread = ctas[turn / threads].threads[turn % threads];
      if (thread.ended) continue;
      any = true;
      if (!held_warps.contain(thread)) resume(thread);
    }
    if (held_warps.next_round(progress)) continue;
    idle = progress ? 0 : idle + 1;
    if (any && idle > 3) {
      for (Cta& one : ctas) {
        int ended = 0;
        for (const Thread& thread : one.threads) ended += thread.ended;
        std::fprintf(stderr, "CTA %u, %u, %u: %d of %zu threads have ended, %d wait for all;",
                     one.index.x, one.index.y, one.index.z, ended, one.threads.size(),
                     one.all.arrived);
        for (int i = 0; i < 16; ++i) {
          const Barrier& named = one.named[i];
          if (named.arrived > 0) {
            std::fprintf(stderr, " %d of %d at barrier %d;", named.arrived, named.threads, i);
          }
        }
        std::fprintf(stderr, "\n");
      }
      fail("all threads wait forever");
    }
  }
  for (auto& [address, actions] : arriving) {
    if (!actions.empty()) fail("a copy that no thread has waited for");
  }
}

inline void launch(Dim3 grid_of, Dim3 block_of, Dim3 cluster_of, std::uint32_t bytes, Action body) {
  grid = grid_of;
  block = block_of;
  cluster = cluster_of;
  shared_bytes = bytes;
  kernel = std::move(body);
  static void* const windows =
      mmap(reinterpret_cast<void*>(std::uintptr_t{kShared}), 8 * kWindow, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (windows == MAP_FAILED) fail("no memory below 4 GB");
  ctas.assign(cluster.size(), {});
  for (unsigned rank = 0; rank < ctas.size(); ++rank) {
    ctas[rank].rank = rank;
    ctas[rank].threads.resize(block.size());
    for (Thread& thread : ctas[rank].threads) thread.stack.resize(1 << 16);
  }
  for (unsigned z = 0; z < grid.z; z += cluster.z) {
    for (unsigned y = 0; y < grid.y; y += cluster.y) {
      for (unsigned x = 0; x < grid.x; x += cluster.x) run_cluster({x, y, z});
    }
  }
}

}  // namespace emulation

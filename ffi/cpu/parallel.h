// Distribution of work among the calling thread and XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace tilekern::cpu {

// Returns once `ready()` holds; another running thread makes it true soon.
template <typename Ready>
void SpinUntil(const Ready& ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (spins > 1000) std::this_thread::yield();
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }
}

class Workers {
 public:
  using Schedule = std::function<void(std::function<void()>)>;

  // Uses the calling thread alone.
  Workers() : threads_(1) {}
  Workers(int64_t threads, Schedule schedule)
      : threads_(threads < 1 ? 1 : threads), schedule_(std::move(schedule)) {}

  int64_t threads() const { return threads_; }

  // Calls body(0) .. body(tickets - 1), each once. Tickets are handed out in order, to the caller
  // as well, so a body may wait for the effect of a lower ticket, however busy the pool is. A body
  // must not throw, because other threads still use the caller's data.
  void Run(int64_t tickets, const std::function<void(int64_t)>& body) const {
    auto job = std::make_shared<Job>(tickets, &body);
    const int64_t helpers = (tickets < threads_ ? tickets : threads_) - 1;
    for (int64_t i = 0; i < helpers; ++i) schedule_([job] { job->Draw(); });
    job->Draw();
    SpinUntil([&] { return job->done.load(std::memory_order_acquire) == tickets; });
  }

  // Calls body(first, last) for ranges that partition 0 .. count - 1, where each index moves about
  // `bytes` bytes. Results must not depend on the ranges.
  void RunRanges(int64_t count, int64_t bytes,
                 const std::function<void(int64_t, int64_t)>& body) const {
    if (threads_ == 1 || count * bytes < 2 * kTaskBytes) return body(0, count);
    const int64_t each = std::max<int64_t>(kTaskBytes / std::max<int64_t>(bytes, 1), 1);
    Run((count + each - 1) / each,
        [&](int64_t task) { body(task * each, std::min((task + 1) * each, count)); });
  }

 private:
  // The minimal bytes per task, about ten microseconds of work.
  static constexpr int64_t kTaskBytes = 128 << 10;

  struct Job {
    Job(int64_t tickets, const std::function<void(int64_t)>* body) : tickets(tickets), body(body) {}

    // A helper that starts after the last ticket is drawn does not access `body`.
    void Draw() noexcept {
      for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tickets;) {
        (*body)(t);
        done.fetch_add(1, std::memory_order_release);
      }
    }

    const int64_t tickets;
    const std::function<void(int64_t)>* const body;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };

  const int64_t threads_;
  const Schedule schedule_;
};

}  // namespace tilekern::cpu

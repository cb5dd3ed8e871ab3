#include "rendezvous.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

namespace tilekern {
namespace {

using Clock = std::chrono::steady_clock;
using Key = std::tuple<int64_t, size_t, uint64_t, uint64_t>;

// The other thread usually arrives within microseconds, sooner than a sleeping thread wakes.
constexpr std::chrono::milliseconds kSpin(1);
constexpr std::chrono::microseconds kSleep(50);

std::mutex& Mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

Key KeyOf(const Group& group) { return {group.run, group.size, group.stride, group.number}; }

}  // namespace

// A meeting, whose members write under the mutex.
struct Meeting::State {
  struct Member {
    bool has_offered = false, is_sending = false, has_sent = false;
    Offer offer;
    std::vector<std::vector<SharedEvent>> sent;
  };
  std::vector<Member> members;
  std::string failure;
  size_t left = 0;
};

// The meetings of a group that have not ended, and how many each member has joined.
struct Meeting::Calls {
  std::vector<uint64_t> joined;
  std::map<uint64_t, std::shared_ptr<State>> meetings;

  static std::map<Key, Calls>& All() {
    static auto* all = new std::map<Key, Calls>;
    return *all;
  }
};

Meeting::Meeting(const Group& group, size_t member, std::chrono::milliseconds patience)
    : group_(group), member_(member), patience_(patience) {
  std::lock_guard lock(Mutex());
  Calls& calls = Calls::All()[KeyOf(group_)];
  calls.joined.resize(group_.size);
  call_ = calls.joined[member_]++;
  std::shared_ptr<State>& state = calls.meetings[call_];
  if (state == nullptr) {
    state = std::make_shared<State>();
    state->members.resize(group_.size);
  }
  state_ = state;
}

Meeting::~Meeting() {
  std::lock_guard lock(Mutex());
  if (++state_->left < group_.size) return;
  const auto calls = Calls::All().find(KeyOf(group_));
  calls->second.meetings.erase(call_);
  // All members have then joined as many meetings, so that the next one may be counted from 0.
  if (calls->second.meetings.empty()) Calls::All().erase(calls);
}

void Meeting::Open(Offer offer) {
  std::lock_guard lock(Mutex());
  State::Member& own = state_->members[member_];
  own.offer = std::move(offer);
  own.has_offered = true;
}

template <typename Ready>
std::string Meeting::Await(size_t other, const char* what, Ready ready) {
  std::unique_lock lock(Mutex());
  const Clock::time_point start = Clock::now();
  while (state_->failure.empty() && !ready(state_->members[other])) {
    const auto waited = Clock::now() - start;
    if (waited > patience_) {
      const auto seconds = std::chrono::duration<double>(patience_).count();
      state_->failure = "device " + std::to_string(member_) + " of axis " + group_.axis + ", of " +
                        std::to_string(group_.size) + ", waited " +
                        std::to_string(static_cast<int64_t>(seconds)) + " s for device " +
                        std::to_string(other) + " to " + what + " in run " +
                        std::to_string(group_.run);
      break;
    }
    lock.unlock();
    if (waited < kSpin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
    lock.lock();
  }
  return state_->failure;
}

std::string Meeting::AwaitOffers(std::vector<Offer>& offers) {
  for (size_t other = 0; other < group_.size; ++other) {
    std::string problem =
        Await(other, "arrive", [](const State::Member& member) { return member.has_offered; });
    if (!problem.empty()) return problem;
  }
  std::lock_guard lock(Mutex());
  if (!state_->failure.empty()) return state_->failure;
  state_->members[member_].is_sending = true;
  for (const State::Member& member : state_->members) offers.push_back(member.offer);
  return {};
}

void Meeting::Send(std::vector<std::vector<SharedEvent>> events) {
  std::lock_guard lock(Mutex());
  State::Member& own = state_->members[member_];
  own.sent = std::move(events);
  own.has_sent = true;
}

std::string Meeting::AwaitParts(size_t sender, std::vector<SharedEvent>& events) {
  std::string problem =
      Await(sender, "send", [](const State::Member& member) { return member.has_sent; });
  if (!problem.empty()) return problem;
  std::lock_guard lock(Mutex());
  events = state_->members[sender].sent[member_];
  return {};
}

std::vector<SharedEvent> Meeting::Abandon(const std::string& problem) {
  std::unique_lock lock(Mutex());
  if (state_->failure.empty()) state_->failure = problem;
  state_->members[member_].is_sending = false;
  // Those who send do not wait for anybody, and none begins after a failure.
  const auto is_sending = [](const State::Member& member) {
    return member.is_sending && !member.has_sent;
  };
  while (std::any_of(state_->members.begin(), state_->members.end(), is_sending)) {
    lock.unlock();
    std::this_thread::sleep_for(kSleep);
    lock.lock();
  }
  std::vector<SharedEvent> events;
  for (const State::Member& member : state_->members) {
    if (member.has_sent && !member.sent.empty()) {
      const std::vector<SharedEvent>& own_parts = member.sent[member_];
      events.insert(events.end(), own_parts.begin(), own_parts.end());
    }
  }
  return events;
}

}  // namespace tilekern

// Where the host threads of several devices of one process meet, while they execute one program.
//
// The devices of a group make the same calls in the same order, as SPMD programs do. In each call a
// thread first offers memory and never waits before that; it then waits for all offers, sends, and
// waits for what others have sent. So a thread waits only for one that is still to arrive at the
// call, or that sends without waiting for anything: no cycle of waiting threads exists.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace tilekern {

// An event that returns to its pool once nobody refers to it.
using SharedEvent = std::shared_ptr<CUevent_st>;

// The devices along a mesh axis, in one execution (a run) of a program.
struct Group {
  int64_t run;
  std::string axis;  // for messages: programs of one run may name an axis differently
  size_t size;
  uint64_t stride;  // the distance between two neighbours' numbers in the program
  uint64_t number;  // among the groups of this size and stride
};

// Memory that other devices may write once the event has happened.
struct Offer {
  char* memory = nullptr;
  SharedEvent free;
};

// One device's part in one call of its group. The k-th call of each member is one meeting, which
// ends when all members have left it; then nothing of it is kept, and a run may use its identifier
// again.
class Meeting {
 public:
  Meeting(const Group& group, size_t member, std::chrono::milliseconds patience);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  void Open(Offer offer);

  // Waits until all members have offered memory. This member sends then, and calls Send even where
  // it could not send everything. Returns an error message, or nothing, as AwaitParts does.
  std::string AwaitOffers(std::vector<Offer>& offers);

  // Tells each member the events after which it has the parts that this member sends it.
  void Send(std::vector<std::vector<SharedEvent>> events);

  // Waits until a member has sent its parts.
  std::string AwaitParts(size_t sender, std::vector<SharedEvent>& events);

  // Ends the meeting for all members, which get `problem` if they wait for another. Returns the
  // events behind everything that is written to this member's memory, to which nobody sends later.
  std::vector<SharedEvent> Abandon(const std::string& problem);

 private:
  struct State;
  struct Calls;
  template <typename Ready>
  std::string Await(size_t other, const char* what, Ready ready);

  const Group group_;
  const size_t member_;
  const std::chrono::milliseconds patience_;
  uint64_t call_;
  std::shared_ptr<State> state_;
};

}  // namespace tilekern

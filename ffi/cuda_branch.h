// A second stream, for launches that run beside those on the stream of a call, and before them
// where both wait for SMs.
#pragma once

#include <string>

#include "cuda_driver.h"

namespace tilekern {

// The branch of one execution of a plan. A graph that captures the stream of the call captures the
// branch too, because they only wait for each other by events.
class Branch {
 public:
  // Opens no stream before the first Fork.
  Branch(const Driver& driver, CUcontext context, CUstream main)
      : driver_(driver), context_(context), main_(main) {}

  // Lets the branch wait for all that has been launched on the main stream. Returns an error
  // message, or nothing, as Join does.
  std::string Fork();

  // Lets the main stream wait for the branch, if it has been forked since the last time.
  std::string Join();

  CUstream stream() const { return lane_->stream; }

  // A stream and its events, of one main stream.
  struct Lane {
    CUstream stream;
    CUevent forked, joined;
  };

 private:
  const Driver& driver_;
  const CUcontext context_;
  const CUstream main_;
  const Lane* lane_ = nullptr;
  bool forked_ = false;
};

}  // namespace tilekern

#include "cuda_branch.h"

#include <map>
#include <mutex>
#include <utility>

namespace tilekern {
namespace {

// Returns the lane of a main stream. Calls on one stream are executed one after the other, so that
// they may share it; a stream that is being captured shares it with no other. Lanes are never
// destroyed: a stream that has the address of an earlier one has its lane.
Or<const Branch::Lane*> LaneOf(const Driver& driver, CUcontext context, CUstream main) {
  static auto* mutex = new std::mutex;
  static auto* lanes = new std::map<std::pair<CUcontext, CUstream>, Branch::Lane>;
  std::lock_guard lock(*mutex);
  const auto known = lanes->find({context, main});
  if (known != lanes->end()) return &known->second;
  RelaxedCapture relaxed(driver);
  Branch::Lane lane = {};
  int least = 0, greatest = 0;
  CUresult error = driver.cuCtxGetStreamPriorityRange(&least, &greatest);
  if (!error) {
    error = driver.cuStreamCreateWithPriority(&lane.stream, CU_STREAM_NON_BLOCKING, greatest);
  }
  if (!error) error = driver.cuEventCreate(&lane.forked, CU_EVENT_DISABLE_TIMING);
  if (!error) error = driver.cuEventCreate(&lane.joined, CU_EVENT_DISABLE_TIMING);
  if (error) return "a second stream: " + driver.Text(error);
  return &lanes->emplace(std::pair{context, main}, lane).first->second;
}

// Lets one stream wait for another.
std::string Wait(const Driver& driver, CUstream stream, CUstream other, CUevent event) {
  CUresult error = driver.cuEventRecord(event, other);
  if (!error) error = driver.cuStreamWaitEvent(stream, event, 0);
  return error ? "an event between streams: " + driver.Text(error) : std::string();
}

}  // namespace

std::string Branch::Fork() {
  if (lane_ == nullptr) {
    Or<const Lane*> found = LaneOf(driver_, context_, main_);
    if (auto* why = std::get_if<std::string>(&found)) return *why;
    lane_ = std::get<const Lane*>(found);
  }
  forked_ = true;
  return Wait(driver_, lane_->stream, main_, lane_->forked);
}

std::string Branch::Join() {
  if (!forked_) return {};
  forked_ = false;
  return Wait(driver_, main_, lane_->stream, lane_->joined);
}

}  // namespace tilekern

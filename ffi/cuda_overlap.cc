#include "cuda_overlap.h"

#include <map>
#include <mutex>
#include <utility>

#include "rendezvous.h"

namespace tilekern {
namespace {

// A context's stream for copies, and its events. They are never destroyed, as XLA's contexts are
// not.
class Copies {
 public:
  // Returns those of `context`, which is current.
  static Or<Copies*> Of(const Driver& driver, CUcontext context) {
    static auto* mutex = new std::mutex;
    static auto* known = new std::map<CUcontext, Copies*>;
    std::lock_guard lock(*mutex);
    Copies*& copies = (*known)[context];
    if (copies != nullptr) return copies;
    RelaxedCapture relaxed(driver);
    CUstream stream;
    int least = 0, greatest = 0;
    CUresult error = driver.cuCtxGetStreamPriorityRange(&least, &greatest);
    if (!error)
      error = driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, greatest);
    if (error) return "a stream for copies: " + driver.Text(error);
    return copies = new Copies(stream);
  }

  CUstream stream() const { return stream_; }

  // Returns an event that nothing waits for and nobody refers to; `error` says whether there is
  // one.
  SharedEvent Event(const Driver& driver, CUresult& error) {
    CUevent event = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        event = free_.back();
        free_.pop_back();
      }
    }
    error = event == nullptr ? driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) : CUDA_SUCCESS;
    if (error) return nullptr;
    return SharedEvent(event, [this](CUevent unused) {
      std::lock_guard lock(mutex_);
      free_.push_back(unused);
    });
  }

 private:
  explicit Copies(CUstream stream) : stream_(stream) {}

  const CUstream stream_;
  std::mutex mutex_;
  std::vector<CUevent> free_;
};

// One call. Steps after one that fails do nothing, but for those that end the call.
//
// A stream waits only for events that have been recorded: a thread tells others of an event after
// it has recorded it. So each device's work depends only on work that has been enqueued before, by
// whichever thread, and no cycle of waiting streams exists. No kernel waits for another device, so
// that copies need no SM which a waiting kernel occupies.
//
// XLA owns all buffers, and orders their use by the call's stream. Other devices write to `receive`
// after the event of the offer, which is recorded on that stream, and the stream waits for all of
// these copies before the call ends. It also waits for the copies that read `lhs` and `send`.
class OverlappedProduct {
 public:
  OverlappedProduct(const Driver& driver, const LaunchPlan& plan,
                    const std::vector<CUfunction>& functions, CUcontext context, CUstream stream,
                    const std::vector<DeviceBuffer>& buffers, Copies& copies,
                    const Execution& execution)
      : driver_(driver),
        plan_(plan),
        x_(*plan.exchange),
        functions_(functions),
        context_(context),
        stream_(stream),
        buffers_(buffers),
        copies_(copies),
        member_(execution.device / x_.stride % x_.size),
        meeting_(
            {execution.run, x_.axis, x_.size, x_.stride,
             execution.device / (x_.stride * x_.size) * x_.stride + execution.device % x_.stride},
            member_, execution.patience) {}

  std::string Run() {
    const uint64_t lhs_parts = x_.scatters ? x_.size * x_.parts : x_.parts;
    const uint64_t out_parts = x_.scatters ? x_.parts : x_.size * x_.parts;
    lhs_bytes_ = PartOf(x_.lhs, lhs_parts);
    out_bytes_ = PartOf(x_.out, out_parts);
    const uint64_t others = x_.scatters ? x_.size - 1 : x_.size;
    Require(x_.receive, others * x_.parts * (x_.scatters ? out_bytes_ : lhs_bytes_));
    if (x_.scatters) Require(x_.send, others * x_.parts * out_bytes_);

    offer_ = {buffers_[x_.receive].address, Record(stream_)};
    if (problem_.empty()) meeting_.Open(offer_);
    x_.scatters ? Scatter() : Gather();
    if (!problem_.empty()) {
      for (const SharedEvent& event : meeting_.Abandon(problem_)) Wait(stream_, event);
    }
    Wait(stream_, Record(copies_.stream()));
    return problem_;
  }

 private:
  // Multiplies this device's own shard, then those of the others in the order in which they come.
  void Gather() {
    for (uint64_t part = 0; part < x_.parts; ++part) {
      Multiply(Address(x_.lhs, part * lhs_bytes_), member_ * x_.parts + part);
    }
    std::vector<Offer> offers = Offers();
    Wait(copies_.stream(), offer_.free);
    std::vector<std::vector<SharedEvent>> sent(x_.size);
    for (uint64_t distance = 1; distance < offers.size(); ++distance) {
      const size_t to = (member_ + distance) % x_.size;
      Wait(copies_.stream(), offers[to].free);
      for (uint64_t part = 0; part < x_.parts; ++part) {
        Copy(offers[to].memory + (member_ * x_.parts + part) * lhs_bytes_,
             Address(x_.lhs, part * lhs_bytes_), lhs_bytes_);
        sent[to].push_back(Record(copies_.stream()));
      }
    }
    if (!offers.empty()) meeting_.Send(std::move(sent));
    if (x_.keeps) {
      const uint64_t shard = x_.parts * lhs_bytes_;
      Copy(Address(x_.receive, member_ * shard), Address(x_.lhs, 0), shard);
    }
    for (uint64_t distance = 1; distance < x_.size; ++distance) {
      const size_t from = (member_ + x_.size - distance) % x_.size;
      const std::vector<SharedEvent> arrived = Parts(from);
      for (uint64_t part = 0; part < arrived.size(); ++part) {
        Wait(stream_, arrived[part]);
        const uint64_t place = from * x_.parts + part;
        Multiply(Address(x_.receive, place * lhs_bytes_), place);
      }
    }
  }

  // Computes the terms of the others, then its own rows, whose kernel adds the terms that came.
  void Scatter() {
    std::vector<SharedEvent> computed;
    for (uint64_t distance = 1; distance < x_.size; ++distance) {
      const uint64_t owner = (member_ + distance) % x_.size;
      for (uint64_t part = 0; part < x_.parts; ++part) {
        const uint64_t slot = (distance - 1) * x_.parts + part;
        Launch(0, x_.term_launches, Address(x_.lhs, (owner * x_.parts + part) * lhs_bytes_),
               Address(x_.send, slot * out_bytes_), 0);
        computed.push_back(Record(stream_));
      }
    }
    std::vector<Offer> offers = Offers();
    std::vector<std::vector<SharedEvent>> sent(x_.size);
    for (uint64_t distance = 1; distance < offers.size(); ++distance) {
      const size_t owner = (member_ + distance) % x_.size;
      Wait(copies_.stream(), offers[owner].free);
      for (uint64_t part = 0; part < x_.parts; ++part) {
        const uint64_t slot = (distance - 1) * x_.parts + part;
        Wait(copies_.stream(), computed[slot]);
        Copy(offers[owner].memory + slot * out_bytes_, Address(x_.send, slot * out_bytes_),
             out_bytes_);
        sent[owner].push_back(Record(copies_.stream()));
      }
    }
    if (!offers.empty()) meeting_.Send(std::move(sent));
    std::vector<std::vector<SharedEvent>> arrived;
    for (uint64_t distance = 1; distance < x_.size; ++distance) {
      arrived.push_back(Parts((member_ + x_.size - distance) % x_.size));
    }
    for (uint64_t part = 0; part < x_.parts && problem_.empty(); ++part) {
      for (const auto& of_sender : arrived) Wait(stream_, of_sender[part]);
      Launch(x_.term_launches, functions_.size(),
             Address(x_.lhs, (member_ * x_.parts + part) * lhs_bytes_),
             Address(x_.out, part * out_bytes_), part * out_bytes_);
    }
  }

  uint64_t PartOf(uint32_t buffer, uint64_t parts) {
    const uint64_t bytes = buffers_[buffer].bytes;
    if (bytes % parts != 0) {
      Fail("buffer " + std::to_string(buffer) + " of " + std::to_string(bytes) +
           " bytes is not divisible into " + std::to_string(parts) + " parts");
    }
    return bytes / parts;
  }

  void Require(uint32_t buffer, uint64_t bytes) {
    if (buffers_[buffer].bytes == bytes) return;
    Fail("buffer " + std::to_string(buffer) + " has " + std::to_string(buffers_[buffer].bytes) +
         " bytes, not " + std::to_string(bytes));
  }

  char* Address(uint32_t buffer, uint64_t offset) const {
    return buffers_[buffer].address + offset;
  }

  std::vector<Offer> Offers() {
    std::vector<Offer> offers;
    if (problem_.empty()) Fail(meeting_.AwaitOffers(offers));
    return offers;
  }

  std::vector<SharedEvent> Parts(size_t sender) {
    std::vector<SharedEvent> events;
    if (problem_.empty()) Fail(meeting_.AwaitParts(sender, events));
    return events;
  }

  // Multiplies a part of `lhs` by all launches; `place` is where its rows are in the result.
  void Multiply(char* lhs, uint64_t place) {
    Launch(0, functions_.size(), lhs, Address(x_.out, place * out_bytes_), 0);
  }

  // Runs launches whose buffers `lhs` and `out` are parts, and `receive` begins at an offset.
  void Launch(size_t first, size_t last, char* lhs, char* out, uint64_t received_from) {
    if (!problem_.empty()) return;
    std::vector<DeviceBuffer> buffers = buffers_;
    buffers[x_.receive].address += received_from;
    buffers[x_.receive].bytes -= received_from;
    buffers[x_.lhs].address = lhs;
    buffers[x_.lhs].bytes = lhs_bytes_;
    buffers[x_.out].address = out;
    buffers[x_.out].bytes = out_bytes_;
    Fail(RunLaunches(driver_, plan_, first, last, functions_, context_, stream_, buffers));
  }

  void Copy(char* to, const char* from, uint64_t bytes) {
    if (!problem_.empty()) return;
    Check("cuMemcpyAsync", driver_.cuMemcpyAsync(to, from, bytes, copies_.stream()));
  }

  // Returns an event that happens once the stream has come this far. Recorded after a failure too,
  // because the call ends with one.
  SharedEvent Record(CUstream stream) {
    CUresult error;
    SharedEvent event = copies_.Event(driver_, error);
    if (!error) error = driver_.cuEventRecord(event.get(), stream);
    Check("an event", error);
    return event;
  }

  void Wait(CUstream stream, const SharedEvent& event) {
    if (event == nullptr) return;
    Check("cuStreamWaitEvent", driver_.cuStreamWaitEvent(stream, event.get(), 0));
  }

  void Check(const char* step, CUresult error) {
    if (error) Fail(std::string(step) + ": " + driver_.Text(error));
  }

  void Fail(const std::string& problem) {
    if (problem_.empty()) problem_ = problem;
  }

  const Driver& driver_;
  const LaunchPlan& plan_;
  const Exchange& x_;
  const std::vector<CUfunction>& functions_;
  const CUcontext context_;
  const CUstream stream_;
  const std::vector<DeviceBuffer>& buffers_;
  Copies& copies_;
  const size_t member_;
  Meeting meeting_;
  Offer offer_;
  uint64_t lhs_bytes_ = 0, out_bytes_ = 0;
  std::string problem_;
};

}  // namespace

std::string RunOverlapped(const Driver& driver, const LaunchPlan& plan,
                          const std::vector<CUfunction>& functions, CUcontext context,
                          CUstream stream, const std::vector<DeviceBuffer>& buffers,
                          const Execution& execution) {
  Or<Copies*> copies = Copies::Of(driver, context);
  if (auto* why = std::get_if<std::string>(&copies)) return *why;
  return OverlappedProduct(driver, plan, functions, context, stream, buffers,
                           *std::get<Copies*>(copies), execution)
      .Run();
}

}  // namespace tilekern

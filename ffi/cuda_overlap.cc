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
    uint64_t rows = 0;
    for (uint64_t of_part : x_.rows) first_.push_back(rows), rows += of_part;
    first_.push_back(rows);
    lhs_bytes_ = BytesOfRow(x_.lhs, x_.scatters ? x_.size * rows : rows);
    out_bytes_ = BytesOfRow(x_.out, x_.scatters ? rows : x_.size * rows);
    const uint64_t others = x_.scatters ? x_.size - 1 : x_.size;
    Require(x_.receive, others * rows * (x_.scatters ? out_bytes_ : lhs_bytes_));
    if (x_.scatters) Require(x_.send, others * rows * out_bytes_);
    if (x_.addend) Require(*x_.addend, x_.size * rows * out_bytes_);

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
    for (size_t part = 0; part < Parts(); ++part) {
      Multiply(part, Address(x_.lhs, first_[part] * lhs_bytes_), Row(member_, part));
    }
    std::vector<Offer> offers = Offers();
    Wait(copies_.stream(), offer_.free);
    std::vector<std::vector<SharedEvent>> sent(x_.size);
    for (uint64_t distance = 1; distance < offers.size(); ++distance) {
      const size_t to = (member_ + distance) % x_.size;
      Wait(copies_.stream(), offers[to].free);
      for (size_t part = 0; part < Parts(); ++part) {
        Copy(offers[to].memory + Row(member_, part) * lhs_bytes_,
             Address(x_.lhs, first_[part] * lhs_bytes_), x_.rows[part] * lhs_bytes_);
        sent[to].push_back(Record(copies_.stream()));
      }
    }
    if (!offers.empty()) meeting_.Send(std::move(sent));
    if (x_.keeps) {
      const uint64_t shard = first_.back() * lhs_bytes_;
      Copy(Address(x_.receive, member_ * shard), Address(x_.lhs, 0), shard);
    }
    for (uint64_t distance = 1; distance < x_.size; ++distance) {
      const size_t from = (member_ + x_.size - distance) % x_.size;
      const std::vector<SharedEvent> arrived = PartsOf(from);
      for (size_t part = 0; part < arrived.size(); ++part) {
        Wait(stream_, arrived[part]);
        const uint64_t row = Row(from, part);
        Multiply(part, Address(x_.receive, row * lhs_bytes_), row);
      }
    }
  }

  // Computes the terms of the others, then its own rows, whose kernel adds the terms that came.
  void Scatter() {
    std::vector<SharedEvent> computed;
    for (uint64_t distance = 1; distance < x_.size; ++distance) {
      const uint64_t owner = (member_ + distance) % x_.size;
      for (size_t part = 0; part < Parts(); ++part) {
        const uint64_t row = Row(owner, part), slot = Row(distance - 1, part);
        Launch(part, part, Address(x_.lhs, row * lhs_bytes_), Address(x_.send, slot * out_bytes_),
               row);
        computed.push_back(Record(stream_));
      }
    }
    std::vector<Offer> offers = Offers();
    std::vector<std::vector<SharedEvent>> sent(x_.size);
    for (uint64_t distance = 1; distance < offers.size(); ++distance) {
      const size_t owner = (member_ + distance) % x_.size;
      Wait(copies_.stream(), offers[owner].free);
      for (size_t part = 0; part < Parts(); ++part) {
        const uint64_t slot = Row(distance - 1, part);
        Wait(copies_.stream(), computed[(distance - 1) * Parts() + part]);
        Copy(offers[owner].memory + slot * out_bytes_, Address(x_.send, slot * out_bytes_),
             x_.rows[part] * out_bytes_);
        sent[owner].push_back(Record(copies_.stream()));
      }
    }
    if (!offers.empty()) meeting_.Send(std::move(sent));
    std::vector<std::vector<SharedEvent>> arrived;
    for (uint64_t distance = 1; distance < x_.size; ++distance) {
      arrived.push_back(PartsOf((member_ + x_.size - distance) % x_.size));
    }
    for (size_t part = 0; part < Parts() && problem_.empty(); ++part) {
      for (const auto& of_sender : arrived) Wait(stream_, of_sender[part]);
      const uint64_t row = Row(member_, part);
      Launch(Parts() + part, part, Address(x_.lhs, row * lhs_bytes_),
             Address(x_.out, first_[part] * out_bytes_), row);
    }
  }

  size_t Parts() const { return x_.rows.size(); }

  // Returns the row with which a part of a device's rows begins, where devices' rows follow each
  // other.
  uint64_t Row(uint64_t device, size_t part) const { return device * first_.back() + first_[part]; }

  uint64_t BytesOfRow(uint32_t buffer, uint64_t rows) {
    const uint64_t bytes = buffers_[buffer].bytes;
    if (bytes % rows != 0) {
      Fail("buffer " + std::to_string(buffer) + " of " + std::to_string(bytes) +
           " bytes is not divisible into " + std::to_string(rows) + " rows");
    }
    return bytes / rows;
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

  std::vector<SharedEvent> PartsOf(size_t sender) {
    std::vector<SharedEvent> events;
    if (problem_.empty()) Fail(meeting_.AwaitParts(sender, events));
    return events;
  }

  // Multiplies a part of `lhs`, whose rows are in the result from `row` on.
  void Multiply(size_t part, char* lhs, uint64_t row) {
    Launch(part, part, lhs, Address(x_.out, row * out_bytes_), row);
  }

  // Runs a group of launches whose buffers `lhs` and `out` are a part, which begins with `row` of
  // all devices' rows. What others send begins where this part does.
  void Launch(size_t group, size_t part, char* lhs, char* out, uint64_t row) {
    if (!problem_.empty()) return;
    std::vector<DeviceBuffer> buffers = buffers_;
    const auto replace = [&](uint32_t buffer, char* address, uint64_t bytes) {
      buffers[buffer].address = address;
      buffers[buffer].bytes = bytes;
    };
    replace(x_.lhs, lhs, x_.rows[part] * lhs_bytes_);
    replace(x_.out, out, x_.rows[part] * out_bytes_);
    if (x_.scatters) {
      const uint64_t offset = first_[part] * out_bytes_;
      replace(x_.receive, Address(x_.receive, offset), buffers_[x_.receive].bytes - offset);
    }
    if (x_.addend) {
      replace(*x_.addend, Address(*x_.addend, row * out_bytes_), x_.rows[part] * out_bytes_);
    }
    const size_t begin = group == 0 ? 0 : x_.ends[group - 1];
    Fail(
        RunLaunches(driver_, plan_, begin, x_.ends[group], functions_, context_, stream_, buffers));
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
  std::vector<uint64_t> first_;             // row of each part, and the number of rows
  uint64_t lhs_bytes_ = 0, out_bytes_ = 0;  // of a row
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

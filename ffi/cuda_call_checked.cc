// The checked execution of a kernel with debug=True.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_call.h"

namespace tilekern {
namespace {

// The fillings of the results before each run. A byte that has kept both was not written.
constexpr std::array<unsigned char, 2> kFillings = {0xA5, 0x5A};

using Bytes = std::vector<unsigned char>;

Bytes BytesOf(const DeviceBuffer& buffer) { return Bytes(buffer.bytes); }

// Makes driver calls until one fails, and records which.
class Steps {
 public:
  Steps(const Driver& driver, CUstream stream) : driver_(driver), stream_(stream) {}

  void Fill(const DeviceBuffer& buffer, unsigned char byte) {
    if (buffer.bytes == 0) return;
    Check("cuMemsetD8Async", driver_.cuMemsetD8Async(buffer.address, byte, buffer.bytes, stream_));
  }
  void Read(const DeviceBuffer& buffer, Bytes& to) {
    if (buffer.bytes == 0) return;
    Check("cuMemcpyDtoHAsync",
          driver_.cuMemcpyDtoHAsync(to.data(), buffer.address, buffer.bytes, stream_));
    Wait();
  }
  void Write(const Bytes& from, const DeviceBuffer& buffer) {
    if (buffer.bytes == 0) return;
    Check("cuMemcpyHtoDAsync",
          driver_.cuMemcpyHtoDAsync(buffer.address, from.data(), buffer.bytes, stream_));
    Wait();
  }
  void Wait() { Check("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_)); }

  const std::string& problem() const { return problem_; }

 private:
  void Check(const char* call, CUresult error) {
    if (error && problem_.empty()) problem_ = std::string(call) + ": " + driver_.Text(error);
  }

  const Driver& driver_;
  const CUstream stream_;
  std::string problem_;
};

bool SharesAnOperand(const std::vector<DeviceBuffer>& buffers, size_t operands, size_t result) {
  for (size_t i = 0; i < operands; ++i) {
    if (buffers[i].address == buffers[result].address) return true;
  }
  return false;
}

std::string Unwritten(const std::array<Bytes, 2>& seen, uint64_t elements, size_t result) {
  const uint64_t width = elements ? seen[0].size() / elements : 0;
  uint64_t count = 0, first = 0;
  for (uint64_t element = 0; element < (width ? elements : 0); ++element) {
    bool kept = false;
    for (uint64_t i = element * width; i < (element + 1) * width; ++i) {
      kept |= seen[0][i] == kFillings[0] && seen[1][i] == kFillings[1];
    }
    if (kept && count++ == 0) first = element;
  }
  if (count == 0) return {};
  return std::to_string(count) + " of " + std::to_string(elements) + " elements of output " +
         std::to_string(result) + " were not written, the first at index " + std::to_string(first) +
         " of the flattened array";
}

}  // namespace

std::string RunChecked(const Driver& driver, const LaunchPlan& plan,
                       const std::vector<CUfunction>& functions, CUstream stream,
                       const std::vector<DeviceBuffer>& buffers, size_t operands, size_t checked) {
  Steps steps(driver, stream);
  std::vector<bool> shared(buffers.size());
  std::vector<Bytes> before(buffers.size());
  for (size_t i = operands; i < buffers.size(); ++i) {
    shared[i] = SharesAnOperand(buffers, operands, i);
    if (!shared[i]) continue;
    before[i] = BytesOf(buffers[i]);
    steps.Read(buffers[i], before[i]);
  }

  std::vector<std::array<Bytes, 2>> seen(buffers.size());
  for (size_t run = 0; run < kFillings.size(); ++run) {
    for (size_t i = operands; i < buffers.size(); ++i) {
      if (shared[i]) {
        steps.Write(before[i], buffers[i]);
      } else {
        steps.Fill(buffers[i], kFillings[run]);
      }
    }
    if (!steps.problem().empty()) return steps.problem();
    for (size_t i = 0; i < functions.size(); ++i) {
      const Launch& launch = plan.launches[i];
      std::string problem = Run(driver, launch, functions[i], stream, buffers);
      if (problem.empty()) {
        steps.Wait();
        problem = steps.problem();
      }
      if (!problem.empty()) return launch.Text() + ": " + problem;
    }
    for (size_t i = operands; i < operands + checked && i < buffers.size(); ++i) {
      if (shared[i]) continue;
      seen[i][run] = BytesOf(buffers[i]);
      steps.Read(buffers[i], seen[i][run]);
    }
  }
  if (!steps.problem().empty()) return steps.problem();
  for (size_t i = operands; i < operands + checked && i < buffers.size(); ++i) {
    if (shared[i]) continue;
    const std::string problem = Unwritten(seen[i], buffers[i].elements, i - operands);
    if (!problem.empty()) return plan.launches.back().Text() + ": " + problem;
  }
  return {};
}

}  // namespace tilekern

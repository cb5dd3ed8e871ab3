#include "launch_plan.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace tilekern {
namespace {

namespace ffi = xla::ffi;

// Rows of all devices. A number of bytes for each of them fits in 64 bits.
constexpr uint64_t kMostRows = uint64_t{1} << 40;

// Reads attributes and records the first error, with the path to its attribute.
class Reader {
 public:
  Reader(ffi::Dictionary attributes, std::string path, std::string* error)
      : attributes_(attributes), path_(std::move(path)), error_(error) {}

  bool Has(std::string_view name) const { return attributes_.contains(name); }
  size_t size() const { return attributes_.size(); }

  std::string_view Text(std::string_view name) {
    return Get<std::string_view>(name).value_or(std::string_view());
  }

  std::string_view Bytes(std::string_view name) {
    const auto bytes = Get<ffi::Span<const uint8_t>>(name);
    if (!bytes) return {};
    return {reinterpret_cast<const char*>(bytes->begin()), bytes->size()};
  }

  // Reads a number that fits T and is not negative, as every number of a plan.
  template <typename T>
  T Number(std::string_view name) {
    return Narrow<T>(name, Get<int64_t>(name).value_or(0));
  }

  template <typename T>
  std::vector<T> Numbers(std::string_view name) {
    std::vector<T> numbers;
    if (const auto span = Get<ffi::Span<const int64_t>>(name)) {
      for (int64_t value : *span) numbers.push_back(Narrow<T>(name, value));
    }
    return numbers;
  }

  Dim3 Dimensions(std::string_view name) {
    const std::vector<unsigned> numbers = Numbers<unsigned>(name);
    if (numbers.size() != 3) {
      Fail(name, "has " + std::to_string(numbers.size()) + " dimensions, not 3");
      return {};
    }
    return {numbers[0], numbers[1], numbers[2]};
  }

  Reader Nested(std::string_view name) {
    std::string path = path_ + std::string(name) + ".";
    return Reader(Get<ffi::Dictionary>(name).value_or(ffi::Dictionary(&kNothing)), std::move(path),
                  error_);
  }

  void Fail(std::string_view name, const std::string& complaint) {
    if (error_->empty()) *error_ = "attribute " + path_ + std::string(name) + ": " + complaint;
  }

 private:
  static constexpr XLA_FFI_Attrs kNothing = {};

  template <typename T>
  std::optional<T> Get(std::string_view name) {
    ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    Fail(name, value.error().message());
    return std::nullopt;
  }

  template <typename T>
  T Narrow(std::string_view name, int64_t value) {
    if (value < 0 || static_cast<uint64_t>(value) > std::numeric_limits<T>::max()) {
      Fail(name, std::to_string(value) + " is out of range");
    }
    return static_cast<T>(value);
  }

  ffi::Dictionary attributes_;
  std::string path_;
  std::string* error_;
};

TensorMapParameter ReadTensorMap(Reader& reader) {
  TensorMapParameter map;
  map.buffer = reader.Number<uint32_t>("buffer");
  map.offset_bytes = reader.Number<uint64_t>("offset_bytes");
  map.extent_bytes = reader.Number<uint64_t>("extent_bytes");
  map.dtype = reader.Number<int>("dtype");
  map.interleave = reader.Number<int>("interleave");
  map.swizzle = reader.Number<int>("swizzle");
  map.l2_promotion = reader.Number<int>("l2_promotion");
  map.oob_fill = reader.Number<int>("oob_fill");
  map.sizes = reader.Numbers<uint64_t>("sizes");
  // A map of one dimension has no strides, and an attribute cannot be an empty array.
  if (map.sizes.size() > 1) map.strides_bytes = reader.Numbers<uint64_t>("strides_bytes");
  if (reader.Has("steps_bytes")) map.steps_bytes = reader.Numbers<uint64_t>("steps_bytes");
  map.box = reader.Numbers<uint32_t>("box");
  map.element_strides = reader.Numbers<uint32_t>("element_strides");

  // The driver reads as many entries of each array as there are sizes.
  const size_t rank = map.sizes.size();
  if (rank < 1 || rank > 5 || map.strides_bytes.size() != rank - 1 || map.box.size() != rank ||
      map.element_strides.size() != rank) {
    reader.Fail("sizes",
                "a tensor map has 1 to 5 sizes and a stride, a box size and an element "
                "stride to go with them");
  }
  return map;
}

Parameter ReadParameter(Reader& reader) {
  if (reader.Has("sizes")) return ReadTensorMap(reader);
  if (reader.Has("bytes")) return ScalarsParameter{std::string(reader.Bytes("bytes"))};
  BufferParameter buffer;
  buffer.buffer = reader.Number<uint32_t>("buffer");
  buffer.offset_bytes = reader.Number<uint64_t>("offset_bytes");
  if (reader.Has("steps_bytes")) buffer.steps_bytes = reader.Numbers<uint64_t>("steps_bytes");
  return buffer;
}

Launch ReadLaunch(Reader& reader, size_t cubins, size_t buffers) {
  Launch launch;
  launch.cubin = reader.Number<size_t>("cubin");
  if (launch.cubin >= cubins) {
    reader.Fail("cubin", "there are only " + std::to_string(cubins) + " cubins");
  }
  launch.entry = reader.Text("entry");
  launch.grid = reader.Dimensions("grid");
  launch.block = reader.Dimensions("block");
  launch.cluster = reader.Dimensions("cluster");
  launch.shared_memory_bytes = reader.Number<unsigned>("shared_memory_bytes");
  if (reader.Has("repeats")) launch.repeats = reader.Numbers<uint64_t>("repeats");
  for (uint64_t repeats : launch.repeats) {
    if (repeats == 0) reader.Fail("repeats", "one is 0");
  }
  const auto flag = [&](const char* name) {
    if (!reader.Has(name)) return false;
    if (reader.Number<unsigned>(name) != 1) reader.Fail(name, "is present and not 1");
    return true;
  };
  launch.overlaps = flag("overlaps");
  launch.branches = flag("branches");
  launch.joins = flag("joins");
  Reader parameters = reader.Nested("parameters");
  for (size_t i = 0; i < parameters.size(); ++i) {
    Reader parameter = parameters.Nested(std::to_string(i));
    launch.parameters.push_back(ReadParameter(parameter));
    if (parameter.Has("buffer") && parameter.Number<uint32_t>("buffer") >= buffers) {
      parameter.Fail("buffer", "there are only " + std::to_string(buffers) + " buffers");
    }
    if (parameter.Has("steps_bytes") &&
        parameter.Numbers<uint64_t>("steps_bytes").size() != launch.repeats.size()) {
      parameter.Fail("steps_bytes", "there are " + std::to_string(launch.repeats.size()) +
                                        " repeats to step along");
    }
  }
  return launch;
}

Exchange ReadExchange(Reader& reader, const LaunchPlan& plan) {
  const auto positive = [&](const char* name) -> uint64_t {
    const auto number = reader.Number<uint64_t>(name);
    if (number == 0) reader.Fail(name, "is 0");
    return std::max<uint64_t>(number, 1);
  };
  const auto buffer = [&](const char* name) {
    const auto number = reader.Number<uint32_t>(name);
    if (number >= plan.alignments.size()) {
      reader.Fail(name, "there are only " + std::to_string(plan.alignments.size()) + " buffers");
    }
    return number;
  };
  Exchange exchange;
  exchange.scatters = reader.Number<unsigned>("scatters") != 0;
  exchange.axis = reader.Text("axis");
  exchange.size = positive("size");
  exchange.stride = positive("stride");
  exchange.rows = reader.Numbers<uint64_t>("rows");
  if (exchange.rows.empty()) reader.Fail("rows", "there is no part");
  uint64_t rows = 0;
  for (uint64_t of_part : exchange.rows) {
    if (of_part == 0 || of_part > kMostRows / exchange.size - rows) {
      reader.Fail("rows", std::to_string(of_part) + " is out of range");
      break;
    }
    rows += of_part;
  }
  exchange.lhs = buffer("lhs");
  exchange.device = buffer("device");
  exchange.out = buffer("out");
  exchange.receive = buffer("receive");
  exchange.send = buffer("send");
  if (reader.Has("addend")) exchange.addend = buffer("addend");
  exchange.ends = reader.Numbers<uint64_t>("ends");
  const size_t groups = exchange.rows.size() * (exchange.scatters ? 2 : 1);
  if (exchange.ends.empty() || exchange.ends.size() != groups ||
      exchange.ends.back() != plan.launches.size() ||
      !std::is_sorted(exchange.ends.begin(), exchange.ends.end())) {
    reader.Fail("ends", "does not divide " + std::to_string(plan.launches.size()) +
                            " launches among " + std::to_string(groups));
  }
  exchange.keeps = reader.Number<unsigned>("keeps") != 0;
  return exchange;
}

std::string Text(const Dim3& dim) {
  return "(" + std::to_string(dim[0]) + ", " + std::to_string(dim[1]) + ", " +
         std::to_string(dim[2]) + ")";
}

}  // namespace

std::string Launch::Text() const {
  return "kernel " + entry + " with grid " + tilekern::Text(grid) + ", block " +
         tilekern::Text(block) + ", cluster " + tilekern::Text(cluster) + " and " +
         std::to_string(shared_memory_bytes) + " bytes of dynamic shared memory";
}

std::string LaunchPlan::Text() const { return "launch plan " + name + " (" + arch + ")"; }

ffi::ErrorOr<LaunchPlan> ReadLaunchPlan(const ffi::Dictionary& attributes) {
  std::string error;
  Reader reader(attributes, "", &error);
  LaunchPlan plan;
  plan.name = reader.Text("name");
  plan.arch = reader.Text("arch");
  Reader cubins = reader.Nested("cubins");
  for (size_t i = 0; i < cubins.size(); ++i) {
    plan.cubins.push_back(cubins.Bytes(std::to_string(i)));
  }
  plan.alignments = reader.Numbers<uint64_t>("alignments");
  for (uint64_t alignment : plan.alignments) {
    if (alignment == 0) reader.Fail("alignments", "an alignment is 0");
  }
  Reader launches = reader.Nested("launches");
  for (size_t i = 0; i < launches.size(); ++i) {
    Reader launch = launches.Nested(std::to_string(i));
    plan.launches.push_back(ReadLaunch(launch, plan.cubins.size(), plan.alignments.size()));
    if (plan.launches.back().overlaps && (i == 0 || !plan.launches.back().repeats.empty())) {
      launch.Fail("overlaps", "a launch that is the first or repeats cannot overlap");
    }
    const Launch& last = plan.launches.back();
    if (last.branches && last.joins) launch.Fail("joins", "a launch that branches cannot join");
    if (last.overlaps && last.joins) {
      launch.Fail("overlaps", "a launch that joins cannot overlap");
    }
    if (last.overlaps && i > 0 && last.branches != plan.launches[i - 1].branches) {
      launch.Fail("overlaps", "a launch cannot overlap with one on another stream");
    }
  }
  if (reader.Has("exchange")) {
    Reader exchange = reader.Nested("exchange");
    plan.exchange = ReadExchange(exchange, plan);
  }
  if (error.empty()) return plan;
  return ffi::Unexpected(ffi::Error::InvalidArgument(plan.Text() + ": " + error));
}

}  // namespace tilekern

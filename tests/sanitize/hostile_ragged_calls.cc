// Calls of the handler of ragged products as no lowering makes them: refused with a reason, or
// computed within their buffers. What it shares with dense products is in hostile_calls.cc.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "elements.h"
#include "ffi_frame.h"
#include "handlers.h"

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int32_t kMostRows = std::numeric_limits<int32_t>::max();

// A call of float32, two batches of three groups of 7 rows, m or k; to be changed by those who want
// to break it.
struct Call {
  Type lhs_type = kF32, rhs_type = kF32, out_type = kF32;
  int64_t lhs = 70, rhs = 180, out = 84;  // elements
  std::vector<int32_t> bounds = {0, 2, 2, 6, 1, 3, 4, 7};
  XLA_FFI_DataType bounds_type = XLA_FFI_DataType_S32;
  std::map<std::string, Attribute> attributes = {
      {"sizes", Attribute::Numbers({2, 3, 7, 6, 5})},
      {"lhs_strides", Attribute::Numbers({35, 0, 5, 1})},
      {"rhs_strides", Attribute::Numbers({90, 30, 6, 1})},
      {"out_strides", Attribute::Numbers({42, 0, 6, 1})},
      {"bounds_strides", Attribute::Numbers({4})},
      {"ragged_k", Attribute::Number(0)},
  };

  std::vector<int64_t>& Numbers(const char* name) { return attributes[name].numbers; }
};

Call RaggedK() {
  Call call;
  call.rhs = 84;
  call.out = 180;
  call.Numbers("sizes") = {2, 3, 5, 6, 7};
  call.Numbers("lhs_strides") = {35, 0, 1, 5};
  call.Numbers("rhs_strides") = {42, 0, 6, 1};
  call.Numbers("out_strides") = {90, 30, 6, 1};
  call.attributes["ragged_k"] = Attribute::Number(1);
  return call;
}

std::string Run(const Call& call, int64_t threads = 1) {
  std::vector<std::unique_ptr<char[]>> memory;
  const auto buffer = [&](const Type& type, int64_t elements) {
    memory.emplace_back(new char[elements * type.bytes]());
    return FrameBuffer{type.ffi, memory.back().get(), {elements}};
  };
  std::vector<FrameBuffer> operands = {buffer(call.lhs_type, call.lhs),
                                       buffer(call.rhs_type, call.rhs),
                                       buffer(kS32, static_cast<int64_t>(call.bounds.size()))};
  operands[2].type = call.bounds_type;
  if (!call.bounds.empty()) {
    std::memcpy(operands[2].data, call.bounds.data(), call.bounds.size() * sizeof(int32_t));
  }
  return CallHandler(CpuRaggedMatmul, operands, {buffer(call.out_type, call.out)}, call.attributes,
                     Pool::kInline, threads);
}

struct Refused {
  const char* what;
  void (*change)(Call&);
};

// Calls of both kinds that must be refused.
const Refused kRefused[] = {
    {"no sizes", [](Call& c) { c.Numbers("sizes").clear(); }},
    {"sizes without groups",
     [](Call& c) {
       for (const char* name : {"sizes", "lhs_strides", "rhs_strides", "out_strides"}) {
         c.Numbers(name).erase(c.Numbers(name).begin(), c.Numbers(name).begin() + 2);
       }
     }},
    {"no groups", [](Call& c) { c.Numbers("sizes")[1] = 0; }},
    {"a group too many", [](Call& c) { c.Numbers("sizes")[1] = 4; }},
    {"the most groups", [](Call& c) { c.Numbers("sizes")[1] = kMost; }},
    {"the most batches", [](Call& c) { c.Numbers("sizes")[0] = kMost; }},
    {"a batch too many", [](Call& c) { c.Numbers("sizes")[0] = 3; }},
    {"a bound too few", [](Call& c) { c.bounds.pop_back(); }},
    {"no bounds", [](Call& c) { c.bounds.clear(); }},
    {"bounds of another type", [](Call& c) { c.bounds_type = XLA_FFI_DataType_F32; }},
    {"unsigned bounds", [](Call& c) { c.bounds_type = XLA_FFI_DataType_U32; }},
    {"a negative bound", [](Call& c) { c.bounds[0] = -1; }},
    {"the least bound", [](Call& c) { c.bounds[4] = -kMostRows - 1; }},
    {"a last bound past the rows", [](Call& c) { c.bounds[7] = 8; }},
    {"the largest bound", [](Call& c) { c.bounds[3] = kMostRows; }},
    {"an inner bound past the rows", [](Call& c) { c.bounds[5] = 8; }},
    {"bounds out of order", [](Call& c) { c.bounds[1] = 3; }},
    {"bounds out of order in the second batch", [](Call& c) { c.bounds[6] = 2; }},
    {"bounds strides past the bounds", [](Call& c) { c.Numbers("bounds_strides")[0] = 5; }},
    {"the largest bounds stride", [](Call& c) { c.Numbers("bounds_strides")[0] = kMost; }},
    {"a negative bounds stride", [](Call& c) { c.Numbers("bounds_strides")[0] = -4; }},
    {"a bounds stride too few", [](Call& c) { c.Numbers("bounds_strides").clear(); }},
    {"a bounds stride too many", [](Call& c) { c.Numbers("bounds_strides").push_back(0); }},
    {"a group stride of lhs", [](Call& c) { c.Numbers("lhs_strides")[1] = 1; }},
    {"ragged_k of 2", [](Call& c) { c.attributes["ragged_k"] = Attribute::Number(2); }},
    {"ragged_k of -1", [](Call& c) { c.attributes["ragged_k"] = Attribute::Number(-1); }},
    {"the other ragged_k",
     [](Call& c) {
       c.attributes["ragged_k"] = Attribute::Number(1 - c.attributes["ragged_k"].number);
     }},
    {"no ragged_k", [](Call& c) { c.attributes.erase("ragged_k"); }},
    {"a small lhs", [](Call& c) { --c.lhs; }},
    {"a small rhs", [](Call& c) { --c.rhs; }},
    {"a small result", [](Call& c) { --c.out; }},
    {"rows that share an output", [](Call& c) { c.Numbers("out_strides")[2] = 5; }},
    {"batches that share an output", [](Call& c) { c.Numbers("out_strides")[0] = 0; }},
    {"operands of two types", [](Call& c) { c.lhs_type = kF64; }},
    {"types of no kernel, and no rows",
     [](Call& c) {
       c.out_type = kS32;
       c.bounds.assign(8, 0);
     }},
};

// A call whose buffers, bounds and attributes are drawn from what might break it.
Call RandomCall(std::mt19937& random) {
  Call call = random() % 2 == 0 ? Call() : RaggedK();
  const auto rarely = [&] { return random() % 8 == 0; };
  for (int32_t& bound : call.bounds) bound = static_cast<int32_t>(random() % 8);
  if (!rarely()) {
    std::sort(call.bounds.begin(), call.bounds.begin() + 4);
    std::sort(call.bounds.begin() + 4, call.bounds.end());
  }
  if (rarely()) call.bounds[random() % 8] = static_cast<int32_t>(random());
  const int64_t numbers[] = {0, 1, 2, 3, 4, 5, 7, 8, 35, -1, int64_t{1} << 33, kMost};
  for (auto& [name, attribute] : call.attributes) {
    for (int64_t& value : attribute.numbers) {
      if (random() % 16 == 0) value = numbers[random() % 12];
    }
  }
  for (int64_t* elements : {&call.lhs, &call.rhs, &call.out}) {
    if (rarely()) *elements = static_cast<int64_t>(random() % 200);
  }
  const Type types[] = {kF64, kBF16, kF16, kS8, kE4M3, kU64};
  if (rarely()) call.lhs_type = call.rhs_type = call.out_type = types[random() % 6];
  if (call.out_type.ffi == kS8.ffi) call.out_type = kS32;
  if (call.out_type.ffi == kE4M3.ffi) call.out_type = kF32;
  return call;
}

// A k that both operands read without moving is only bounded by patience.
bool IsEndless(Call& call) {
  return call.Numbers("sizes").back() > 1000 && call.Numbers("lhs_strides").back() == 0 &&
         call.Numbers("rhs_strides")[2] == 0;
}

}  // namespace

void CheckHostileRaggedCalls(Counts& counts) {
  for (const Call& valid : {Call(), RaggedK()}) {
    const std::string said = Run(valid);
    counts.Check(said.empty(), "the ragged call that others are changed from: " + said);
    for (const Refused& refused : kRefused) {
      Call call = valid;
      refused.change(call);
      counts.Check(Run(call).size() > sizeof "error: ",
                   std::string("refused, ragged: ") + refused.what);
    }
  }

  // Nothing to do is no error.
  Call empty;
  empty.Numbers("sizes")[0] = 0;
  empty.lhs = empty.rhs = empty.out = 0;
  empty.bounds.clear();
  counts.Check(Run(empty).empty(), "a ragged batch of none: " + Run(empty));

  std::mt19937 random(4);
  int computed = 0, refused = 0;
  while (computed + refused < 30000) {
    Call call = RandomCall(random);
    if (IsEndless(call)) continue;
    ++(Run(call, 1 + static_cast<int64_t>(random() % 4)).empty() ? computed : refused);
  }
  counts.Check(computed > 1000, "random ragged calls reach the kernels");
  counts.Check(refused > 1000, "random ragged calls are refused");
  std::printf("ragged calls: %zu kinds refused; of 30000 random calls %d computed, %d refused\n",
              sizeof kRefused / sizeof *kRefused, computed, refused);
}

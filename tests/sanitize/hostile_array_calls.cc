// Calls of the handlers of transposes, sums and additions as no lowering makes them: refused with a
// reason, or computed within their buffers.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>

#include "check.h"
#include "ffi_frame.h"
#include "handlers.h"

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// A call that works, to be changed by those who want to break it.
struct Call {
  const char* name;
  Handler* handler;
  std::vector<int64_t> operands;  // elements of each
  int64_t result;
  std::map<std::string, std::vector<int64_t>> attributes;
  std::map<std::string, int64_t> numbers = {};
  XLA_FFI_DataType operand_type = XLA_FFI_DataType_F32, result_type = XLA_FFI_DataType_F32;
};

const Call kTranspose = {
    "transpose",    CpuTranspose, {60}, 60, {{"sizes", {3, 4, 5}}, {"permutation", {2, 0, 1}}},
    {{"stream", 1}}};
const Call kSum = {"sum", CpuSum, {60}, 15, {{"sizes", {3, 4, 5}}, {"reduced", {0, 1, 0}}}};
const Call kAdd = {"add",
                   CpuAdd,
                   {12, 5},
                   60,
                   {{"sizes", {3, 4, 5}}, {"lhs_strides", {4, 1, 0}}, {"rhs_strides", {0, 0, 1}}}};

std::string Run(const Call& call, int64_t threads = 1) {
  std::vector<std::unique_ptr<char[]>> memory;
  const auto buffer = [&](XLA_FFI_DataType type, int64_t elements) {
    // Enough for every type, and exactly so for most.
    const int64_t bytes = type == XLA_FFI_DataType_C128                                   ? 16
                          : type == XLA_FFI_DataType_F64 || type == XLA_FFI_DataType_C64  ? 8
                          : type == XLA_FFI_DataType_F32 || type == XLA_FFI_DataType_S32  ? 4
                          : type == XLA_FFI_DataType_BF16 || type == XLA_FFI_DataType_S16 ? 2
                                                                                          : 1;
    memory.emplace_back(new char[elements * bytes]());
    return FrameBuffer{type, memory.back().get(), {elements}};
  };
  std::vector<FrameBuffer> operands;
  for (int64_t elements : call.operands) operands.push_back(buffer(call.operand_type, elements));
  std::map<std::string, Attribute> attributes;
  for (const auto& [name, values] : call.attributes) {
    attributes[name] = Attribute::Numbers(values);
  }
  for (const auto& [name, value] : call.numbers) attributes[name] = Attribute::Number(value);
  return CallHandler(call.handler, operands, {buffer(call.result_type, call.result)}, attributes,
                     Pool::kInline, threads);
}

struct Refused {
  const Call* call;
  const char* what;
  void (*change)(Call&);
};

const Refused kRefused[] = {
    {&kTranspose, "another size", [](Call& c) { c.attributes["sizes"][0] = 4; }},
    {&kTranspose, "a negative size", [](Call& c) { c.attributes["sizes"] = {-3, -4, 5}; }},
    {&kTranspose, "the largest sizes", [](Call& c) { c.attributes["sizes"] = {kMost, kMost, 4}; }},
    {&kTranspose, "a dimension twice", [](Call& c) { c.attributes["permutation"][0] = 0; }},
    {&kTranspose, "a dimension too far", [](Call& c) { c.attributes["permutation"][0] = 3; }},
    {&kTranspose, "a negative dimension", [](Call& c) { c.attributes["permutation"][0] = -1; }},
    {&kTranspose, "a dimension too few", [](Call& c) { c.attributes["permutation"].pop_back(); }},
    {&kTranspose, "no dimensions", [](Call& c) { c.attributes["permutation"].clear(); }},
    {&kTranspose, "a small result", [](Call& c) { c.result = 59; }},
    {&kTranspose, "a small operand", [](Call& c) { c.operands = {59}; }},
    {&kTranspose, "two types", [](Call& c) { c.result_type = XLA_FFI_DataType_F64; }},
    {&kTranspose, "tokens",
     [](Call& c) { c.operand_type = c.result_type = XLA_FFI_DataType_TOKEN; }},
    {&kTranspose, "two operands", [](Call& c) { c.operands = {60, 60}; }},
    {&kTranspose, "no choice of stores", [](Call& c) { c.numbers.clear(); }},
    {&kTranspose, "no permutation", [](Call& c) { c.attributes.erase("permutation"); }},
    {&kSum, "another size", [](Call& c) { c.attributes["sizes"][1] = 5; }},
    {&kSum, "a negative size", [](Call& c) { c.attributes["sizes"] = {-3, -4, 5}; }},
    {&kSum, "the largest sizes", [](Call& c) { c.attributes["sizes"] = {kMost, kMost, 4}; }},
    {&kSum, "a flag of 2", [](Call& c) { c.attributes["reduced"][1] = 2; }},
    {&kSum, "a negative flag", [](Call& c) { c.attributes["reduced"][1] = -1; }},
    {&kSum, "a flag too few", [](Call& c) { c.attributes["reduced"].pop_back(); }},
    {&kSum, "a small result", [](Call& c) { c.result = 14; }},
    {&kSum, "a small operand", [](Call& c) { c.operands = {59}; }},
    {&kSum, "two types", [](Call& c) { c.result_type = XLA_FFI_DataType_F64; }},
    {&kSum, "a type of no kernel",
     [](Call& c) { c.operand_type = c.result_type = XLA_FFI_DataType_F8E5M2; }},
    {&kSum, "booleans", [](Call& c) { c.operand_type = c.result_type = XLA_FFI_DataType_PRED; }},
    {&kAdd, "another size", [](Call& c) { c.attributes["sizes"][0] = 4; }},
    {&kAdd, "a negative size", [](Call& c) { c.attributes["sizes"] = {-3, -4, 5}; }},
    {&kAdd, "no sizes", [](Call& c) { c.attributes["sizes"].clear(); }},
    {&kAdd, "nothing at all",
     [](Call& c) {
       for (auto& [name, values] : c.attributes) values.clear();
       c.result = 1;
     }},
    {&kAdd, "the largest sizes", [](Call& c) { c.attributes["sizes"] = {kMost, kMost, 4}; }},
    {&kAdd, "a stride too far", [](Call& c) { c.attributes["lhs_strides"][0] = 5; }},
    {&kAdd, "the largest stride", [](Call& c) { c.attributes["lhs_strides"][0] = kMost; }},
    {&kAdd, "strides whose sum overflows",
     [](Call& c) { c.attributes["lhs_strides"] = {kMost / 2, kMost / 3, 0}; }},
    {&kAdd, "a negative stride", [](Call& c) { c.attributes["rhs_strides"][0] = -1; }},
    {&kAdd, "a stride too few", [](Call& c) { c.attributes["rhs_strides"].pop_back(); }},
    {&kAdd, "steps between elements", [](Call& c) { c.attributes["rhs_strides"] = {0, 0, 2}; }},
    {&kAdd, "a small result", [](Call& c) { c.result = 59; }},
    {&kAdd, "a small operand", [](Call& c) { c.operands[1] = 4; }},
    {&kAdd, "an empty operand", [](Call& c) { c.operands[1] = 0; }},
    {&kAdd, "two types", [](Call& c) { c.result_type = XLA_FFI_DataType_F64; }},
    {&kAdd, "a type of no kernel",
     [](Call& c) { c.operand_type = c.result_type = XLA_FFI_DataType_C64; }},
};

// A call of small buffers whose attributes are drawn from what might break it.
Call RandomCall(const Call& valid, std::mt19937& random) {
  const int64_t numbers[] = {0, 1, 1, 1, 2, 2, 3, 4, 5, -1, int64_t{1} << 33, kMost};
  const XLA_FFI_DataType types[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_F64,
                                    XLA_FFI_DataType_BF16, XLA_FFI_DataType_S8,
                                    XLA_FFI_DataType_C128};
  Call call = valid;
  const size_t rank = random() % 4;
  for (auto& [name, values] : call.attributes) {
    values.resize(random() % 16 == 0 ? random() % 4 : rank);
    // Mostly what is plausible: otherwise every call is refused at its first attribute.
    for (int64_t& value : values) {
      value = numbers[random() % (random() % 16 == 0 ? 12 : name == "reduced" ? 3 : 9)];
    }
  }
  auto& permutation = call.attributes["permutation"];
  if (call.handler != CpuTranspose) {
    call.attributes.erase("permutation");
  } else if (random() % 8 != 0) {
    for (size_t i = 0; i < permutation.size(); ++i) permutation[i] = static_cast<int64_t>(i);
    std::shuffle(permutation.begin(), permutation.end(), random);
  }
  int64_t count = 1, kept = 1;
  const auto& sizes = call.attributes["sizes"];
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || sizes[i] > 5) continue;
    count *= sizes[i];
    const auto reduced = call.attributes.find("reduced");
    if (reduced == call.attributes.end() || i >= reduced->second.size() ||
        reduced->second[i] == 0) {
      kept *= sizes[i];
    }
  }
  for (int64_t& elements : call.operands) {
    elements = call.handler == CpuAdd || random() % 8 == 0 ? random() % 80 : count;
  }
  call.result = random() % 8 == 0 ? random() % 80 : kept;
  call.operand_type = call.result_type = types[random() % 5];
  if (random() % 8 == 0) call.result_type = types[random() % 5];
  return call;
}

}  // namespace

void CheckHostileArrayCalls(Counts& counts) {
  for (const Refused& refused : kRefused) {
    Call call = *refused.call;
    refused.change(call);
    counts.Check(Run(call).size() > sizeof "error: ",
                 std::string(call.name) + " refused: " + refused.what);
  }
  std::mt19937 random(5);
  for (const Call* valid : {&kTranspose, &kSum, &kAdd}) {
    counts.Check(Run(*valid).empty(), std::string(valid->name) + ": " + Run(*valid));
    int computed = 0, refused = 0;
    while (computed + refused < 20000) {
      const Call call = RandomCall(*valid, random);
      ++(Run(call, 1 + random() % 4).empty() ? computed : refused);
    }
    counts.Check(computed > 1000, std::string("random calls reach ") + valid->name);
    counts.Check(refused > 1000, std::string("random calls of ") + valid->name + " are refused");
    std::printf("%s calls: of 20000 random ones %d computed, %d refused\n", valid->name, computed,
                refused);
  }
}

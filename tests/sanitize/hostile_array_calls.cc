// Calls of the handlers of transposes, sums, additions, reductions to segments and updates of rows
// as no lowering makes them: refused with a reason, or computed within their buffers.
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

// Updates of 40 rows of 5 numbers in a table of 6.
struct UpdateCall {
  std::map<std::string, int64_t> numbers = {
      {"edges", 40}, {"rows", 6}, {"columns", 5}, {"reduction", 0}};
  XLA_FFI_DataType type = XLA_FFI_DataType_F32, key_type = XLA_FFI_DataType_S32;
  int tables = 1;
  bool is_in_place = true;
  std::vector<int32_t> keys = std::vector<int32_t>(40);
};

std::string Run(const UpdateCall& call) {
  std::vector<float> rows(40 * 5), table(6 * 5);
  const auto size = static_cast<int64_t>(call.keys.size());
  const std::unique_ptr<int32_t[]> keys(new int32_t[size]);
  const std::unique_ptr<float[]> out(new float[6 * 5]());
  std::copy(call.keys.begin(), call.keys.end(), keys.get());
  std::vector<FrameBuffer> operands = {{call.type, rows.data(), {40, 5}},
                                       {call.key_type, keys.get(), {size}}};
  for (int i = 0; i < call.tables; ++i) {
    operands.push_back({call.type, call.is_in_place ? out.get() : table.data(), {6, 5}});
  }
  std::map<std::string, Attribute> attributes;
  for (const auto& [name, value] : call.numbers) attributes[name] = Attribute::Number(value);
  return CallHandler(CpuUpdateRows, operands, {{call.type, out.get(), {6, 5}}}, attributes,
                     Pool::kInline, 2);
}

struct RefusedUpdates {
  const char* what;
  void (*change)(UpdateCall&);
};

const RefusedUpdates kRefusedUpdates[] = {
    {"another number of edges", [](UpdateCall& c) { c.numbers["edges"] = 39; }},
    {"no edges", [](UpdateCall& c) { c.numbers["edges"] = 0; }},
    {"more rows", [](UpdateCall& c) { c.numbers["rows"] = 7; }},
    {"the most rows", [](UpdateCall& c) { c.numbers["rows"] = kMost; }},
    {"negative columns", [](UpdateCall& c) { c.numbers["columns"] = -5; }},
    {"the most columns", [](UpdateCall& c) { c.numbers["columns"] = kMost; }},
    {"no such reduction", [](UpdateCall& c) { c.numbers["reduction"] = 4; }},
    {"a key too few", [](UpdateCall& c) { c.keys.pop_back(); }},
    {"keys of floats", [](UpdateCall& c) { c.key_type = XLA_FFI_DataType_F32; }},
    {"two tables", [](UpdateCall& c) { c.tables = 2; }},
    {"a table elsewhere", [](UpdateCall& c) { c.is_in_place = false; }},
    {"a type of no kernel", [](UpdateCall& c) { c.type = XLA_FFI_DataType_F8E5M2; }},
};

void CheckHostileUpdates(Counts& counts) {
  for (const RefusedUpdates& refused : kRefusedUpdates) {
    UpdateCall call;
    refused.change(call);
    counts.Check(Run(call).size() > sizeof "error: ",
                 std::string("updates refused: ") + refused.what);
  }
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) {
    UpdateCall call;
    for (int32_t& key : call.keys) {
      key = static_cast<int32_t>(random() % 2 == 0 ? random() : random() % 8);
    }
    call.tables = i % 2;
    call.numbers["reduction"] = random() % 4;
    counts.Check(Run(call).empty(), "updates: any keys: " + Run(call));
  }
}

// A reduction of 40 rows of 5 numbers to 6 segments. What is read at random indices is drawn.
struct SegmentCall {
  std::map<std::string, int64_t> numbers = {{"edges", 40},  {"segments", 6},  {"batch", 1},
                                            {"columns", 5}, {"reduction", 0}, {"by_key", 1}};
  XLA_FFI_DataType type = XLA_FFI_DataType_F32;
  std::vector<std::vector<int32_t>> indices = {std::vector<int32_t>(40)};
};

std::string Run(const SegmentCall& call, int64_t threads = 1) {
  std::vector<float> rows(40 * 5), out(6 * 5);
  std::vector<FrameBuffer> operands = {{call.type, rows.data(), {40, 5}}};
  std::vector<std::unique_ptr<int32_t[]>> memory;
  for (const auto& index : call.indices) {
    memory.emplace_back(new int32_t[index.size()]);
    std::copy(index.begin(), index.end(), memory.back().get());
    operands.push_back(
        {XLA_FFI_DataType_S32, memory.back().get(), {static_cast<int64_t>(index.size())}});
  }
  std::map<std::string, Attribute> attributes;
  for (const auto& [name, value] : call.numbers) attributes[name] = Attribute::Number(value);
  return CallHandler(CpuSegmentReduce, operands, {{call.type, out.data(), {6, 5}}}, attributes,
                     Pool::kInline, threads);
}

struct RefusedSegments {
  const char* what;
  void (*change)(SegmentCall&);
};

const RefusedSegments kRefusedSegments[] = {
    {"another number of edges", [](SegmentCall& c) { c.numbers["edges"] = 39; }},
    {"a negative size", [](SegmentCall& c) { c.numbers["edges"] = -40; }},
    {"more segments", [](SegmentCall& c) { c.numbers["segments"] = 7; }},
    {"the most segments", [](SegmentCall& c) { c.numbers["segments"] = kMost; }},
    {"no segments", [](SegmentCall& c) { c.numbers["segments"] = 0; }},
    {"the most batches", [](SegmentCall& c) { c.numbers["batch"] = kMost; }},
    {"the most columns", [](SegmentCall& c) { c.numbers["columns"] = kMost; }},
    {"no such reduction", [](SegmentCall& c) { c.numbers["reduction"] = 4; }},
    {"a negative reduction", [](SegmentCall& c) { c.numbers["reduction"] = -1; }},
    {"a key too few", [](SegmentCall& c) { c.indices[0].pop_back(); }},
    {"no keys", [](SegmentCall& c) { c.indices.clear(); }},
    {"two arrays of keys", [](SegmentCall& c) { c.indices.push_back(c.indices[0]); }},
    {"keys of batches", [](SegmentCall& c) { c.numbers["batch"] = 2, c.numbers["segments"] = 3; }},
    {"bounds that do not ascend",
     [](SegmentCall& c) {
       c.numbers["by_key"] = 0;
       c.indices = {{0, 0, 9, 8, 20, 30, 40, 40, 40}};
     }},
    {"bounds that end too far",
     [](SegmentCall& c) {
       c.numbers["by_key"] = 0;
       c.indices = {{0, 0, 8, 9, 20, 30, 40, 40, 41}};
     }},
    {"bounds that begin too late",
     [](SegmentCall& c) {
       c.numbers["by_key"] = 0;
       c.indices = {{1, 1, 8, 9, 20, 30, 40, 40, 40}};
     }},
    {"a bound too few",
     [](SegmentCall& c) {
       c.numbers["by_key"] = 0;
       c.indices = {{0, 0, 8, 9, 20, 30, 40, 40}};
     }},
    {"a type of no kernel", [](SegmentCall& c) { c.type = XLA_FFI_DataType_F8E5M2; }},
    {"complex maxima",
     [](SegmentCall& c) {
       c.type = XLA_FFI_DataType_C64;
       c.numbers["reduction"] = 2;
     }},
};

void CheckHostileSegments(Counts& counts) {
  for (const RefusedSegments& refused : kRefusedSegments) {
    SegmentCall call;
    refused.change(call);
    counts.Check(Run(call).size() > sizeof "error: ",
                 std::string("segments refused: ") + refused.what);
  }
  std::mt19937 random(6);
  const auto any = [&] {
    return random() % 2 == 0 ? static_cast<int32_t>(random()) : static_cast<int32_t>(random() % 8);
  };
  for (int i = 0; i < 2000; ++i) {
    SegmentCall call;
    for (int32_t& key : call.indices[0]) key = any();
    call.numbers["reduction"] = random() % 4;
    counts.Check(Run(call).empty(), "segments: any keys: " + Run(call));
    call.numbers["by_key"] = 0;
    std::vector<int32_t> bounds = {0, 0, 0, 0, 0, 0, 0, 0, 40};
    for (int j = 1; j < 8; ++j) bounds[j] = random() % 41;
    std::sort(bounds.begin(), bounds.end());
    call.indices.push_back(bounds);
    counts.Check(Run(call).empty(), "segments: any order: " + Run(call));
  }
  // Any keys of any number of bins have an order, and bounds that ascend.
  for (int64_t bins : {1, 8, 300, 3000, 5000000}) {
    for (int64_t rows : {0, 1, 777}) {
      for (bool is_sorted : {false, true}) {
        const std::unique_ptr<int32_t[]> keys(new int32_t[rows]), order(new int32_t[rows]);
        const std::unique_ptr<int32_t[]> bounds(new int32_t[bins + 1]);
        for (int64_t i = 0; i < rows; ++i) keys[i] = any();
        std::vector<FrameBuffer> results;
        if (!is_sorted) results.push_back({XLA_FFI_DataType_S32, order.get(), {rows}});
        results.push_back({XLA_FFI_DataType_S32, bounds.get(), {bins + 1}});
        const std::string error =
            CallHandler(CpuOrderByKey, {{XLA_FFI_DataType_S32, keys.get(), {rows}}}, results, {},
                        Pool::kInline, 2);
        bool holds = error.empty() && bounds[0] == 0 && bounds[bins] == rows &&
                     std::is_sorted(bounds.get(), bounds.get() + bins + 1);
        if (!is_sorted) {
          std::sort(order.get(), order.get() + rows);
          for (int64_t i = 0; i < rows; ++i) holds = holds && order[i] == i;
        }
        counts.Check(holds, "order of any keys in " + std::to_string(bins) + " bins: " + error);
      }
    }
  }
  int32_t numbers[4] = {};
  const FrameBuffer keys = {XLA_FFI_DataType_S32, numbers, {4}};
  const std::vector<std::vector<FrameBuffer>> refused = {
      {},
      {keys, keys, keys},
      {{XLA_FFI_DataType_S32, numbers, {3}}, keys},
      {{XLA_FFI_DataType_S32, numbers, {1}}},
      {{XLA_FFI_DataType_F32, numbers, {4}}}};
  for (const auto& results : refused) {
    const std::string error = CallHandler(CpuOrderByKey, {keys}, results, {}, Pool::kInline, 1);
    counts.Check(error.size() > sizeof "error: ",
                 "order refused: " + std::to_string(results.size()) + " results");
  }
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
  CheckHostileSegments(counts);
  CheckHostileUpdates(counts);
}

// Calls of the CPU handler as no lowering makes them: refused with a reason, or computed within
// their buffers.
#include <cstdint>
#include <limits>
#include <random>

#include "check.h"
#include "ffi_frame.h"
#include "handlers.h"

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// A call of float32 (4 x 5) x (5 x 6), to be changed by those who want to break it.
struct Call {
  XLA_FFI_DataType lhs_type = XLA_FFI_DataType_F32, rhs_type = XLA_FFI_DataType_F32,
                   out_type = XLA_FFI_DataType_F32;
  std::vector<int64_t> lhs_dims = {4, 5}, rhs_dims = {5, 6}, out_dims = {4, 6};
  std::map<std::string, Attribute> attributes = {
      {"lhs_strides", Attribute::Numbers({5, 1})},
      {"out_strides", Attribute::Numbers({6, 1})},
      {"rhs_strides", Attribute::Numbers({6, 1})},
      {"sizes", Attribute::Numbers({4, 6, 5})},
  };
  size_t operands = 2;

  std::vector<int64_t>& Numbers(const char* name) { return attributes[name].numbers; }
};

size_t Elements(const std::vector<int64_t>& dims) {
  size_t count = 1;
  for (int64_t dim : dims) count *= static_cast<size_t>(dim);
  return count;
}

size_t BytesOf(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_C128:
      return 16;
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
      return 4;
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_F16:
      return 2;
    default:
      return 1;
  }
}

std::string Run(Call call, Pool pool = Pool::kInline, int64_t threads = 1) {
  std::vector<std::unique_ptr<char[]>> memory;
  const auto buffer = [&](XLA_FFI_DataType type, const std::vector<int64_t>& dims) {
    memory.emplace_back(new char[Elements(dims) * BytesOf(type)]());
    return FrameBuffer{type, memory.back().get(), dims};
  };
  std::vector<FrameBuffer> operands = {buffer(call.lhs_type, call.lhs_dims),
                                       buffer(call.rhs_type, call.rhs_dims)};
  operands.resize(call.operands, operands[0]);
  return CallHandler(CpuMatmul, operands, {buffer(call.out_type, call.out_dims)}, call.attributes,
                     pool, threads);
}

using Change = void (*)(Call&);

struct Refused {
  const char* what;
  Change change;
};

const Refused kRefused[] = {
    {"no sizes", [](Call& c) { c.Numbers("sizes") = {}; }},
    {"two sizes", [](Call& c) { c.Numbers("sizes") = {4, 6}; }},
    {"eight sizes", [](Call& c) { c.Numbers("sizes") = {1, 1, 1, 1, 1, 4, 6, 5}; }},
    {"a batch size that no stride goes with", [](Call& c) { c.Numbers("sizes") = {1, 4, 6, 5}; }},
    {"m of 0", [](Call& c) { c.Numbers("sizes")[0] = 0; }},
    {"n of -1", [](Call& c) { c.Numbers("sizes")[1] = -1; }},
    {"k of the least number", [](Call& c) { c.Numbers("sizes")[2] = -kMost - 1; }},
    {"m beyond lhs", [](Call& c) { c.Numbers("sizes")[0] = 5; }},
    {"n beyond rhs", [](Call& c) { c.Numbers("sizes")[1] = 7; }},
    {"k beyond both", [](Call& c) { c.Numbers("sizes")[2] = 6; }},
    {"the largest m", [](Call& c) { c.Numbers("sizes")[0] = kMost; }},
    {"the largest sizes", [](Call& c) { c.Numbers("sizes") = {kMost, kMost, kMost}; }},
    {"a negative stride", [](Call& c) { c.Numbers("lhs_strides")[0] = -1; }},
    {"the largest stride", [](Call& c) { c.Numbers("lhs_strides")[0] = kMost; }},
    {"strides whose sum overflows",
     [](Call& c) { c.Numbers("rhs_strides") = {kMost / 4, kMost / 5}; }},
    {"one stride", [](Call& c) { c.Numbers("rhs_strides") = {1}; }},
    {"an output that overlaps itself", [](Call& c) { c.Numbers("out_strides")[0] = 5; }},
    {"an output of one row only", [](Call& c) { c.Numbers("out_strides")[0] = 0; }},
    {"an output with steps between columns", [](Call& c) { c.Numbers("out_strides") = {12, 2}; }},
    {"an output that is too small", [](Call& c) { c.out_dims = {23}; }},
    {"an lhs that is too small", [](Call& c) { c.lhs_dims = {19}; }},
    {"an empty rhs", [](Call& c) { c.rhs_dims = {0}; }},
    {"an attribute of another type", [](Call& c) { c.attributes["sizes"] = Attribute::Number(3); }},
    {"an attribute too few", [](Call& c) { c.attributes.erase("sizes"); }},
    {"an attribute too many", [](Call& c) { c.attributes["more"] = Attribute::Number(3); }},
    {"an attribute by another name",
     [](Call& c) {
       c.attributes.erase("sizes");
       c.attributes["shape"] = Attribute::Numbers({4, 6, 5});
     }},
    {"three operands", [](Call& c) { c.operands = 3; }},
    {"one operand", [](Call& c) { c.operands = 1; }},
    {"complex operands of too few numbers",
     [](Call& c) {
       c.lhs_type = XLA_FFI_DataType_C64;
       c.lhs_dims = {3, 3};
     }},
    {"operands of two types", [](Call& c) { c.rhs_type = XLA_FFI_DataType_F64; }},
    {"an output type that no kernel writes", [](Call& c) { c.out_type = XLA_FFI_DataType_S32; }},
    {"a type of no kernel", [](Call& c) { c.lhs_type = XLA_FFI_DataType_F8E8M0FNU; }},
    {"batches whose number overflows",
     [](Call& c) {
       c.Numbers("sizes") = {kMost, kMost, 4, 6, 5};
       for (const char* name : {"lhs_strides", "rhs_strides", "out_strides"}) {
         c.Numbers(name).insert(c.Numbers(name).begin(), 2, 0);
       }
     }},
};

// A call of small buffers whose attributes are drawn from what might break it.
Call RandomCall(std::mt19937& random) {
  const int64_t sizes[] = {0, 1, 1, 2, 3, 4, 5, 8, 9, -1, int64_t{1} << 33, kMost};
  const int64_t strides[] = {0, 1, 1, 2, 3, 5, 8, 16, -1, int64_t{1} << 40, kMost};
  const XLA_FFI_DataType types[] = {XLA_FFI_DataType_F32,      XLA_FFI_DataType_F64,
                                    XLA_FFI_DataType_BF16,     XLA_FFI_DataType_F16,
                                    XLA_FFI_DataType_F8E4M3FN, XLA_FFI_DataType_S8,
                                    XLA_FFI_DataType_S32,      XLA_FFI_DataType_C128};
  // Mostly what is plausible: otherwise every call is refused at its first attribute.
  const auto pick = [&](const auto& from) {
    const size_t count = sizeof from / sizeof *from;
    return from[random() % (random() % 8 == 0 ? count : count - 3)];
  };
  Call call;
  const size_t batch = random() % 3;
  const auto numbers = [&](size_t count, const auto& from) {
    std::vector<int64_t> values(count);
    for (int64_t& value : values) value = pick(from);
    return values;
  };
  call.Numbers("sizes") = numbers(batch + 3, sizes);
  for (const char* name : {"lhs_strides", "rhs_strides", "out_strides"}) {
    call.Numbers(name) = numbers(batch + 2, strides);
  }
  if (random() % 4 != 0) call.Numbers("out_strides").back() = 1;
  call.lhs_type = call.rhs_type = types[random() % 8];
  if (random() % 8 == 0) call.rhs_type = types[random() % 8];
  call.out_type = call.lhs_type == XLA_FFI_DataType_S8 ? XLA_FFI_DataType_S32 : call.lhs_type;
  if (call.lhs_type == XLA_FFI_DataType_F8E4M3FN) call.out_type = XLA_FFI_DataType_F32;
  for (auto* dims : {&call.lhs_dims, &call.rhs_dims, &call.out_dims}) {
    *dims = {static_cast<int64_t>(random() % 80)};
  }
  return call;
}

// A k that both operands read without moving is only bounded by patience.
bool IsEndless(Call& call) {
  const size_t batch = call.Numbers("sizes").size() - 3;
  return call.Numbers("sizes").back() > 1000 && call.Numbers("lhs_strides").back() == 0 &&
         call.Numbers("rhs_strides")[batch] == 0;
}

}  // namespace

void CheckHostileCalls(Counts& counts) {
  counts.Check(Run(Call()).empty(), "the call that others are changed from: " + Run(Call()));
  for (const Refused& refused : kRefused) {
    Call call;
    refused.change(call);
    const std::string said = Run(call);
    counts.Check(said.size() > sizeof "error: ", std::string("refused: ") + refused.what);
  }

  // An array of complex numbers is one of twice as many real numbers.
  Call pairs;
  pairs.lhs_type = pairs.out_type = XLA_FFI_DataType_C64;
  pairs.lhs_dims = {2, 5};
  pairs.out_dims = {2, 6};
  counts.Check(Run(pairs).empty(), "complex arrays: " + Run(pairs));

  // Nothing to do is no error.
  Call empty;
  empty.Numbers("sizes") = {0, 4, 6, 5};
  for (const char* name : {"lhs_strides", "rhs_strides", "out_strides"}) {
    empty.Numbers(name).insert(empty.Numbers(name).begin(), kMost);
  }
  counts.Check(Run(empty).empty(), "a batch of none: " + Run(empty));

  std::mt19937 random(2);
  int computed = 0, refused = 0;
  while (computed + refused < 60000) {
    Call call = RandomCall(random);
    if (IsEndless(call)) continue;
    ++(Run(call, Pool::kInline, 1 + random() % 4).empty() ? computed : refused);
  }
  counts.Check(computed > 1000, "random calls reach the kernels");
  counts.Check(refused > 1000, "random calls are refused");
  std::printf("handler calls: %zu kinds refused; of 60000 random calls %d computed, %d refused\n",
              sizeof kRefused / sizeof *kRefused, computed, refused);
}

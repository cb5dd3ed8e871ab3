// The custom call jax_tilekern_cpu_add: out = lhs + rhs with broadcasting.
//
// Attributes, in elements:
//   sizes        the result's dimensions; it is dense and row-major
//   lhs_strides  the left operand's stride in each of them, 0 to broadcast
//   rhs_strides  the right operand's
// Innermost strides are 0 or 1. All three arrays have the same type; integers wrap.
#include <algorithm>
#include <cstring>

#include "cpu/call.h"
#include "cpu/dispatch.h"
#include "cpu/product.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

// Rows are divided into runs of so many elements.
constexpr int64_t kRun = 32 << 10;
// Shorter rows are added together, about so many elements at once.
constexpr int64_t kShort = 128, kShortRun = 1024;

// Copies of one row, which an operand repeats.
struct Repeated {
  const char* row = nullptr;
  int64_t bytes = 0;
  alignas(64) char data[kShortRun * sizeof(double)];

  const char* Fill(const char* from, int64_t row_bytes, int64_t all) {
    if (row == from && bytes >= all) return data;
    std::memcpy(data, from, row_bytes);
    for (int64_t done = row_bytes; done < all; done *= 2) {
      std::memcpy(data + done, data, std::min(done, all - done));
    }
    row = from, bytes = all;
    return data;
  }
};

void CheckOperand(const char* name, ffi::AnyBuffer operand, ffi::Span<const int64_t> sizes,
                  ffi::Span<const int64_t> strides) {
  const std::string text = std::string(name) + "_strides " + ToString(strides);
  if (strides.size() != sizes.size()) Refuse(text + " do not fit sizes " + ToString(sizes));
  if (strides.back() > 1) Refuse(text + " must end in 0 or 1");
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (strides[d] < 0) Refuse(text + " has a negative stride");
    last = CheckedAdd(last, CheckedMultiply(sizes[d] - 1, strides[d], name), name);
  }
  if (last >= static_cast<int64_t>(operand.element_count())) Refuse(text + " exceed the operand");
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Span<const int64_t> sizes,
                  ffi::Span<const int64_t> lhs_strides, ffi::Span<const int64_t> rhs_strides) {
  return Guarded("jax_tilekern_cpu_add", [&] {
    const DType type = TypeOf(*out);
    if (TypeOf(lhs) != type || TypeOf(rhs) != type) Refuse("operands and result differ in type");
    const AddKernel kernel = Kernels().add[static_cast<int>(type)];
    if (kernel == nullptr) Refuse(std::string("no kernel for ") + Name(type));
    const int64_t count = CheckedCount(sizes);
    if (sizes.size() == 0 || static_cast<int64_t>(out->element_count()) != count) {
      Refuse("sizes " + ToString(sizes) + " are not the result's");
    }
    if (count == 0) return;
    CheckOperand("lhs", lhs, sizes, lhs_strides);
    CheckOperand("rhs", rhs, sizes, rhs_strides);
    AdviseNewResult(*out);

    // A run is elements of the last dimension, or short rows that each operand has next to each
    // other or repeats.
    size_t split = sizes.size() - 1;
    int64_t row = 1;
    const auto lie_together = [&](ffi::Span<const int64_t> strides) {
      const int64_t step = strides[split - 1];
      return strides[split] == 1 && (step == 0 || step == sizes[split]);
    };
    if (split > 0 && sizes[split] > 1 && sizes[split] < kShort && lie_together(lhs_strides) &&
        lie_together(rhs_strides)) {
      row = sizes[split--];
    }
    const int64_t bytes = Bytes(type), extent = sizes[split];
    const int64_t most = row > 1 ? kShortRun / row : kRun, runs = CeilDiv(extent, most);
    const auto add_runs = [&](int64_t first, int64_t last) {
      Repeated copies[2];
      for (int64_t i = first; i < last; ++i) {
        const int64_t at = i % runs * most, length = std::min(extent - at, most) * row;
        const auto operand = [&](ffi::AnyBuffer x, ffi::Span<const int64_t> strides, Repeated& to) {
          int64_t place = at * strides[split], rest = i / runs;
          for (size_t d = split; d-- > 0; rest /= sizes[d]) place += rest % sizes[d] * strides[d];
          const char* from = static_cast<const char*>(x.untyped_data()) + place * bytes;
          return row > 1 && strides[split] == 0 ? to.Fill(from, row * bytes, length * bytes) : from;
        };
        kernel(operand(lhs, lhs_strides, copies[0]), lhs_strides.back(),
               operand(rhs, rhs_strides, copies[1]), rhs_strides.back(),
               static_cast<char*>(out->untyped_data()) + (i / runs * extent + at) * row * bytes,
               length);
      }
    };
    WorkersOf(pool).RunRanges(count / (extent * row) * runs, std::min(extent, most) * row * bytes,
                              add_runs);
  });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuAdd, tilekern::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes")
                                  .Attr<xla::ffi::Span<const int64_t>>("lhs_strides")
                                  .Attr<xla::ffi::Span<const int64_t>>("rhs_strides"));

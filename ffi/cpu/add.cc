// The custom call jax_tilekern_cpu_add: out = lhs + rhs with broadcasting.
//
// Attributes, in elements:
//   sizes        the result's dimensions; it is dense and row-major
//   lhs_strides  the left operand's stride in each of them, 0 to broadcast
//   rhs_strides  the right operand's
// Innermost strides are 0 or 1. All three arrays have the same type; integers wrap.
#include <algorithm>

#include "cpu/call.h"
#include "cpu/dispatch.h"
#include "cpu/product.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

// Rows are divided into runs of so many elements.
constexpr int64_t kRun = 32 << 10;

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

    const size_t last_dim = sizes.size() - 1;
    const int64_t bytes = Bytes(type), row = sizes[last_dim], runs = CeilDiv(row, kRun);
    const auto add_runs = [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t at = i % runs * kRun, length = std::min(row - at, kRun);
        const auto operand = [&](ffi::AnyBuffer x, ffi::Span<const int64_t> strides) {
          int64_t place = at * strides[last_dim], rest = i / runs;
          for (size_t d = last_dim; d-- > 0; rest /= sizes[d]) {
            place += rest % sizes[d] * strides[d];
          }
          return static_cast<const char*>(x.untyped_data()) + place * bytes;
        };
        kernel(operand(lhs, lhs_strides), lhs_strides.back(), operand(rhs, rhs_strides),
               rhs_strides.back(),
               static_cast<char*>(out->untyped_data()) + (i / runs * row + at) * bytes, length);
      }
    };
    WorkersOf(pool).RunRanges(count / row * runs, std::min(row, kRun) * bytes, add_runs);
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

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

// Elements of a run per task.
constexpr int64_t kRun = 32 << 10;

void CheckOperand(const char* name, ffi::AnyBuffer operand, ffi::Span<const int64_t> sizes,
                  ffi::Span<const int64_t> strides) {
  const std::string text = std::string(name) + "_strides " + ToString(strides);
  if (strides.size() != sizes.size()) Refuse(text + " do not fit sizes " + ToString(sizes));
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (strides[i] < 0) Refuse(text + " has a negative stride");
    last = CheckedAdd(last, CheckedMultiply(sizes[i] - 1, strides[i], name), name);
  }
  if (strides.back() > 1) Refuse(text + " must end in 0 or 1");
  const auto elements = static_cast<int64_t>(operand.element_count());
  if (last >= elements) {
    Refuse(std::string(name) + " has " + std::to_string(elements) +
           " elements, its strides reach " + std::to_string(last));
  }
}

void RunCall(const Workers& workers, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer out,
             ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> lhs_strides,
             ffi::Span<const int64_t> rhs_strides) {
  const DType type = TypeOf(out);
  if (TypeOf(lhs) != type || TypeOf(rhs) != type) Refuse("operands and result differ in type");
  const AddKernel kernel = Kernels().add[static_cast<int>(type)];
  if (kernel == nullptr) Refuse(std::string("no kernel for ") + Name(type));
  if (sizes.size() == 0) Refuse("sizes are empty");
  const int64_t count = CheckedCount(sizes);
  if (static_cast<int64_t>(out.element_count()) != count) {
    Refuse("sizes " + ToString(sizes) + " are not those of " + std::to_string(out.element_count()) +
           " elements");
  }
  if (count == 0) return;
  CheckOperand("lhs", lhs, sizes, lhs_strides);
  CheckOperand("rhs", rhs, sizes, rhs_strides);

  const int64_t length = sizes.back(), lhs_step = lhs_strides.back(), rhs_step = rhs_strides.back();
  const int64_t runs = CeilDiv(length, kRun);
  const int64_t bytes = Bytes(type);
  const auto* left = static_cast<const char*>(lhs.untyped_data());
  const auto* right = static_cast<const char*>(rhs.untyped_data());
  auto* sums = static_cast<char*>(out.untyped_data());
  workers.RunRanges(count / length * runs, std::min(length, kRun) * bytes,
                    [&](int64_t first, int64_t last) {
                      for (int64_t i = first; i < last; ++i) {
                        const int64_t row = i / runs, at = i % runs * kRun;
                        int64_t left_at = at * lhs_step, right_at = at * rhs_step, rest = row;
                        for (size_t d = sizes.size() - 1; d-- > 0 && rest > 0; rest /= sizes[d]) {
                          left_at += rest % sizes[d] * lhs_strides[d];
                          right_at += rest % sizes[d] * rhs_strides[d];
                        }
                        kernel(left + left_at * bytes, lhs_step, right + right_at * bytes, rhs_step,
                               sums + (row * length + at) * bytes, std::min(kRun, length - at));
                      }
                    });
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Span<const int64_t> sizes,
                  ffi::Span<const int64_t> lhs_strides, ffi::Span<const int64_t> rhs_strides) {
  return Guarded("jax_tilekern_cpu_add", [&] {
    RunCall(WorkersOf(pool), lhs, rhs, *out, sizes, lhs_strides, rhs_strides);
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

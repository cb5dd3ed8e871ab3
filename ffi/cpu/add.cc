// The custom call jax_tilekern_cpu_add: out = lhs + rhs with broadcasting.
//
// Attributes, in elements:
//   sizes        the result's dimensions; it is dense and row-major
//   lhs_strides  the left operand's stride in each of them, 0 to broadcast
//   rhs_strides  the right operand's
// Innermost strides are 0 or 1. All three arrays have the same type; integers wrap.
#include <algorithm>
#include <vector>

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

// A row of the result, and where those of the operands begin. Going on to the next row needs no
// division, which takes longer than to add a short row.
class Row {
 public:
  using Integers = ffi::Span<const int64_t>;

  Row(int64_t row, Integers sizes, Integers lhs_strides, Integers rhs_strides)
      : sizes_(sizes), strides_{lhs_strides, rhs_strides}, index_(sizes.size() - 1) {
    for (size_t d = index_.size(); d-- > 0; row /= sizes[d]) {
      index_[d] = row % sizes[d];
      Move(d, index_[d]);
    }
  }

  // Returns the place of the first element in an operand.
  int64_t begin(int operand) const { return begins_[operand]; }

  void Advance() {
    for (size_t d = index_.size(); d-- > 0;) {
      // No place is beyond the last element, because the stride of a single row is any number.
      const bool is_last = ++index_[d] == sizes_[d];
      Move(d, is_last ? 1 - sizes_[d] : 1);
      if (!is_last) return;
      index_[d] = 0;
    }
  }

 private:
  void Move(size_t d, int64_t steps) {
    for (int operand = 0; operand < 2; ++operand) begins_[operand] += steps * strides_[operand][d];
  }

  const Integers sizes_, strides_[2];
  std::vector<int64_t> index_;
  int64_t begins_[2] = {0, 0};
};

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

    const int64_t bytes = Bytes(type), row = sizes.back(), runs = CeilDiv(row, kRun);
    const int64_t steps[] = {lhs_strides.back(), rhs_strides.back()};
    const auto* const left = static_cast<const char*>(lhs.untyped_data());
    const auto* const right = static_cast<const char*>(rhs.untyped_data());
    auto* const sums = static_cast<char*>(out->untyped_data());
    const auto add_runs = [&](int64_t first, int64_t last) {
      int64_t own = first / runs, run = first % runs;
      for (Row of(own, sizes, lhs_strides, rhs_strides); first < last; ++first) {
        const int64_t at = run * kRun, length = std::min(row - at, kRun);
        kernel(left + (of.begin(0) + at * steps[0]) * bytes, steps[0],
               right + (of.begin(1) + at * steps[1]) * bytes, steps[1],
               sums + (own * row + at) * bytes, length);
        if (++run < runs) continue;
        run = 0;
        ++own;
        of.Advance();
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

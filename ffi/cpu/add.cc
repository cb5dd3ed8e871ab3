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
// Shorter last dimensions are added together with the one before, so many elements at once.
constexpr int64_t kShort = 128;
constexpr int64_t kMergedRun = 1024;

void CheckOperand(const char* name, ffi::AnyBuffer operand, ffi::Span<const int64_t> sizes,
                  ffi::Span<const int64_t> strides) {
  const auto text = [&] { return std::string(name) + "_strides " + ToString(strides); };
  if (strides.size() != sizes.size()) Refuse(text() + " do not fit sizes " + ToString(sizes));
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (strides[i] < 0) Refuse(text() + " has a negative stride");
    last = CheckedAdd(last, CheckedMultiply(sizes[i] - 1, strides[i], name), name);
  }
  if (strides.back() > 1) Refuse(text() + " must end in 0 or 1");
  const auto elements = static_cast<int64_t>(operand.element_count());
  if (last >= elements) {
    Refuse(std::string(name) + " has " + std::to_string(elements) +
           " elements, its strides reach " + std::to_string(last));
  }
}

// Copies `rows` rows of `length` elements, `strides` apart in each dimension, to contiguous ones.
template <typename T>
void Gather(const char* from, int64_t row_stride, int64_t step, int64_t rows, int64_t length,
            char* to) {
  const T* source = reinterpret_cast<const T*>(from);
  T* dest = reinterpret_cast<T*>(to);
  for (int64_t r = 0; r < rows; ++r, source += row_stride) {
    for (int64_t i = 0; i < length; ++i) *dest++ = source[i * step];
  }
}

// A checked call. The last dimension is added in runs, and the last two together if the last one is
// too short for a kernel's vectors: an operand that is broadcast over them is first repeated.
class Addition {
 public:
  void Run(const Workers& workers) const {
    const size_t rank = sizes.size();
    const bool merged = rank > 1 && sizes[rank - 1] < kShort;
    const int64_t length = sizes[rank - 1], rows = merged ? sizes[rank - 2] : 1;
    const int64_t outer = rank - (merged ? 2 : 1);
    // Rows of a run, or elements of its only row.
    const int64_t most = merged ? std::max<int64_t>(kMergedRun / length, 1) : kRun;
    const int64_t extent = merged ? rows : length, unit = merged ? length : 1;
    const int64_t runs = CeilDiv(extent, most);
    int64_t count = runs;
    for (int64_t d = 0; d < outer; ++d) count *= sizes[d];
    workers.RunRanges(
        count, std::min(extent, most) * unit * bytes, [&](int64_t first, int64_t last) {
          Gathered left, right;
          for (int64_t i = first; i < last; ++i) {
            const int64_t at = i % runs * most, n = std::min(most, extent - at);
            int64_t left_at = 0, right_at = 0, rest = i / runs;
            for (int64_t d = outer; d-- > 0 && rest > 0; rest /= sizes[d]) {
              left_at += rest % sizes[d] * lhs_strides[d];
              right_at += rest % sizes[d] * rhs_strides[d];
            }
            char* sums = out + (i / runs * extent + at) * unit * bytes;
            if (!merged) {
              kernel(lhs + (left_at + at * lhs_strides[rank - 1]) * bytes, lhs_strides[rank - 1],
                     rhs + (right_at + at * rhs_strides[rank - 1]) * bytes, rhs_strides[rank - 1],
                     sums, n);
              continue;
            }
            kernel(
                Rows(lhs + (left_at + at * lhs_strides[rank - 2]) * bytes, lhs_strides, n, left), 1,
                Rows(rhs + (right_at + at * rhs_strides[rank - 2]) * bytes, rhs_strides, n, right),
                1, sums, n * length);
          }
        });
  }

  AddKernel kernel;
  int64_t bytes;
  const char* lhs;
  const char* rhs;
  char* out;
  ffi::Span<const int64_t> sizes, lhs_strides, rhs_strides;

 private:
  // Rows that were not contiguous.
  struct Gathered {
    const char* from = nullptr;
    int64_t rows = 0;
    alignas(64) char data[kMergedRun * sizeof(uint64_t)];
  };

  // Returns `n` rows as contiguous ones, which are those of the operand itself or in `gathered`.
  const char* Rows(const char* from, ffi::Span<const int64_t> strides, int64_t n,
                   Gathered& gathered) const {
    const int64_t row_stride = strides[strides.size() - 2], step = strides.back();
    const int64_t length = sizes.back();
    if (step == 1 && row_stride == length) return from;
    if (row_stride == 0 && gathered.from == from && gathered.rows >= n) return gathered.data;
    const auto gather = [&](auto element) {
      Gather<decltype(element)>(from, row_stride, step, n, length, gathered.data);
    };
    switch (bytes) {
      case 1:
        gather(uint8_t{});
        break;
      case 2:
        gather(uint16_t{});
        break;
      case 4:
        gather(uint32_t{});
        break;
      default:
        gather(uint64_t{});
    }
    gathered.from = from;
    gathered.rows = n;
    return gathered.data;
  }
};

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

  Addition addition = {kernel,
                       Bytes(type),
                       static_cast<const char*>(lhs.untyped_data()),
                       static_cast<const char*>(rhs.untyped_data()),
                       static_cast<char*>(out.untyped_data()),
                       sizes,
                       lhs_strides,
                       rhs_strides};
  addition.Run(workers);
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

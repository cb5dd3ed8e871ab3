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

// Elements of a run per task.
constexpr int64_t kRun = 32 << 10;
// Shorter last dimensions are added together with those before, so many elements at once.
constexpr int64_t kShort = 128;
constexpr int64_t kMergedRun = 1024;
// Rows of so many elements are added one by one rather than filled with a repeated element.
constexpr int64_t kFilled = 32;

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

// Fills `count` elements, and up to kExcess bytes after them, which is faster for a few elements.
constexpr int64_t kExcess = 16;
template <typename T>
T* Repeat(T value, int64_t count, T* to) {
  constexpr int64_t kCount = kExcess / sizeof(T);
  T values[kCount];
  std::fill_n(values, kCount, value);
  for (int64_t i = 0; i < count; i += kCount) std::memcpy(to + i, values, kExcess);
  return to + count;
}

// Appends copies of the `length` elements at `to` until there are `count` of them.
template <typename T>
T* RepeatRow(T* to, int64_t length, int64_t count) {
  const int64_t all = count * length;
  for (int64_t done = length; done < all; done *= 2) {
    std::copy_n(to, std::min(done, all - done), to + done);
  }
  return to + all;
}

// Copies the elements of `count` indices of the first of two or more dimensions to contiguous ones,
// as Repeat does, and returns what follows them.
template <typename T>
T* Gather(const T* from, int64_t count, const int64_t* sizes, const int64_t* strides, size_t rank,
          T* to) {
  if (count > 1 && strides[0] == 0) {
    const T* end = Gather(from, 1, sizes, strides, rank, to);
    return RepeatRow(to, end - to, count);
  }
  if (rank > 2) {
    for (int64_t i = 0; i < count; ++i) {
      to = Gather(from + i * strides[0], sizes[1], sizes + 1, strides + 1, rank - 1, to);
    }
    return to;
  }
  const int64_t length = sizes[1], step = strides[0];
  if (strides[1] == 0) {
    for (int64_t i = 0; i < count; ++i) to = Repeat(from[i * step], length, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to = std::copy_n(from + i * step, length, to);
  }
  return to;
}

// A checked call. The last dimension is added in runs. If it is too short for a kernel's vectors,
// it is merged with those before it: an operand that is broadcast over them is first repeated.
class Addition {
 public:
  void Run(const Workers& workers) const {
    const int64_t extent = sizes[split];
    const int64_t most = is_merged() ? std::max<int64_t>(kMergedRun / row, 1) : kRun;
    const int64_t runs = CeilDiv(extent, most);
    int64_t count = runs;
    for (size_t d = 0; d < split; ++d) count *= sizes[d];
    workers.RunRanges(count, std::min(extent, most) * row * bytes,
                      [&](int64_t first, int64_t last) {
                        Gathered left, right;
                        for (int64_t i = first; i < last; ++i) {
                          const int64_t at = i % runs * most;
                          AddRows(i / runs, at, std::min(most, extent - at), left, right);
                        }
                      });
  }

  AddKernel kernel;
  int64_t bytes;
  const char* lhs;
  const char* rhs;
  char* out;
  ffi::Span<const int64_t> sizes, lhs_strides, rhs_strides;
  // The dimension that is divided into runs. A row is the elements of those that follow it.
  size_t split;
  int64_t row;

 private:
  bool is_merged() const { return split + 1 < sizes.size(); }

  // Rows that were not contiguous.
  struct Gathered {
    const char* from = nullptr;
    int64_t rows = 0;
    alignas(64) char data[kMergedRun * sizeof(uint64_t) + kExcess];
  };

  // Adds `rows` indices from `at` of the dimension `split`, for index `outer` of those before it.
  void AddRows(int64_t outer, int64_t at, int64_t rows, Gathered& left, Gathered& right) const {
    int64_t left_at = at * lhs_strides[split], right_at = at * rhs_strides[split];
    int64_t rest = outer;
    for (size_t d = split; d-- > 0 && rest > 0; rest /= sizes[d]) {
      left_at += rest % sizes[d] * lhs_strides[d];
      right_at += rest % sizes[d] * rhs_strides[d];
    }
    const char* a = lhs + left_at * bytes;
    const char* b = rhs + right_at * bytes;
    char* sums = out + (outer * sizes[split] + at) * row * bytes;
    if (!is_merged()) {
      return kernel(a, lhs_strides[split], b, rhs_strides[split], sums, rows);
    }
    const int64_t left_step = lhs_strides.back(), right_step = rhs_strides.back();
    if (split + 2 == sizes.size() && row >= kFilled && (left_step == 0 || right_step == 0)) {
      for (int64_t r = 0; r < rows; ++r) {
        kernel(a + r * lhs_strides[split] * bytes, left_step, b + r * rhs_strides[split] * bytes,
               right_step, sums + r * row * bytes, row);
      }
      return;
    }
    kernel(Rows(a, lhs_strides, rows, left), 1, Rows(b, rhs_strides, rows, right), 1, sums,
           rows * row);
  }

  // Returns some rows as contiguous ones, which are those of the operand itself or in `gathered`.
  const char* Rows(const char* from, ffi::Span<const int64_t> strides, int64_t rows,
                   Gathered& gathered) const {
    bool contiguous = true;
    for (int64_t d = sizes.size() - 1, dense = 1; d >= static_cast<int64_t>(split); --d) {
      contiguous = contiguous && strides[d] == dense;
      dense *= sizes[d];
    }
    if (contiguous) return from;
    if (gathered.from == from && gathered.rows >= rows) return gathered.data;
    const auto gather = [&](auto element) {
      using T = decltype(element);
      Gather(reinterpret_cast<const T*>(from), rows, sizes.begin() + split, strides.begin() + split,
             sizes.size() - split, reinterpret_cast<T*>(gathered.data));
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
    gathered.rows = rows;
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
  AdviseNewResult(out);

  size_t split = sizes.size() - 1;
  int64_t row = 1;
  while (split > 0 && row * sizes[split] < kShort) row *= sizes[split--];
  Addition addition = {kernel,
                       Bytes(type),
                       static_cast<const char*>(lhs.untyped_data()),
                       static_cast<const char*>(rhs.untyped_data()),
                       static_cast<char*>(out.untyped_data()),
                       sizes,
                       lhs_strides,
                       rhs_strides,
                       split,
                       row};
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

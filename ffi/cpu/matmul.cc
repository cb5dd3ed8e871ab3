// The custom call jax_tilekern_cpu_matmul: out[b, m, n] = sum_k lhs[b, m, k] * rhs[b, k, n].
//
// Attributes, in elements:
//   sizes        batch sizes (up to four), m, n, k
//   lhs_strides  of each batch dimension, m, k
//   rhs_strides  of each batch dimension, k, n
//   out_strides  of each batch dimension, m, n; that of n is 1
// A batch stride of 0 broadcasts an operand. Sums are kept in float32; in float64 for float64, and
// in wrapping int32 for int8. The result does not depend on the number of threads.
#include "cpu/matmul.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

#include "cpu/call.h"
#include "cpu/direct_product.h"
#include "cpu/dispatch.h"
#include "cpu/dot_product.h"
#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/product.h"
#include "cpu/vector_product.h"
#include "handlers.h"
#include "xla/ffi/api/ffi.h"

namespace tilekern::cpu {
namespace {

bool Supported(DType lhs, DType rhs, DType out) {
  const auto is_f8 = [](DType t) { return t == DType::kF8E4M3FN || t == DType::kF8E5M2; };
  if (is_f8(lhs) && is_f8(rhs)) {
    return out == DType::kF32 || out == DType::kBF16 || out == DType::kF16;
  }
  if (lhs != rhs) return false;
  switch (lhs) {
    case DType::kF32:
    case DType::kF64:
      return out == lhs;
    case DType::kBF16:
    case DType::kF16:
      return out == lhs || out == DType::kF32;
    case DType::kS8:
      return out == DType::kS32;
    default:
      return false;
  }
}

using Strides = std::array<int64_t, kMaxBatchRank + 2>;

// The attributes, checked; unused batch dimensions have size 1 and stride 0.
struct Shape {
  std::array<int64_t, kMaxBatchRank> batch;
  int64_t m, n, k;
  Strides lhs, rhs, out;

  int64_t batch_size = 1;
  // Elements that the strides reach over, where there is a batch.
  int64_t lhs_extent = 0, rhs_extent = 0, out_extent = 0;
};

Strides ParseStrides(const char* name, ffi::Span<const int64_t> strides, int batch_rank) {
  if (strides.size() != static_cast<size_t>(batch_rank) + 2) {
    Refuse(std::string(name) + " " + ToString(strides) + " must have " +
           std::to_string(batch_rank + 2) + " entries to match sizes");
  }
  Strides parsed = {};
  for (size_t i = 0; i < strides.size(); ++i) {
    if (strides[i] < 0)
      Refuse(std::string(name) + " " + ToString(strides) + " has a negative stride");
    parsed[kMaxBatchRank - batch_rank + i] = strides[i];
  }
  return parsed;
}

// The number of elements a buffer needs for these strides.
int64_t Extent(const Shape& shape, const Strides& strides, int64_t rows, int64_t cols,
               const char* what) {
  int64_t last = 0;
  const auto add = [&](int64_t size, int64_t stride) {
    last = CheckedAdd(last, CheckedMultiply(size - 1, stride, what), what);
  };
  for (int i = 0; i < kMaxBatchRank; ++i) add(shape.batch[i], strides[i]);
  add(rows, strides[kMaxBatchRank]);
  add(cols, strides[kMaxBatchRank + 1]);
  return CheckedAdd(last, 1, what);
}

// Threads write different elements of the output, so no two may share an address.
bool Overlaps(const Shape& shape) {
  std::array<std::pair<int64_t, int64_t>, kMaxBatchRank + 2> dims;  // stride, size
  for (int i = 0; i < kMaxBatchRank; ++i) dims[i] = {shape.out[i], shape.batch[i]};
  dims[kMaxBatchRank] = {shape.out[kMaxBatchRank], shape.m};
  dims[kMaxBatchRank + 1] = {shape.out[kMaxBatchRank + 1], shape.n};
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;  // elements that the dimensions so far reach over
  for (const auto& [stride, size] : dims) {
    if (size == 1) continue;
    if (stride < span) return true;
    span += (size - 1) * stride;
  }
  return false;
}

Shape ParseShape(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> lhs_strides,
                 ffi::Span<const int64_t> rhs_strides, ffi::Span<const int64_t> out_strides) {
  if (sizes.size() < 3 || sizes.size() > kMaxBatchRank + 3) {
    Refuse("sizes " + ToString(sizes) + " must hold 0 to 4 batch sizes, m, n and k");
  }
  const int batch_rank = static_cast<int>(sizes.size()) - 3;
  Shape shape;
  shape.batch.fill(1);
  for (int i = 0; i < batch_rank; ++i) {
    if (sizes[i] < 0) Refuse("sizes " + ToString(sizes) + " has a negative size");
    shape.batch[kMaxBatchRank - batch_rank + i] = sizes[i];
  }
  shape.m = sizes[batch_rank];
  shape.n = sizes[batch_rank + 1];
  shape.k = sizes[batch_rank + 2];
  if (shape.m < 1 || shape.n < 1 || shape.k < 1) {
    Refuse("sizes " + ToString(sizes) + " must have m, n and k of at least 1");
  }
  shape.lhs = ParseStrides("lhs_strides", lhs_strides, batch_rank);
  shape.rhs = ParseStrides("rhs_strides", rhs_strides, batch_rank);
  shape.out = ParseStrides("out_strides", out_strides, batch_rank);
  for (const int64_t size : shape.batch) {
    shape.batch_size = CheckedMultiply(shape.batch_size, size, "the batch size");
  }
  if (shape.n > 1 && shape.out[kMaxBatchRank + 1] != 1) {
    Refuse("out_strides " + ToString(out_strides) + " must end in 1");
  }
  if (shape.batch_size > 0) {
    shape.lhs_extent = Extent(shape, shape.lhs, shape.m, shape.k, "lhs_strides");
    shape.rhs_extent = Extent(shape, shape.rhs, shape.k, shape.n, "rhs_strides");
    shape.out_extent = Extent(shape, shape.out, shape.m, shape.n, "out_strides");
    if (Overlaps(shape)) Refuse("out_strides " + ToString(out_strides) + " overlap");
  }
  return shape;
}

void CheckFits(const char* name, int64_t extent, int64_t elements) {
  if (extent > elements) {
    Refuse(std::string(name) + " has " + std::to_string(elements) +
           " elements, its strides reach " + std::to_string(extent));
  }
}

// Which kernels take a call: the dot product's, those of `vector` unless it is null, or those of
// `gemm`.
struct Choice {
  const GemmFamily* gemm;
  bool direct;  // without packing
  bool dot;
  const VectorFamily* vector;
  StoreFn store;
};

Choice Choose(DType lhs, DType rhs, DType out, const Shape& shape) {
  if (!Supported(lhs, rhs, out)) {
    Refuse(std::string("no kernel for ") + Name(lhs) + " x " + Name(rhs) + " -> " + Name(out));
  }
  const KernelTable& kernels = Kernels();
  Choice choice = {kernels.gemm[static_cast<int>(lhs)], false, false, nullptr,
                   kernels.store[static_cast<int>(out)]};
  const Product product = {shape.m,
                           shape.n,
                           shape.k,
                           {nullptr, lhs, shape.lhs[kMaxBatchRank], shape.lhs[kMaxBatchRank + 1]},
                           {nullptr, rhs, shape.rhs[kMaxBatchRank], shape.rhs[kMaxBatchRank + 1]},
                           {nullptr, out, shape.out[kMaxBatchRank], shape.out[kMaxBatchRank + 1]}};
  if (IsVectorProduct(VectorProduct::From(product))) {
    choice.vector = kernels.vector[static_cast<int>(lhs)];
    choice.dot = IsDotProduct(product) && kernels.dot[static_cast<int>(lhs)] != nullptr;
  } else {
    choice.direct = IsDirectProduct(*choice.gemm, product);
  }
  return choice;
}

// Work that a second thread should at least be given, in multiply-adds: some thirty microseconds'.
constexpr double kMinWorkPerThread = 1.5e6;
// Above this many multiply-adds the threads share one product rather than take one each.
constexpr double kMaxWorkPerProduct = 3e8;
constexpr int64_t kTasksPerThread = 8;
// Up to this many rows or columns, the other dimension alone is split, in multiples of kMinChunk.
constexpr int64_t kFew = 64;
constexpr int64_t kMinChunk = 192;

class Matmul {
 public:
  Matmul(const Shape& shape, const Choice& choice, ConstMatrix lhs, ConstMatrix rhs,
         MutableMatrix out)
      : shape_(shape), choice_(choice), lhs_(lhs), rhs_(rhs), out_(out) {}

  void Run(const Workers& workers) const {
    const double mn = static_cast<double>(shape_.m) * static_cast<double>(shape_.n);
    const double work = mn * static_cast<double>(shape_.k);
    // A vector product is bound by reading its matrix.
    const double cost = choice_.vector != nullptr ? work * 8 / std::min(shape_.m, shape_.n) : work;
    const double threads = static_cast<double>(workers.threads());
    const bool serial = workers.threads() == 1 ||
                        cost * static_cast<double>(shape_.batch_size) < 2 * kMinWorkPerThread;
    const bool share_products =
        !serial && cost > kMinWorkPerThread * threads &&
        (shape_.batch_size < 2 * workers.threads() || work > kMaxWorkPerProduct);
    if (serial) {
      RunBatches(0, shape_.batch_size);
    } else if (share_products) {
      for (int64_t b = 0; b < shape_.batch_size; ++b) RunShared(At(b), workers);
    } else {
      const int64_t per_task =
          std::max<int64_t>(CeilDiv(shape_.batch_size, workers.threads() * kTasksPerThread),
                            static_cast<int64_t>(kMinWorkPerThread / cost));
      workers.Run(CeilDiv(shape_.batch_size, per_task), [&](int64_t task) {
        RunBatches(task * per_task, std::min((task + 1) * per_task, shape_.batch_size));
      });
    }
  }

 private:
  void RunBatches(int64_t begin, int64_t end) const {
    for (int64_t b = begin; b < end; ++b) {
      const Product product = At(b);
      if (choice_.dot) {
        RunDotProduct(Kernels(), product, Workers());
      } else if (choice_.vector != nullptr) {
        const VectorProduct vectors = VectorProduct::From(product);
        RunVectorProduct(*choice_.vector, choice_.store, vectors, 0, vectors.outer);
      } else {
        RunAlone(product);
      }
    }
  }

  void RunAlone(const Product& product) const {
    if (choice_.direct) {
      RunDirectProduct(*choice_.gemm, choice_.store, product);
    } else {
      RunGemm(*choice_.gemm, choice_.store, product);
    }
  }

  void RunShared(const Product& product, const Workers& workers) const {
    if (choice_.dot) {
      RunDotProduct(Kernels(), product, workers);
    } else if (choice_.vector != nullptr) {
      const VectorProduct vectors = VectorProduct::From(product);
      const int64_t chunk = VectorChunk(vectors, workers.threads());
      workers.Run(CeilDiv(vectors.outer, chunk), [&](int64_t task) {
        RunVectorProduct(*choice_.vector, choice_.store, vectors, task * chunk,
                         std::min(chunk, vectors.outer - task * chunk));
      });
    } else if (!choice_.direct && std::min(product.m, product.n) > kFew) {
      RunGemm(*choice_.gemm, choice_.store, product, workers);
    } else {
      // Each task packs the few rows or columns for itself, which spares the threads all waiting.
      const bool wide = product.m <= product.n;
      const int64_t size = wide ? product.n : product.m;
      const int64_t tile =
          wide ? kMaxVectors * choice_.gemm->lanes : kRowSteps * choice_.gemm->row_step;
      const int64_t chunk = RoundUp(CeilDiv(size, workers.threads() * kTasksPerThread),
                                    choice_.direct ? 2 * tile : kMinChunk);
      workers.Run(CeilDiv(size, chunk), [&](int64_t task) {
        Product part = product;
        const int64_t first = task * chunk;
        (wide ? part.n : part.m) = std::min(chunk, size - first);
        (wide ? part.rhs.data : part.lhs.data) =
            wide ? part.rhs.At(0, first) : part.lhs.At(first, 0);
        part.out.data = wide ? part.out.At(0, first) : part.out.At(first, 0);
        RunAlone(part);
      });
    }
  }

  Product At(int64_t batch) const {
    Product product = {shape_.m, shape_.n, shape_.k, lhs_, rhs_, out_};
    for (int i = kMaxBatchRank - 1; i >= 0 && batch > 0; --i) {
      const int64_t index = batch % shape_.batch[i];
      batch /= shape_.batch[i];
      product.lhs.data += index * shape_.lhs[i] * Bytes(lhs_.type);
      product.rhs.data += index * shape_.rhs[i] * Bytes(rhs_.type);
      product.out.data += index * shape_.out[i] * Bytes(out_.type);
    }
    return product;
  }

  const Shape& shape_;
  const Choice& choice_;
  const ConstMatrix lhs_, rhs_;
  const MutableMatrix out_;
};

void RunCall(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer out,
             const Shape& shape) {
  const DType lhs_type = TypeOf(lhs), rhs_type = TypeOf(rhs), out_type = TypeOf(out);
  const Choice choice = Choose(lhs_type, rhs_type, out_type, shape);
  if (shape.batch_size == 0) return;
  CheckFits("lhs", shape.lhs_extent, static_cast<int64_t>(lhs.element_count()));
  CheckFits("rhs", shape.rhs_extent, static_cast<int64_t>(rhs.element_count()));
  CheckFits("out", shape.out_extent, static_cast<int64_t>(out.element_count()));
  constexpr int kRow = kMaxBatchRank, kCol = kMaxBatchRank + 1;
  Matmul(shape, choice,
         {static_cast<const char*>(lhs.untyped_data()), lhs_type, shape.lhs[kRow], shape.lhs[kCol]},
         {static_cast<const char*>(rhs.untyped_data()), rhs_type, shape.rhs[kRow], shape.rhs[kCol]},
         {static_cast<char*>(out.untyped_data()), out_type, shape.out[kRow], shape.out[kCol]})
      .Run(WorkersOf(pool));
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Span<const int64_t> sizes,
                  ffi::Span<const int64_t> lhs_strides, ffi::Span<const int64_t> rhs_strides,
                  ffi::Span<const int64_t> out_strides) {
  return Guarded("jax_tilekern_cpu_matmul", [&] {
    RunCall(pool, lhs, rhs, *out, ParseShape(sizes, lhs_strides, rhs_strides, out_strides));
  });
}

}  // namespace

std::string CpuMatmulKernelName(DType lhs, DType rhs, DType out,
                                const MatmulAttributes& attributes) {
  const auto span = [](const std::vector<int64_t>& values) {
    return ffi::Span<const int64_t>(values.data(), values.size());
  };
  const Shape shape = ParseShape(span(attributes.sizes), span(attributes.lhs_strides),
                                 span(attributes.rhs_strides), span(attributes.out_strides));
  const Choice choice = Choose(lhs, rhs, out, shape);
  std::ostringstream name;
  if (choice.vector != nullptr) {
    name << choice.vector->instruction_set << " " << Name(lhs)
         << (choice.dot ? " dot" : " vector-matrix");
  } else {
    const GemmFamily& family = *choice.gemm;
    name << family.instruction_set << " " << family.name
         << (choice.direct ? " direct " : " packed ") << kRowSteps * family.row_step << "x"
         << kMaxVectors * family.lanes;
  }
  return name.str();
}

}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuMatmul, tilekern::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes")
                                  .Attr<xla::ffi::Span<const int64_t>>("lhs_strides")
                                  .Attr<xla::ffi::Span<const int64_t>>("rhs_strides")
                                  .Attr<xla::ffi::Span<const int64_t>>("out_strides"));

// The custom call jax_tilekern_cpu_ragged_matmul: a grouped GEMM, whose rows are indices along m or
// along k. Group g of batch b has rows bounds[b, g] to bounds[b, g + 1].
//   ragged m: out[b, r, n] = sum_k lhs[b, r, k] * rhs[b, g, k, n] for the rows r of each group g,
//             and 0 for rows of no group
//   ragged k: out[b, g, m, n] = sum of lhs[b, m, r] * rhs[b, r, n] over the rows r of group g
//
// Operands are lhs, rhs and bounds, int32. Attributes, in elements:
//   sizes           batch sizes (up to three), groups, m, n, k
//   lhs_strides     for each batch dimension, group, m, k
//   rhs_strides     for each batch dimension, group, k, n
//   out_strides     for each batch dimension, group, m, n; that of n is 1
//   bounds_strides  for each batch dimension, or one that is not read; along groups it is 1
//   ragged_k        0 if m is ragged, 1 if k is
// The group's stride is 0 in arrays without groups. Accumulators are those of
// jax_tilekern_cpu_matmul, and the result does not depend on the number of threads.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "cpu/call.h"
#include "cpu/matmul_shape.h"
#include "cpu/parallel.h"
#include "cpu/product.h"
#include "cpu/product_kernel.h"
#include "handlers.h"
#include "xla/ffi/api/ffi.h"

namespace tilekern::cpu {
namespace {

constexpr int kGroup = kMaxBatchRank - 1;  // the batch dimension of groups
// At least this many parts per thread balance the load.
constexpr double kPartsPerThread = 4;

struct RaggedShape {
  MatmulShape product;
  bool ragged_k;
  std::array<int64_t, kGroup> bounds_strides;
  int64_t bounds_extent;

  int64_t groups() const { return product.batch[kGroup]; }
  int64_t batches() const { return product.batch_size / groups(); }
  int64_t rows() const { return ragged_k ? product.k : product.m; }

  const int32_t* BoundsOf(const int32_t* bounds, int64_t batch) const {
    for (int i = kGroup - 1; i >= 0; --i) {
      bounds += batch % product.batch[i] * bounds_strides[i];
      batch /= product.batch[i];
    }
    return bounds;
  }
};

void ParseBounds(RaggedShape& shape, ffi::Span<const int64_t> strides, size_t batch_rank) {
  if (strides.size() != std::max<size_t>(batch_rank, 1)) {
    Refuse("bounds_strides " + ToString(strides) + " must have an entry for each batch dimension");
  }
  const char* what = "bounds_strides";
  int64_t last = shape.groups();
  shape.bounds_strides.fill(0);
  for (size_t i = 0; i < strides.size(); ++i) {
    const size_t dim = kGroup - strides.size() + i;
    if (strides[i] < 0) {
      Refuse("bounds_strides " + ToString(strides) + " has a negative stride");
    }
    shape.bounds_strides[dim] = strides[i];
    last = CheckedAdd(last, CheckedMultiply(shape.product.batch[dim] - 1, strides[i], what), what);
  }
  shape.bounds_extent = CheckedAdd(last, 1, what);
}

void CheckNoGroup(const char* name, const Strides& strides) {
  if (strides[kGroup] != 0) {
    Refuse(std::string(name) + " has a stride of " + std::to_string(strides[kGroup]) +
           " for groups, which it has none of");
  }
}

RaggedShape ParseRaggedShape(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> lhs_strides,
                             ffi::Span<const int64_t> rhs_strides,
                             ffi::Span<const int64_t> out_strides,
                             ffi::Span<const int64_t> bounds_strides, int64_t ragged_k) {
  RaggedShape shape;
  shape.product = ParseMatmulShape(sizes, lhs_strides, rhs_strides, out_strides);
  if (sizes.size() < 4 || shape.groups() < 1) {
    Refuse("sizes " + ToString(sizes) + " must have at least one group before m, n and k");
  }
  if (ragged_k != 0 && ragged_k != 1) {
    Refuse("ragged_k is " + std::to_string(ragged_k) + ", not 0 or 1");
  }
  shape.ragged_k = ragged_k == 1;
  ParseBounds(shape, bounds_strides, sizes.size() - 4);
  CheckNoGroup("lhs", shape.product.lhs);
  CheckNoGroup(shape.ragged_k ? "rhs" : "out",
               shape.ragged_k ? shape.product.rhs : shape.product.out);
  MatmulShape outputs = shape.product;
  if (!shape.ragged_k) outputs.batch[kGroup] = 1;  // groups have different rows
  if (OutputsOverlap(outputs)) Refuse("out_strides " + ToString(out_strides) + " overlap");
  return shape;
}

void CheckBounds(const RaggedShape& shape, const int32_t* bounds, int64_t batch) {
  const int64_t groups = shape.groups();
  int64_t before = 0;
  for (int64_t g = 0; g <= groups; ++g) {
    if (bounds[g] < before || bounds[g] > shape.rows()) {
      Refuse("bounds of batch " + std::to_string(batch) + " must be in order and in [0, " +
             std::to_string(shape.rows()) + "], but bound " + std::to_string(g) + " of " +
             std::to_string(groups + 1) + " is " + std::to_string(bounds[g]) +
             (g > 0 ? " after " + std::to_string(before) : ""));
    }
    before = bounds[g];
  }
}

// A product for the rows of a group, or zeros for an empty sum.
struct Part {
  Product product;
  std::optional<ProductKernel> kernel;
  double cost;  // in multiply-adds

  explicit Part(const Product& p) : product(p) {
    cost = static_cast<double>(p.m) * static_cast<double>(p.n) * kWorkPerElement;
    if (p.k == 0) return;
    kernel.emplace(p);
    cost = std::max(cost, kernel->Cost(p));
  }

  void Run() const {
    if (kernel.has_value()) {
      kernel->Run(product);
    } else {
      FillRows(0, product.m);
    }
  }

  void RunShared(const Workers& workers) const {
    if (kernel.has_value()) {
      kernel->RunShared(product, workers);
    } else {
      workers.RunRanges(product.m, product.n * Bytes(product.out.type),
                        [&](int64_t first, int64_t last) { FillRows(first, last); });
    }
  }

  void FillRows(int64_t first, int64_t last) const {
    for (int64_t row = first; row < last; ++row) {
      std::memset(product.out.At(row, 0), 0, product.n * Bytes(product.out.type));
    }
  }
};

// A range of rows of a product of all rows.
Product RowsOf(const RaggedShape& shape, Product product, int64_t begin, int64_t end) {
  if (shape.ragged_k) {
    product.k = end - begin;
    product.lhs.data = product.lhs.At(0, begin);
    product.rhs.data = product.rhs.At(begin, 0);
  } else {
    product.m = end - begin;
    product.lhs.data = product.lhs.At(begin, 0);
    product.out.data = product.out.At(begin, 0);
  }
  return product;
}

std::vector<Part> Parts(const RaggedShape& shape, const Product& first, const int32_t* bounds) {
  const int64_t groups = shape.groups(), rows = shape.rows();
  std::vector<Part> parts;
  for (int64_t b = 0; b < shape.batches(); ++b) {
    const int32_t* bound = shape.BoundsOf(bounds, b);
    CheckBounds(shape, bound, b);
    for (int64_t g = 0; g < groups; ++g) {
      if (!shape.ragged_k && bound[g] == bound[g + 1]) continue;
      const Product whole = ProductAt(shape.product, first, b * groups + g);
      parts.emplace_back(RowsOf(shape, whole, bound[g], bound[g + 1]));
    }
    if (shape.ragged_k) continue;
    Product zeros = ProductAt(shape.product, first, b * groups);
    zeros.k = 0;
    if (bound[0] > 0) parts.emplace_back(RowsOf(shape, zeros, 0, bound[0]));
    if (bound[groups] < rows) parts.emplace_back(RowsOf(shape, zeros, bound[groups], rows));
  }
  return parts;
}

// All threads work on each large part together; the small parts are distributed among the threads.
void RunParts(std::vector<Part> parts, const Workers& workers) {
  double total = 0;
  for (const Part& part : parts) total += part.cost;
  if (workers.threads() == 1 || total < 2 * kMinWorkPerThread) {
    for (const Part& part : parts) part.Run();
    return;
  }
  // Expensive parts come first, so that threads finish at about the same time.
  std::vector<const Part*> order;
  for (const Part& part : parts) order.push_back(&part);
  std::stable_sort(order.begin(), order.end(),
                   [](const Part* a, const Part* b) { return a->cost > b->cost; });
  const double threads = static_cast<double>(workers.threads());
  const double large = std::max(kMinWorkPerThread * threads,
                                std::min(total / (kPartsPerThread * threads), kMaxWorkPerProduct));
  auto next = order.begin();
  for (; next != order.end() && (*next)->cost > large; ++next) (*next)->RunShared(workers);
  if (next == order.end()) return;
  const int64_t count = order.end() - next;
  const int64_t per_task = std::max<int64_t>(kMinWorkPerThread / (*next)->cost, 1);
  workers.Run(CeilDiv(count, per_task), [&](int64_t task) {
    const int64_t end = std::min((task + 1) * per_task, count);
    for (int64_t i = task * per_task; i < end; ++i) next[i]->Run();
  });
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                  ffi::Buffer<ffi::S32> bounds, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> lhs_strides,
                  ffi::Span<const int64_t> rhs_strides, ffi::Span<const int64_t> out_strides,
                  ffi::Span<const int64_t> bounds_strides, int64_t ragged_k) {
  return Guarded("jax_tilekern_cpu_ragged_matmul", [&] {
    const RaggedShape shape =
        ParseRaggedShape(sizes, lhs_strides, rhs_strides, out_strides, bounds_strides, ragged_k);
    const Product first = FirstProduct(shape.product, lhs, rhs, *out);
    AdviseNewResult(*out);
    CheckTypes(first);  // even if no group has rows
    if (shape.product.batch_size == 0) return;
    CheckFits("bounds", shape.bounds_extent, static_cast<int64_t>(bounds.element_count()));
    RunParts(Parts(shape, first, bounds.typed_data()), WorkersOf(pool));
  });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuRaggedMatmul, tilekern::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes")
                                  .Attr<xla::ffi::Span<const int64_t>>("lhs_strides")
                                  .Attr<xla::ffi::Span<const int64_t>>("rhs_strides")
                                  .Attr<xla::ffi::Span<const int64_t>>("out_strides")
                                  .Attr<xla::ffi::Span<const int64_t>>("bounds_strides")
                                  .Attr<int64_t>("ragged_k"));

// The custom call jax_tilekern_cpu_matmul: out[b, m, n] = sum_k lhs[b, m, k] * rhs[b, k, n].
//
// Attributes, in elements:
//   sizes        batch sizes (up to four), m, n, k
//   lhs_strides  for each batch dimension, m, k
//   rhs_strides  for each batch dimension, k, n
//   out_strides  for each batch dimension, m, n; that of n is 1
// A batch stride of 0 broadcasts an operand. An array of complex numbers is one of their parts,
// which the attributes count. Accumulators are float32, float64 for float64, and wrapping int32 for
// int8. The result does not depend on the number of threads.
#include "cpu/matmul.h"

#include <algorithm>

#include "cpu/call.h"
#include "cpu/matmul_shape.h"
#include "cpu/parallel.h"
#include "cpu/product.h"
#include "cpu/product_kernel.h"
#include "handlers.h"
#include "xla/ffi/api/ffi.h"

namespace tilekern::cpu {
namespace {

MatmulShape ParseShape(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> lhs_strides,
                       ffi::Span<const int64_t> rhs_strides, ffi::Span<const int64_t> out_strides) {
  const MatmulShape shape = ParseMatmulShape(sizes, lhs_strides, rhs_strides, out_strides);
  if (OutputsOverlap(shape)) Refuse("out_strides " + ToString(out_strides) + " overlap");
  return shape;
}

void RunBatches(const MatmulShape& shape, const ProductKernel& kernel, const Product& first,
                const Workers& workers) {
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) kernel.Run(ProductAt(shape, first, b));
  };
  const double cost = kernel.Cost(first);
  const bool serial = workers.threads() == 1 ||
                      cost * static_cast<double>(shape.batch_size) < 2 * kMinWorkPerThread;
  const bool share_products =
      !serial && cost > kMinWorkPerThread * static_cast<double>(workers.threads()) &&
      (shape.batch_size < 2 * workers.threads() || Work(first) > kMaxWorkPerProduct);
  if (serial) {
    run(0, shape.batch_size);
  } else if (share_products) {
    for (int64_t b = 0; b < shape.batch_size; ++b) {
      kernel.RunShared(ProductAt(shape, first, b), workers);
    }
  } else {
    const int64_t per_task =
        std::max<int64_t>(CeilDiv(shape.batch_size, workers.threads() * kTasksPerThread),
                          static_cast<int64_t>(kMinWorkPerThread / cost));
    workers.Run(CeilDiv(shape.batch_size, per_task), [&](int64_t task) {
      run(task * per_task, std::min((task + 1) * per_task, shape.batch_size));
    });
  }
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Span<const int64_t> sizes,
                  ffi::Span<const int64_t> lhs_strides, ffi::Span<const int64_t> rhs_strides,
                  ffi::Span<const int64_t> out_strides) {
  return Guarded("jax_tilekern_cpu_matmul", [&] {
    const MatmulShape shape = ParseShape(sizes, lhs_strides, rhs_strides, out_strides);
    const Product first = FirstProduct(shape, lhs, rhs, *out);
    AdviseNewResult(*out);
    RunBatches(shape, ProductKernel(first), first, WorkersOf(pool));
  });
}

}  // namespace

std::string CpuMatmulKernelName(DType lhs, DType rhs, DType out,
                                const MatmulAttributes& attributes) {
  const auto span = [](const std::vector<int64_t>& values) {
    return ffi::Span<const int64_t>(values.data(), values.size());
  };
  const MatmulShape shape = ParseShape(span(attributes.sizes), span(attributes.lhs_strides),
                                       span(attributes.rhs_strides), span(attributes.out_strides));
  const Product product = ProductOfTypes(shape, lhs, rhs, out);
  return ProductKernel(product).Name(product);
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

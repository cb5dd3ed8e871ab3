#include "cpu/product_kernel.h"

#include <algorithm>
#include <sstream>

#include "cpu/call.h"
#include "cpu/direct_product.h"
#include "cpu/dispatch.h"
#include "cpu/gemm.h"
#include "cpu/vector_product.h"

namespace tilekern::cpu {
namespace {

// With at most this many rows or columns, and a k of one block, only the other dimension is split,
// in parts of about kMinChunk or more. With more of k, all threads should read the same rows of
// rhs, so that fewer pages are read at a time.
constexpr int64_t kFew = 64;
constexpr int64_t kMinChunk = 192;

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

}  // namespace

void CheckTypes(const Product& p) {
  if (!Supported(p.lhs.type, p.rhs.type, p.out.type)) {
    Refuse(std::string("no kernel for ") + Name(p.lhs.type) + " x " + Name(p.rhs.type) + " -> " +
           Name(p.out.type));
  }
}

ProductKernel::ProductKernel(const Product& p)
    : gemm_(Kernels().gemm[static_cast<int>(p.lhs.type)]),
      store_(Kernels().store[static_cast<int>(p.out.type)]) {
  CheckTypes(p);
  direct_ = IsDirectProduct(*gemm_, p);
  const VectorFamily* family = Kernels().vector[static_cast<int>(p.lhs.type)];
  if (IsVectorProduct(*family, VectorProduct::From(p), direct_)) {
    direct_ = false;
    vector_ = family;
    dot_ = IsDotProduct(p) && Kernels().dot[static_cast<int>(p.lhs.type)] != nullptr;
  }
}

std::string ProductKernel::Name(const Product& p) const {
  std::ostringstream name;
  if (vector_ != nullptr) {
    name << vector_->instruction_set << " " << cpu::Name(p.lhs.type)
         << (dot_ ? " dot" : " vector-matrix");
  } else {
    name << gemm_->instruction_set << " " << gemm_->name << (direct_ ? " direct " : " packed ")
         << kRowSteps * gemm_->row_step << "x" << kMaxVectors * gemm_->lanes;
  }
  return name.str();
}

double ProductKernel::Cost(const Product& p) const {
  // Reading the matrix bounds a vector product.
  return vector_ != nullptr ? Work(p) * kWorkPerElement / static_cast<double>(std::min(p.m, p.n))
                            : Work(p);
}

void ProductKernel::Run(const Product& product) const {
  if (direct_) {
    RunDirectProduct(*gemm_, product);
  } else if (vector_ == nullptr) {
    RunGemm(*gemm_, store_, product);
  } else {
    RunShared(product, Workers());
  }
}

void ProductKernel::RunShared(const Product& product, const Workers& workers) const {
  if (dot_) {
    RunDotProduct(Kernels(), product, workers);
  } else if (vector_ != nullptr) {
    RunVectorProduct(*vector_, store_, VectorProduct::From(product), workers);
  } else if (!direct_ && (std::min(product.m, product.n) > kFew || product.k > gemm_->k_block)) {
    RunGemm(*gemm_, store_, product, workers);
  } else {
    // Each task packs the few rows or columns itself, so that no thread waits for another.
    const bool wide = product.m <= product.n;
    const int64_t size = wide ? product.n : product.m;
    const int64_t tile = wide ? kMaxVectors * gemm_->lanes : kRowSteps * gemm_->row_step;
    const int64_t least = direct_ ? 2 * tile : kMinChunk;
    // As many tasks for each thread, and tasks of equal size.
    const int64_t tasks = std::min(RoundUp(CeilDiv(size, least), workers.threads()),
                                   workers.threads() * kTasksPerThread);
    const int64_t chunk = RoundUp(CeilDiv(size, tasks), tile);
    workers.Run(CeilDiv(size, chunk), [&](int64_t task) {
      Product part = product;
      const int64_t first = task * chunk;
      (wide ? part.n : part.m) = std::min(chunk, size - first);
      (wide ? part.rhs.data : part.lhs.data) = wide ? part.rhs.At(0, first) : part.lhs.At(first, 0);
      part.out.data = wide ? part.out.At(0, first) : part.out.At(first, 0);
      Run(part);
    });
  }
}

}  // namespace tilekern::cpu

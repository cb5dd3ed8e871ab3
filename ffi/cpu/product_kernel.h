// Which kernels compute a product, on one thread or on all of them.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/kernel_table.h"
#include "cpu/parallel.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// Work that a second thread should at least be given, in multiply-adds: some thirty microseconds'.
inline constexpr double kMinWorkPerThread = 1.5e6;
// Above this many multiply-adds the threads share one product rather than take one each.
inline constexpr double kMaxWorkPerProduct = 3e8;
// Multiply-adds that take as long as an element on its way from or to memory.
inline constexpr double kWorkPerElement = 8;
inline constexpr int64_t kTasksPerThread = 8;

// In multiply-adds.
inline double Work(const Product& p) {
  return static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
}

// Refuses types that no kernel takes.
void CheckTypes(const Product& product);

// The choice depends on sizes, strides and types, so one of these serves all products that differ
// in their data alone. Results do not depend on the number of threads.
class ProductKernel {
 public:
  // Refuses types as CheckTypes does.
  explicit ProductKernel(const Product& product);

  // With the instruction set, e.g. "avx512_vnni s8 packed 12x32".
  std::string Name(const Product& product) const;

  // How long a product takes, in multiply-adds.
  double Cost(const Product& product) const;

  // On this thread. Nothing is allocated but scratch memory, so that a task may call it.
  void Run(const Product& product) const;

  // On all threads.
  void RunShared(const Product& product, const Workers& workers) const;

 private:
  void RunMatrices(const Product& product) const;

  const GemmFamily* gemm_;
  const StoreFn store_;
  const VectorFamily* vector_ = nullptr;  // unless null, takes the product instead of `gemm_`
  bool dot_ = false;                      // the dot product's kernel does, instead of `vector_`
  bool direct_ = false;                   // without packing
};

}  // namespace tilekern::cpu

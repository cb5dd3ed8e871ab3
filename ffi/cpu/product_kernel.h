// The choice of kernels for a product, and its execution on one thread or on all of them.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/kernel_table.h"
#include "cpu/parallel.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// The minimal work of a second thread, in multiply-adds: about thirty microseconds.
inline constexpr double kMinWorkPerThread = 1.5e6;
// Above this many multiply-adds all threads work on one product, rather than one product each.
inline constexpr double kMaxWorkPerProduct = 3e8;
// Multiply-adds that take as long as moving one element from or to memory.
inline constexpr double kWorkPerElement = 8;
inline constexpr int64_t kTasksPerThread = 8;

// The cost in multiply-adds.
inline double Work(const Product& p) {
  return static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
}

// Refuses types without a kernel.
void CheckTypes(const Product& product);

// The choice depends on sizes, strides and types alone, so one object serves all products that
// differ only in their data. Results do not depend on the number of threads.
class ProductKernel {
 public:
  // Refuses types as CheckTypes does.
  explicit ProductKernel(const Product& product);

  // Returns the kernel with the instruction set, e.g. "avx512_vnni s8 packed 12x32".
  std::string Name(const Product& product) const;

  // Returns the cost of a product in multiply-adds.
  double Cost(const Product& product) const;

  // Computes on this thread. It allocates only scratch memory, so that a task may call it.
  void Run(const Product& product) const;

  // Computes on all threads.
  void RunShared(const Product& product, const Workers& workers) const;

 private:
  const GemmFamily* gemm_;
  const StoreFn store_;
  const VectorFamily* vector_ = nullptr;  // if not null, computes instead of `gemm_`
  bool dot_ = false;                      // the dot product's kernel computes instead of `vector_`
  bool direct_ = false;                   // without packing
};

}  // namespace tilekern::cpu

// Decompositions of small matrices on every instruction set that this CPU runs, over arrays that
// end where their memory ends. The matrices have one element of 1 + i in row i, so singular values,
// and the triangular factor's columns, are exact. And calls as no lowering makes them, which are
// refused.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "cpu/matmul.h"
#include "ffi_frame.h"
#include "handlers.h"

namespace {

using Numbers = std::vector<int64_t>;
using Attributes = std::map<std::string, Attribute>;

template <typename T>
class Decompositions {
 public:
  Decompositions(Counts& counts, int64_t count, int64_t m, int64_t n, Pool pool)
      : counts_(counts), count_(count), m_(m), n_(n), k_(std::min(m, n)), pool_(pool) {}

  void Check() {
    // Row i has 1 + i in column (i + 1) % k.
    std::vector<T> a(count_ * m_ * n_), values(count_ * k_);
    for (int64_t c = 0; c < count_; ++c) {
      for (int64_t i = 0; i < k_; ++i) {
        a[(c * m_ + i) * n_ + (i + 1) % k_] = static_cast<T>(1 + i);
        values[c * k_ + i] = static_cast<T>(k_ - i);
      }
    }
    for (int64_t full : {0, 1}) {
      const int64_t left = full ? m_ : k_, right = full ? n_ : k_;
      for (int64_t vectors : {0, 1}) {
        const Attributes attributes = {{"full", Attribute::Number(full)},
                                       {"vectors", Attribute::Number(vectors)}};
        std::vector<FrameBuffer> svd = {Result({count_, k_})}, qr = {Result({count_, left, n_})};
        if (vectors) {
          svd.push_back(Result({count_, m_, left}));
          svd.push_back(Result({count_, right, n_}));
          qr.insert(qr.begin(), Result({count_, m_, left}));
        }
        Call("svd", CpuMatrixSvd, a, svd, attributes);
        Compare("singular values", svd[0], values);
        Call("qr", CpuMatrixQr, a, qr, attributes);
        if (vectors) {
          Orthonormal("left vectors", svd[1]);
          Orthonormal("q", qr[0]);
        }
      }
    }
    if (m_ != n_) return;
    // The diagonal is -i.
    std::vector<T> diagonal(count_ * n_ * n_), ascending(count_ * n_);
    for (int64_t c = 0; c < count_; ++c) {
      for (int64_t i = 0; i < n_; ++i) {
        diagonal[(c * n_ + i) * n_ + i] = static_cast<T>(-i);
        ascending[c * n_ + i] = static_cast<T>(i + 1 - n_);
      }
    }
    for (int64_t flags = 0; flags < 8; ++flags) {
      std::vector<FrameBuffer> results = {Result({count_, n_})};
      if (flags & 1) results.push_back(Result({count_, n_, n_}));
      Call("eigh", CpuMatrixEigh, diagonal, results,
           {{"vectors", Attribute::Number(flags & 1)},
            {"lower", Attribute::Number(flags >> 1 & 1)},
            {"symmetrize", Attribute::Number(flags >> 2)}});
      Compare("eigenvalues", results[0], ascending);
      if (flags & 1) Orthonormal("eigenvectors", results[1]);
    }
  }

 private:
  static constexpr XLA_FFI_DataType kType =
      sizeof(T) == 4 ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_F64;

  std::string Name(const std::string& what) const {
    return what + " of " + std::to_string(count_) + " matrices " + std::to_string(m_) + "x" +
           std::to_string(n_);
  }

  FrameBuffer Result(Numbers dims) {
    int64_t elements = 1;
    for (int64_t size : dims) elements *= size;
    memory_.emplace_back(new T[elements]);
    std::fill_n(memory_.back().get(), elements, T{77});
    return {kType, memory_.back().get(), std::move(dims)};
  }

  void Call(const std::string& what, Handler* handler, const std::vector<T>& a,
            const std::vector<FrameBuffer>& results, const Attributes& attributes) {
    const FrameBuffer operand = Result({count_, m_, n_});
    std::copy(a.begin(), a.end(), static_cast<T*>(operand.data));
    const std::string error = CallHandler(handler, {operand}, results, attributes, pool_, 4);
    counts_.Check(error.empty(), Name(what) + ": " + error);
  }

  void Compare(const std::string& what, const FrameBuffer& found, const std::vector<T>& expected) {
    const auto* values = static_cast<const T*>(found.data);
    bool close = true;
    for (size_t i = 0; i < expected.size(); ++i) {
      close = close && std::abs(values[i] - expected[i]) <= T{1e-5} * k_;
    }
    counts_.Check(close, Name(what));
  }

  // Whether columns are orthonormal.
  void Orthonormal(const std::string& what, const FrameBuffer& found) {
    const int64_t rows = found.dims[1], columns = found.dims[2];
    bool close = true;
    for (int64_t c = 0; c < count_; ++c) {
      const T* matrix = static_cast<const T*>(found.data) + c * rows * columns;
      for (int64_t i = 0; i < columns; ++i) {
        T dot = 0;
        const int64_t j = (i + 1) % columns;
        for (int64_t r = 0; r < rows; ++r) dot += matrix[r * columns + i] * matrix[r * columns + j];
        close = close && std::abs(dot - (i == j)) <= T{1e-5};
      }
    }
    counts_.Check(close, Name(what));
  }

  Counts& counts_;
  const int64_t count_, m_, n_, k_;
  const Pool pool_;
  std::vector<std::unique_ptr<T[]>> memory_;
};

void CheckRefused(Counts& counts) {
  std::vector<float> memory(8192);
  const auto buffer = [&](Numbers dims, XLA_FFI_DataType type = XLA_FFI_DataType_F32) {
    return FrameBuffer{type, memory.data(), std::move(dims)};
  };
  const auto flags = [](int64_t vectors, int64_t full) {
    return Attributes{{"vectors", Attribute::Number(vectors)}, {"full", Attribute::Number(full)}};
  };
  const auto refused = [&](const char* what, Handler* handler, FrameBuffer operand,
                           std::vector<FrameBuffer> results, const Attributes& attributes) {
    const std::string error =
        CallHandler(handler, {operand}, std::move(results), attributes, Pool::kInline, 1);
    counts.Check(!error.empty(), std::string("refuses ") + what);
  };
  const auto tall = buffer({5, 4, 3}), square = buffer({5, 3, 3}), values = buffer({5, 3});
  refused("a vector", CpuMatrixSvd, buffer({9}), {buffer({1})}, flags(0, 0));
  refused("many rows", CpuMatrixSvd, buffer({1, 65, 2}), {buffer({1, 2})}, flags(0, 0));
  refused("no columns", CpuMatrixQr, buffer({1, 3, 0}), {buffer({1, 0, 0})}, flags(0, 0));
  refused("integers", CpuMatrixSvd, buffer({5, 3, 3}, XLA_FFI_DataType_S32),
          {buffer({5, 3}, XLA_FFI_DataType_S32)}, flags(0, 0));
  refused("two types", CpuMatrixSvd, square, {buffer({5, 3}, XLA_FFI_DataType_F64)}, flags(0, 0));
  refused("no results", CpuMatrixSvd, square, {}, flags(0, 0));
  refused("missing vectors", CpuMatrixSvd, square, {values}, flags(1, 0));
  refused("vectors that are not asked for", CpuMatrixSvd, square, {values, square, square},
          flags(0, 0));
  refused("a reduced basis", CpuMatrixSvd, tall, {values, tall, square}, flags(1, 1));
  refused("few values", CpuMatrixSvd, square, {buffer({4, 3})}, flags(0, 0));
  refused("a flag of 2", CpuMatrixQr, square, {square}, flags(0, 2));
  refused("a missing q", CpuMatrixQr, square, {square}, flags(1, 0));
  const Attributes eigh = {{"vectors", Attribute::Number(0)},
                           {"lower", Attribute::Number(1)},
                           {"symmetrize", Attribute::Number(0)}};
  refused("a rectangle", CpuMatrixEigh, tall, {values}, eigh);
}

}  // namespace

void CheckMatrixDecompositions(Counts& counts, bool threads_only) {
  const std::vector<Numbers> shapes =
      threads_only ? std::vector<Numbers>{{8, 8}}
                   : std::vector<Numbers>{{1, 1}, {2, 2}, {3, 3}, {8, 8},  {17, 17}, {64, 64},
                                          {5, 3}, {3, 5}, {1, 9}, {64, 2}, {2, 64}};
  for (const std::string& level : tilekern::cpu::CpuInstructionSets()) {
    tilekern::cpu::SetCpuInstructionSet(level);
    for (const Numbers& shape : shapes) {
      for (int64_t count : threads_only ? Numbers{500} : Numbers{1, 19}) {
        for (Pool pool : {Pool::kThreads, Pool::kInline}) {
          Decompositions<float>(counts, count, shape[0], shape[1], pool).Check();
          Decompositions<double>(counts, count, shape[0], shape[1], pool).Check();
        }
      }
    }
  }
  if (!threads_only) CheckRefused(counts);
  std::printf("decompositions on %zu instruction sets\n",
              tilekern::cpu::CpuInstructionSets().size());
}

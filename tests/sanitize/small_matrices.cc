// Small matrices on every instruction set that this CPU runs, over arrays that end where their
// memory ends: results are exact, for the matrices are twice a permutation or twice the identity.
// And calls as no lowering makes them, which are refused.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "check.h"
#include "cpu/matmul.h"
#include "ffi_frame.h"
#include "handlers.h"

namespace {

using Numbers = std::vector<int64_t>;

template <typename T>
constexpr XLA_FFI_DataType kType = sizeof(T) == 4 ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_F64;

// Twice the matrix that moves row i to row (i + shift) % n.
template <typename T>
std::vector<T> Shifts(int64_t count, int64_t n, int64_t shift) {
  std::vector<T> a(count * n * n);
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t i = 0; i < n; ++i) a[(c * n + (i + shift) % n) * n + i] = 2;
  }
  return a;
}

template <typename T>
class Matrices {
 public:
  Matrices(Counts& counts, int64_t count, int64_t n, Pool pool, int64_t threads)
      : counts_(counts), count_(count), n_(n), pool_(pool), threads_(threads) {}

  void Check() {
    const auto shifted = Shifts<T>(count_, n_, 1), diagonal = Shifts<T>(count_, n_, 0);
    auto inverse = Shifts<T>(count_, n_, n_ - 1);
    for (T& x : inverse) x /= 4;
    Run("inverse", CpuMatrixInverse, {shifted}, {}, inverse);
    // Substitution divides ones and zeros by zero, and multiplies zeros by the results.
    std::vector<T> of_zero(inverse.size(), std::numeric_limits<T>::quiet_NaN());
    for (int64_t c = 1; c <= count_; ++c) {
      of_zero[c * n_ * n_ - 1] = std::numeric_limits<T>::infinity();
    }
    Run("inverse", CpuMatrixInverse, {std::vector<T>(inverse.size())}, {}, of_zero);

    // The matrices are 4 times the identity.
    auto squares = diagonal;
    for (T& x : squares) x *= 2;
    for (int64_t symmetrize : {0, 1}) {
      Run("cholesky", CpuMatrixCholesky, {squares}, {{"symmetrize", Attribute::Number(symmetrize)}},
          diagonal);
    }
    for (int64_t columns : {1, 3, 17}) {
      for (int64_t contiguous : {0, 1}) {
        std::vector<T> b(count_ * n_ * columns), halves;
        for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<T>(i % 64);
        for (T x : b) halves.push_back(x / 2);
        for (int64_t triangle : {0, 1, 2}) {
          Solve(diagonal, b, columns, contiguous, triangle, halves);
        }
      }
    }
    CheckLu(shifted);
  }

 private:
  std::string Name(const std::string& what) const {
    return what + " of " + std::to_string(count_) + " matrices, n " + std::to_string(n_);
  }

  // A copy that ends where its memory ends.
  FrameBuffer Buffer(const std::vector<T>& values, Numbers dims) {
    memory_.emplace_back(new char[values.size() * sizeof(T)]);
    std::copy(values.begin(), values.end(), reinterpret_cast<T*>(memory_.back().get()));
    return {kType<T>, memory_.back().get(), std::move(dims)};
  }

  void Run(const std::string& what, Handler* handler, const std::vector<std::vector<T>>& operands,
           const std::map<std::string, Attribute>& attributes, const std::vector<T>& expected) {
    std::vector<FrameBuffer> buffers;
    for (const auto& operand : operands) buffers.push_back(Buffer(operand, {count_, n_, n_}));
    Compare(what, handler, buffers, attributes, expected, {count_, n_, n_});
  }

  void Solve(const std::vector<T>& a, const std::vector<T>& b, int64_t columns, int64_t contiguous,
             int64_t triangle, const std::vector<T>& expected) {
    const Numbers dims = contiguous ? Numbers{count_, columns, n_} : Numbers{count_, n_, columns};
    Compare("solve", CpuMatrixSolve, {Buffer(a, {count_, n_, n_}), Buffer(b, dims)},
            {{"triangle", Attribute::Number(triangle)},
             {"contiguous", Attribute::Number(contiguous)},
             {"transpose", Attribute::Number(columns % 2)},
             {"unit_diagonal", Attribute::Number(0)}},
            expected, dims);
  }

  void Compare(const std::string& what, Handler* handler, const std::vector<FrameBuffer>& operands,
               const std::map<std::string, Attribute>& attributes, const std::vector<T>& expected,
               const Numbers& dims) {
    const FrameBuffer out = Buffer(std::vector<T>(expected.size(), T{77}), dims);
    const std::string error = CallHandler(handler, operands, {out}, attributes, pool_, threads_);
    const bool equal = std::equal(expected.begin(), expected.end(), static_cast<const T*>(out.data),
                                  [](T x, T y) { return x == y || (x != x && y != y); });
    counts_.Check(error.empty() && equal, Name(what) + ": " + error);
  }

  void CheckLu(const std::vector<T>& a) {
    const FrameBuffer operand = Buffer(a, {count_, n_, n_});
    const FrameBuffer out = Buffer(std::vector<T>(a.size()), {count_, n_, n_});
    std::vector<std::unique_ptr<int32_t[]>> integers;
    std::vector<FrameBuffer> results = {out};
    for (int i = 0; i < 2; ++i) {
      integers.emplace_back(new int32_t[count_ * n_]);
      results.push_back({XLA_FFI_DataType_S32, integers.back().get(), {count_, n_}});
    }
    const std::string error = CallHandler(CpuMatrixLu, {operand}, results, {}, pool_, threads_);
    bool right = error.empty();
    for (int64_t i = 0; right && i < count_ * n_; ++i) {
      right = integers[1][i] == (i % n_ + 1) % n_ && integers[0][i] >= i % n_;
    }
    counts_.Check(right, Name("lu") + ": " + error);
  }

  Counts& counts_;
  const int64_t count_, n_;
  const Pool pool_;
  const int64_t threads_;
  std::vector<std::unique_ptr<char[]>> memory_;
};

void CheckRefused(Counts& counts) {
  std::vector<float> memory(4096);
  const auto buffer = [&](Numbers dims, XLA_FFI_DataType type = XLA_FFI_DataType_F32) {
    return FrameBuffer{type, memory.data(), std::move(dims)};
  };
  const auto refused = [&](const char* what, Handler* handler, std::vector<FrameBuffer> operands,
                           std::vector<FrameBuffer> results,
                           std::map<std::string, Attribute> attributes = {}) {
    const std::string error =
        CallHandler(handler, std::move(operands), std::move(results), attributes, Pool::kInline, 1);
    counts.Check(!error.empty(), std::string("refuses ") + what);
  };
  const auto square = buffer({5, 3, 3});
  refused("a rectangle", CpuMatrixInverse, {buffer({5, 3, 4})}, {buffer({5, 3, 4})});
  refused("a vector", CpuMatrixInverse, {buffer({9})}, {buffer({9})});
  refused("a large matrix", CpuMatrixInverse, {buffer({1, 65, 65})}, {buffer({1, 65, 65})});
  refused("no rows", CpuMatrixInverse, {buffer({1, 0, 0})}, {buffer({1, 0, 0})});
  refused("a small result", CpuMatrixInverse, {square}, {buffer({4, 3, 3})});
  refused("two types", CpuMatrixInverse, {square}, {buffer({5, 3, 3}, XLA_FFI_DataType_F64)});
  refused("a type of no kernel", CpuMatrixInverse, {buffer({5, 3, 3}, XLA_FFI_DataType_S32)},
          {buffer({5, 3, 3}, XLA_FFI_DataType_S32)});
  refused("float pivots", CpuMatrixLu, {square}, {square, buffer({5, 3}), buffer({5, 3})});
  const auto integers = buffer({5, 3}, XLA_FFI_DataType_S32);
  refused("too few pivots", CpuMatrixLu, {square},
          {square, buffer({5, 2}, XLA_FFI_DataType_S32), integers});
  refused("a flag of 2", CpuMatrixCholesky, {square}, {square},
          {{"symmetrize", Attribute::Number(2)}});
  const auto solve = [](int64_t triangle, int64_t contiguous) {
    return std::map<std::string, Attribute>{{"triangle", Attribute::Number(triangle)},
                                            {"contiguous", Attribute::Number(contiguous)},
                                            {"transpose", Attribute::Number(0)},
                                            {"unit_diagonal", Attribute::Number(0)}};
  };
  const auto columns = buffer({5, 3, 2});
  refused("a third triangle", CpuMatrixSolve, {square, columns}, {columns}, solve(3, 0));
  refused("columns as rows", CpuMatrixSolve, {square, buffer({5, 3, 2})}, {columns}, solve(0, 1));
  refused("few columns", CpuMatrixSolve, {square, buffer({4, 3, 2})}, {columns}, solve(0, 0));
  refused("a small solution", CpuMatrixSolve, {square, columns}, {buffer({5, 3, 1})}, solve(0, 0));
}

}  // namespace

void CheckSmallMatrices(Counts& counts, bool threads_only) {
  for (const std::string& level : tilekern::cpu::CpuInstructionSets()) {
    tilekern::cpu::SetCpuInstructionSet(level);
    for (int64_t n : threads_only ? Numbers{16} : Numbers{1, 2, 5, 16, 33, 64}) {
      for (int64_t count : threads_only ? Numbers{500} : Numbers{1, 4, 35}) {
        for (Pool pool : {Pool::kThreads, Pool::kInline}) {
          Matrices<float>(counts, count, n, pool, 4).Check();
          Matrices<double>(counts, count, n, pool, 4).Check();
        }
      }
    }
  }
  if (!threads_only) CheckRefused(counts);
  std::printf("small matrices on %zu instruction sets\n",
              tilekern::cpu::CpuInstructionSets().size());
}

// The custom calls jax_tilekern_cpu_matrix_{svd, eigh, qr}: decompositions of batches of small
// matrices.
//
// Operand a has dimensions (..., m, n), dense and row-major, with m and n up to 64. k is the lesser
// one. Results without (), which attribute `vectors` asks for:
//   svd    values (..., k), (left (..., m, k or m)), (right (..., k or n, n)); attribute `full`
//   eigh   values (..., n), (vectors (..., n, n)); attributes `lower` and `symmetrize`
//   qr     (q (..., m, k or m)), r (..., k or m, n); attribute `full`
// Attributes are 0 or 1.
#include <algorithm>

#include "cpu/call.h"
#include "cpu/dispatch.h"
#include "cpu/scratch.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

constexpr int64_t kMaxSize = 64;

struct Matrices {
  DType type;
  int64_t rows, columns, count;
  const DecompositionFamily* family;
  int64_t shorter() const { return std::min(rows, columns); }
};

Matrices CheckedMatrices(ffi::AnyBuffer a) {
  const DType type = TypeOf(a);
  const DecompositionFamily* family = Kernels().decompositions[static_cast<int>(type)];
  if (family == nullptr) Refuse(std::string("no kernel for ") + Name(type));
  const auto dims = a.dimensions();
  if (dims.size() < 2) Refuse("operand " + ToString(dims) + " is not of matrices");
  const int64_t rows = dims[dims.size() - 2], columns = dims.back();
  if (rows < 1 || columns < 1 || rows > kMaxSize || columns > kMaxSize) {
    Refuse("sizes of operand " + ToString(dims) + " are not 1 to 64");
  }
  return {type, rows, columns, static_cast<int64_t>(a.element_count()) / (rows * columns), family};
}

bool Flag(const char* what, int64_t value) {
  if (value != 0 && value != 1) Refuse(std::string(what) + " is neither 0 nor 1");
  return value == 1;
}

// A result, of which each matrix has `each` elements.
struct Result {
  void* data;
  int64_t each;
};

Result CheckedResult(const Matrices& matrices, const ffi::RemainingRets& results, size_t index,
                     int64_t each) {
  auto found = results.get<ffi::AnyBuffer>(index);
  if (!found.has_value()) Refuse("result " + std::to_string(index) + " is missing");
  ffi::AnyBuffer result = *found.value();
  if (TypeOf(result) != matrices.type) Refuse("operand and results differ in type");
  if (static_cast<int64_t>(result.element_count()) != matrices.count * each) {
    Refuse("result " + ToString(result.dimensions()) + " has not " +
           std::to_string(matrices.count * each) + " elements");
  }
  return {result.untyped_data(), each};
}

void CheckNumber(const ffi::RemainingRets& results, size_t expected) {
  if (results.size() != expected) {
    Refuse(std::to_string(results.size()) + " results instead of " + std::to_string(expected));
  }
}

// Runs a kernel on as many matrices at a time as it has lanes.
void RunAll(const Workers& workers, const Matrices& matrices, DecompositionKernel kernel,
            ffi::AnyBuffer a, const DecompositionCall& call, Result values, Result left,
            Result right) {
  const int64_t lanes = matrices.family->lanes, bytes = Bytes(matrices.type);
  const int64_t elements = matrices.rows * matrices.columns;
  const auto at = [&](Result result, int64_t first) -> void* {
    if (result.data == nullptr) return nullptr;
    return static_cast<char*>(result.data) + first * result.each * bytes;
  };
  const size_t scratch = DecompositionScratch(matrices.rows, matrices.columns) * lanes * bytes;
  // The cost counts the data that every rotation or reflection reads again as moved.
  const int64_t work = lanes * elements * bytes * std::max<int64_t>(matrices.shorter(), 8);
  workers.RunRanges((matrices.count + lanes - 1) / lanes, work, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * lanes;
      DecompositionCall part = call;
      part.rows = matrices.rows;
      part.columns = matrices.columns;
      part.matrices = std::min(lanes, matrices.count - first);
      part.a = at({a.untyped_data(), elements}, first);
      part.values = at(values, first);
      part.left = at(left, first);
      part.right = at(right, first);
      part.scratch = Scratch(ScratchUse::kSums, scratch);
      kernel(part);
    }
  });
}

void RunSvd(const Workers& workers, ffi::AnyBuffer a, const ffi::RemainingRets& results,
            int64_t vectors, int64_t full) {
  const Matrices matrices = CheckedMatrices(a);
  const int64_t m = matrices.rows, n = matrices.columns, k = matrices.shorter();
  DecompositionCall call = {};
  call.full = Flag("full", full);
  const Result values = CheckedResult(matrices, results, 0, k);
  Result left = {}, right = {};
  if (Flag("vectors", vectors)) {
    left = CheckedResult(matrices, results, 1, m * (call.full ? m : k));
    right = CheckedResult(matrices, results, 2, (call.full ? n : k) * n);
  }
  CheckNumber(results, left.data == nullptr ? 1 : 3);
  RunAll(workers, matrices, matrices.family->svd, a, call, values, left, right);
}

void RunEigh(const Workers& workers, ffi::AnyBuffer a, const ffi::RemainingRets& results,
             int64_t vectors, int64_t lower, int64_t symmetrize) {
  const Matrices matrices = CheckedMatrices(a);
  const int64_t n = matrices.columns;
  if (matrices.rows != n) Refuse("operand " + ToString(a.dimensions()) + " is not square");
  DecompositionCall call = {};
  call.lower = Flag("lower", lower);
  call.symmetrize = Flag("symmetrize", symmetrize);
  const Result values = CheckedResult(matrices, results, 0, n);
  Result left = {};
  if (Flag("vectors", vectors)) left = CheckedResult(matrices, results, 1, n * n);
  CheckNumber(results, left.data == nullptr ? 1 : 2);
  RunAll(workers, matrices, matrices.family->eigh, a, call, values, left, {});
}

void RunQr(const Workers& workers, ffi::AnyBuffer a, const ffi::RemainingRets& results,
           int64_t vectors, int64_t full) {
  const Matrices matrices = CheckedMatrices(a);
  DecompositionCall call = {};
  call.full = Flag("full", full);
  const int64_t order = call.full ? matrices.rows : matrices.shorter();
  Result left = {};
  if (Flag("vectors", vectors)) left = CheckedResult(matrices, results, 0, matrices.rows * order);
  const size_t last = left.data == nullptr ? 0 : 1;
  const Result right = CheckedResult(matrices, results, last, order * matrices.columns);
  CheckNumber(results, last + 1);
  RunAll(workers, matrices, matrices.family->qr, a, call, {}, left, right);
}

ffi::Error HandleSvd(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::RemainingRets results,
                     int64_t vectors, int64_t full) {
  return Guarded("jax_tilekern_cpu_matrix_svd",
                 [&] { RunSvd(WorkersOf(pool), a, results, vectors, full); });
}

ffi::Error HandleEigh(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::RemainingRets results,
                      int64_t vectors, int64_t lower, int64_t symmetrize) {
  return Guarded("jax_tilekern_cpu_matrix_eigh",
                 [&] { RunEigh(WorkersOf(pool), a, results, vectors, lower, symmetrize); });
}

ffi::Error HandleQr(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::RemainingRets results,
                    int64_t vectors, int64_t full) {
  return Guarded("jax_tilekern_cpu_matrix_qr",
                 [&] { RunQr(WorkersOf(pool), a, results, vectors, full); });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuMatrixSvd, tilekern::cpu::HandleSvd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("vectors")
                                  .Attr<int64_t>("full"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuMatrixEigh, tilekern::cpu::HandleEigh,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("vectors")
                                  .Attr<int64_t>("lower")
                                  .Attr<int64_t>("symmetrize"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuMatrixQr, tilekern::cpu::HandleQr,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("vectors")
                                  .Attr<int64_t>("full"));

// The custom calls jax_tilekern_cpu_matrix_{inverse, lu, cholesky, solve}: operations on batches of
// small square matrices.
//
// Operand a has dimensions (..., n, n), dense and row-major, with n up to 64. Results:
//   inverse   (..., n, n)
//   lu        (..., n, n), and two of int32 (..., n): pivots and the permutation
//   cholesky  (..., n, n); attribute `symmetrize`
//   solve     like operand b: (..., n, m), or (..., m, n) where attribute `contiguous` states that
// each
//             right-hand side is contiguous; attributes `transpose`, and `triangle`, which is 0 for
//             the whole matrix, 1 for the lower and 2 for the upper triangle; `unit_diagonal` with
// a
//             triangle
// Other attributes are 0 or 1.
#include <algorithm>

#include "cpu/call.h"
#include "cpu/dispatch.h"
#include "cpu/scratch.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

constexpr int64_t kMaxSize = 64;

struct Matrices {
  int64_t n, count, bytes;  // bytes of an element
  const MatrixFamily* family;
};

Matrices CheckedMatrices(ffi::AnyBuffer a, ffi::AnyBuffer out) {
  const DType type = TypeOf(a);
  const MatrixFamily* family = Kernels().matrices[static_cast<int>(type)];
  if (family == nullptr) Refuse(std::string("no kernel for ") + Name(type));
  if (TypeOf(out) != type) Refuse("operand and result differ in type");
  const auto dims = a.dimensions();
  if (dims.size() < 2 || dims[dims.size() - 1] != dims[dims.size() - 2]) {
    Refuse("operand " + ToString(dims) + " is not of square matrices");
  }
  const int64_t n = dims.back();
  if (n < 1 || n > kMaxSize) Refuse("size " + std::to_string(n) + " is not 1 to 64");
  return {n, static_cast<int64_t>(a.element_count()) / (n * n), Bytes(type), family};
}

void CheckCount(const char* what, ffi::AnyBuffer buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.element_count()) != count) {
    Refuse(std::string(what) + " " + ToString(buffer.dimensions()) + " has not " +
           std::to_string(count) + " elements");
  }
}

bool Flag(const char* what, int64_t value) {
  if (value != 0 && value != 1) Refuse(std::string(what) + " is neither 0 nor 1");
  return value == 1;
}

const char* At(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
char* At(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

// Runs a kernel on as many matrices at a time as it has lanes. `call` has the pointers of the
// first.
void RunAll(const Workers& workers, const Matrices& matrices, MatrixKernel kernel,
            const MatrixCall& call) {
  const int64_t n = matrices.n, lanes = matrices.family->lanes;
  const int64_t matrix_bytes = n * n * matrices.bytes;
  const int64_t out_bytes = (call.b != nullptr ? n * call.columns * matrices.bytes : matrix_bytes);
  const size_t scratch = n * (n + call.columns + 1) * lanes * matrices.bytes;
  // The cost counts the data that elimination reads again at each step as moved.
  const int64_t work = lanes * matrix_bytes * std::max<int64_t>(n / 4, 1);
  workers.RunRanges((matrices.count + lanes - 1) / lanes, work, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * lanes;
      MatrixCall part = call;
      part.matrices = std::min(lanes, matrices.count - first);
      part.a = At(call.a, first * matrix_bytes);
      part.out = At(call.out, first * out_bytes);
      if (call.b != nullptr) part.b = At(call.b, first * out_bytes);
      if (call.pivots != nullptr) {
        part.pivots = call.pivots + first * n;
        part.permutation = call.permutation + first * n;
      }
      part.scratch = Scratch(ScratchUse::kSums, scratch);
      kernel(part);
    }
  });
}

void RunInverse(const Workers& workers, ffi::AnyBuffer a, ffi::AnyBuffer out) {
  const Matrices matrices = CheckedMatrices(a, out);
  CheckCount("result", out, a.element_count());
  MatrixCall call = {};
  call.n = matrices.n;
  call.a = a.untyped_data();
  call.out = out.untyped_data();
  call.columns = matrices.n;  // those of the identity
  RunAll(workers, matrices, matrices.family->inverse, call);
}

void RunLu(const Workers& workers, ffi::AnyBuffer a, ffi::AnyBuffer out, ffi::AnyBuffer pivots,
           ffi::AnyBuffer permutation) {
  const Matrices matrices = CheckedMatrices(a, out);
  CheckCount("result", out, a.element_count());
  for (ffi::AnyBuffer integers : {pivots, permutation}) {
    if (TypeOf(integers) != DType::kS32) Refuse("pivots and the permutation are of int32");
    CheckCount("result", integers, matrices.count * matrices.n);
  }
  MatrixCall call = {};
  call.n = matrices.n;
  call.a = a.untyped_data();
  call.out = out.untyped_data();
  call.pivots = static_cast<int32_t*>(pivots.untyped_data());
  call.permutation = static_cast<int32_t*>(permutation.untyped_data());
  RunAll(workers, matrices, matrices.family->lu, call);
}

void RunCholesky(const Workers& workers, ffi::AnyBuffer a, ffi::AnyBuffer out, int64_t symmetrize) {
  const Matrices matrices = CheckedMatrices(a, out);
  CheckCount("result", out, a.element_count());
  MatrixCall call = {};
  call.n = matrices.n;
  call.a = a.untyped_data();
  call.out = out.untyped_data();
  call.symmetrize = Flag("symmetrize", symmetrize);
  RunAll(workers, matrices, matrices.family->cholesky, call);
}

void RunSolve(const Workers& workers, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer out,
              int64_t triangle, int64_t contiguous, int64_t transpose, int64_t unit_diagonal) {
  const Matrices matrices = CheckedMatrices(a, out);
  if (TypeOf(b) != TypeOf(out)) Refuse("right-hand sides and result differ in type");
  if (triangle < 0 || triangle > 2) Refuse("triangle is none of 0, 1 and 2");
  MatrixCall call = {};
  call.n = matrices.n;
  call.a = a.untyped_data();
  call.b = b.untyped_data();
  call.out = out.untyped_data();
  call.contiguous = Flag("contiguous", contiguous);
  call.transpose = Flag("transpose", transpose);
  call.unit_diagonal = Flag("unit_diagonal", unit_diagonal);
  call.lower = triangle == 1;
  const auto dims = b.dimensions();
  if (dims.size() < 2) Refuse("right-hand sides " + ToString(dims) + " are not matrices");
  call.columns = dims[dims.size() - (call.contiguous ? 2 : 1)];
  const int64_t count = CheckedMultiply(matrices.count * matrices.n, call.columns, "columns");
  CheckCount("right-hand sides", b, count);
  CheckCount("result", out, count);
  const MatrixFamily& family = *matrices.family;
  RunAll(workers, matrices, triangle == 0 ? family.solve : family.triangular_solve, call);
}

ffi::Error HandleInverse(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::Result<ffi::AnyBuffer> out) {
  return Guarded("jax_tilekern_cpu_matrix_inverse", [&] { RunInverse(WorkersOf(pool), a, *out); });
}

ffi::Error HandleLu(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::Result<ffi::AnyBuffer> out,
                    ffi::Result<ffi::AnyBuffer> pivots, ffi::Result<ffi::AnyBuffer> permutation) {
  return Guarded("jax_tilekern_cpu_matrix_lu",
                 [&] { RunLu(WorkersOf(pool), a, *out, *pivots, *permutation); });
}

ffi::Error HandleCholesky(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::Result<ffi::AnyBuffer> out,
                          int64_t symmetrize) {
  return Guarded("jax_tilekern_cpu_matrix_cholesky",
                 [&] { RunCholesky(WorkersOf(pool), a, *out, symmetrize); });
}

ffi::Error HandleSolve(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
                       ffi::Result<ffi::AnyBuffer> out, int64_t triangle, int64_t contiguous,
                       int64_t transpose, int64_t unit_diagonal) {
  return Guarded("jax_tilekern_cpu_matrix_solve", [&] {
    RunSolve(WorkersOf(pool), a, b, *out, triangle, contiguous, transpose, unit_diagonal);
  });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuMatrixInverse, tilekern::cpu::HandleInverse,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuMatrixLu, tilekern::cpu::HandleLu,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuMatrixCholesky, tilekern::cpu::HandleCholesky,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("symmetrize"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuMatrixSolve, tilekern::cpu::HandleSolve,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("triangle")
                                  .Attr<int64_t>("contiguous")
                                  .Attr<int64_t>("transpose")
                                  .Attr<int64_t>("unit_diagonal"));

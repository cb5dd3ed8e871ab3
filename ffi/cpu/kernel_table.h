// The kernels of an instruction-set file: functions and their tile shapes.
//
// An operand reaches a kernel as panels of "units": a unit is the smallest run of k that one
// multiply-add lane consumes (one float, a pair of bfloat16, four int8). A panel holds `width` rows
// of the left operand (or columns of the right one), k-major: unit (g, r) lies at g * width + r.
#pragma once

#include <cstdint>

#include "cpu/cache.h"
#include "cpu/dtype.h"

namespace tilekern::cpu {

// A part of an operand: `outer` rows of lhs or columns of rhs, `k` deep. Strides are in elements.
struct PanelSource {
  const void* data;
  int64_t outer_stride;
  int64_t k_stride;
  int64_t outer;
  int64_t readable;  // outer entries that exist from here on; at least `outer`
  int64_t k;
};

// Packs `source` into panels, `panel_bytes` apart. Units past the end of k are padded with zeros.
using PackFn = void (*)(const PanelSource& source, int64_t width, int64_t panels,
                        int64_t panel_bytes, void* to);

// tile (+)= lhs panel x rhs panel; the panels' widths are those of the kernel.
using GemmKernel = void (*)(int64_t groups, const void* lhs, const void* rhs, void* tile,
                            int64_t tile_stride, bool accumulate);

// out = lhs x rhs, of units with arbitrary strides, except that rows of rhs and of the output
// are contiguous. Strides are in units.
struct DirectProduct {
  int64_t m, n, k;
  const void* lhs;
  int64_t lhs_row_stride, lhs_k_stride;
  const void* rhs;
  int64_t rhs_k_stride;
  void* out;
  int64_t out_row_stride;
};
using DirectKernel = void (*)(const DirectProduct& product);

inline constexpr int kRowSteps = 3;
inline constexpr int kMaxVectors = 2;

// A packed, register-tiled matrix product: one accumulator type and one kind of multiply-add.
struct GemmFamily {
  const char* name;
  const char* instruction_set;
  int group;             // elements of k in a unit
  int unit_bytes;        // of a unit; an accumulator has as many
  int lanes;             // units in a vector
  int row_step;          // kernels exist for 1 .. kRowSteps times this many rows
  int rhs_header_units;  // per column of an rhs panel, ahead of its units
  int64_t k_block;       // maximal elements of k in a panel
  GemmKernel kernel[kRowSteps][kMaxVectors];
  DirectKernel direct;  // null where a unit is not one element
  PackFn pack_lhs[kNumDTypes];
  PackFn pack_rhs[kNumDTypes];
};

inline constexpr int kMaxVectorRows = 4;  // vectors that a kernel multiplies
inline constexpr int kRowsAlong = 4;      // rows that it reads at once, where it reads rows

// sums[s, o] += sum_k small[s, k] * big[o, k] for a few s; the big operand is read in place.
// `small` holds a panel of width 1 for each s, `small_stride` units apart.
using VectorKernel = void (*)(const PanelSource& big, const void* small, int64_t small_stride,
                              void* sums, int64_t sums_stride);

struct VectorFamily {
  const char* name;
  const char* instruction_set;
  int group;
  int unit_bytes;
  int lanes;
  PackFn pack_small[kNumDTypes];
  VectorKernel across[kNumDTypes][kMaxVectorRows];  // big operand's outer stride is 1
  VectorKernel along[kNumDTypes][kMaxVectorRows];   // big operand's k stride is 1
  // Adds accumulators, whose number is a multiple of `lanes`.
  void (*add)(void* to, const void* from, int64_t count);
};

// out (+)= a tile of accumulators, converted. Addition needs the accumulator's own type.
using StoreFn = void (*)(const void* tile, int64_t tile_stride, int64_t rows, int64_t cols,
                         void* out, int64_t row_stride, int64_t col_stride, bool accumulate);

// Moves items of each of some matrices: to[c, r] = from[r, c]. Strides are in bytes.
struct MatrixTranspose {
  const char* from;
  int64_t from_stride, from_matrix;
  char* to;
  int64_t to_stride, to_matrix;
  int64_t matrices, rows, cols;
  bool stream;  // the result is too large to stay in the caches
};
using TransposeKernel = void (*)(const MatrixTranspose& matrix);

// Runs of bytes that are copied whole: to[outer, inner] = from[outer, inner]. Strides are in bytes.
struct RunCopy {
  struct Dim {
    int64_t size, from_stride, to_stride;
  };
  const char* from;
  char* to;
  int64_t bytes;  // of a run
  Dim outer, inner;
  bool stream;  // as of MatrixTranspose
};
using CopyKernel = void (*)(const RunCopy& copy);

// Rows of a matrix, strides in elements.
struct SumSource {
  const void* data;
  int64_t row_stride;
  int64_t rows, cols;
};

// The result of a sum: a float64 for floating-point numbers, else an integer modulo 2^64. Both have
// the same zero.
union Total {
  double real;
  uint64_t integer;
};

// Sums of one element type. Pointers to totals point to arrays of Total.
struct SumFamily {
  void (*runs)(const SumSource& x, void* totals);     // totals[r] += the sum of row r
  void (*columns)(const SumSource& x, void* totals);  // totals[c] += the sum of column c
  // to[i, s] += the sum of totals[i, j, s] over `length` j, for `step` s and `count` sums
  void (*fold)(const void* totals, int64_t count, int64_t length, int64_t step, void* to);
  void (*store)(const void* totals, int64_t count, void* out);
};

enum class SegmentReduction { kSum, kProduct, kMaximum, kMinimum };
inline constexpr int kNumSegmentReductions = 4;

// Contiguous rows with a key each. Totals exist for `segments` keys from `first_key` on; rows of
// other keys are not read.
struct KeyedRows {
  const void* rows;
  const int32_t* keys;
  int64_t count, cols;
  int32_t first_key;
  int64_t segments;
  bool most_have_totals;
};

// Rows first .. last - 1 of a list of all `rows` rows, each of `cols` contiguous elements. The list
// is `order`, or the rows as they lie if that is null. Numbers out of bounds are the last row's.
struct ListedRows {
  const void* data;
  const int32_t* order;
  int64_t rows, cols, first, last;
};

// Reductions of rows to segments, of one element type. Totals are float32 for floats of 16 bits,
// else of the element type.
struct SegmentFamily {
  int total_bytes;
  void (*fill)(void* totals, int64_t count);          // with the neutral element
  void (*by_key)(const KeyedRows& x, void* totals);   // combines each row with its key's totals
  void (*listed)(const ListedRows& x, void* totals);  // totals[c] = the reduction of column c
  void (*combine)(void* totals, const void* more, int64_t count);
};

// *total += the dot product of two runs, with a Total as in SumFamily.
using DotKernel = void (*)(const void* lhs, const void* rhs, int64_t count, void* total);

// out = lhs + rhs for runs; a step of 0 repeats an element, and 1 advances.
using AddKernel = void (*)(const void* lhs, int64_t lhs_step, const void* rhs, int64_t rhs_step,
                           void* out, int64_t count);

// An operation on contiguous small square matrices, at most one per lane of a vector. An operation
// ignores the members that it does not need.
struct MatrixCall {
  int64_t n;
  int64_t matrices;
  const void* a;
  const void* b;         // right-hand sides
  void* out;             // factors, inverses or solutions
  int32_t* pivots;       // as LAPACK's, counted from 0
  int32_t* permutation;  // the row of a at each position
  int64_t columns;       // right-hand sides of each matrix
  bool contiguous;       // whether each of them is contiguous
  bool transpose, lower, unit_diagonal;
  bool symmetrize;
  void* scratch;  // n * (n + columns + 1) vectors
};
using MatrixKernel = void (*)(const MatrixCall& call);

// Operations on matrices of one element type.
struct MatrixFamily {
  int lanes;
  MatrixKernel inverse;
  MatrixKernel lu;
  MatrixKernel cholesky;
  MatrixKernel solve;
  MatrixKernel triangular_solve;
};

// A decomposition of contiguous small matrices, at most one per lane of a vector. Vectors are not
// computed where `left` is null.
struct DecompositionCall {
  int64_t rows, columns;
  int64_t matrices;
  const void* a;
  void* values;            // singular values or eigenvalues
  void* left;              // left singular vectors, eigenvectors, or the orthogonal factor
  void* right;             // right singular vectors, or the triangular factor
  bool full;               // whether bases are completed to that of the whole space
  bool lower, symmetrize;  // of eigh: the triangle that is read, unless the mean of both is
  void* scratch;           // DecompositionScratch(rows, columns) vectors
};
using DecompositionKernel = void (*)(const DecompositionCall& call);

inline int64_t DecompositionScratch(int64_t rows, int64_t columns) {
  const int64_t length = rows > columns ? rows : columns;
  return 4 * length * (length + 1);
}

// Decompositions of matrices of one element type.
struct DecompositionFamily {
  int lanes;
  DecompositionKernel svd;
  DecompositionKernel eigh;
  DecompositionKernel qr;
};

// Indexed by the operand's type, and by the output's for `store`.
struct KernelTable {
  const GemmFamily* gemm[kNumDTypes];
  const VectorFamily* vector[kNumDTypes];
  StoreFn store[kNumDTypes];
  DotKernel dot[kNumDTypes];
  const SumFamily* sum[kNumDTypes];
  AddKernel add[kNumDTypes];
  const SegmentFamily* segments[kNumSegmentReductions][kNumDTypes];
  // out[i] = totals[i], of float32, rounded
  void (*narrow_segments[kNumDTypes])(const void* totals, int64_t count, void* out);
  const MatrixFamily* matrices[kNumDTypes];
  const DecompositionFamily* decompositions[kNumDTypes];
  TransposeKernel transpose[5];  // by the binary logarithm of an item's bytes
  CopyKernel copy;
};

// Each function replaces the entries for which it has better kernels than the lower levels.
void AddPortableKernels(KernelTable& table);
void AddAvx2Kernels(KernelTable& table);
void AddAvx512Kernels(KernelTable& table);
void AddAvx512VnniKernels(KernelTable& table);
void AddAvx512Bf16Kernels(KernelTable& table);

}  // namespace tilekern::cpu

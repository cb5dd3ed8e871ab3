// The reduction of split-K: adds the partial accumulators of all splits.
#pragma once

#include "epilogue.cuh"
#include "ptx.cuh"
#include "strided_rows.cuh"

namespace tilekern {

// Compile-time choices; `SumPass` in `plans/gemm/passes/reduce_splits.py` makes them.
struct SumConfig {
  // Elements per thread: 16 bytes of accumulators where rows consist of such vectors, else 1.
  int vector;
};

inline constexpr int kSumThreads = 256;

// Run-time sizes; `SumPass` packs the same fields in the same order. Strides are in elements.
struct SumShape {
  // The rows of the output; rows of partial sums are contiguous in the same order.
  StridedRows rows;
  int64 columns;
  // The distance between the partial sums of one element.
  int64 split_stride;
  RowTiling tiling;
  int32 splits;
  // The extents of the output's matrices, for epilogues.
  int32 m;
  int32 n;
};

// The coordinates of adjacent elements; `first` is the number of the first one in all of the
// output.
struct SplitCoordinates {
  static constexpr int kAdjacentColumns = 1;
  static constexpr bool kConverged = false;
  static constexpr bool kQuads = false;

  int64 first;
  const SumShape& shape;

  int row(int i) const { return static_cast<int>((first + i) / shape.n % shape.m); }
  int column(int i) const { return static_cast<int>((first + i) % shape.n); }
  int rows() const { return shape.m; }
  int columns() const { return shape.n; }
  int batch(int i) const { return static_cast<int>((first + i) / shape.n / shape.m); }
};

// The accumulators of one vectorized load.
template <typename Sum, int kCount>
struct alignas(sizeof(Sum) * kCount) Run {
  Sum sums[kCount];
};

template <typename Out, typename Sum>
inline void store_run(Out* out, const Run<Sum, 1>& run) {
  if constexpr (kSame<Out, Sum>) {
    *out = run.sums[0];
  } else {
    uint32 pair[1];
    pack_pair(pair, out, run.sums[0], run.sums[0]);
    out->bits = static_cast<uint16>(pair[0]);
  }
}

template <typename Out, typename Sum, int kCount>
inline void store_run(Out* out, const Run<Sum, kCount>& run) {
  constexpr int kPairWords = static_cast<int>(sizeof(Out)) / 2;
  uint32 words[kCount / 2 * kPairWords];
#pragma unroll
  for (int pair = 0; pair < kCount / 2; ++pair) {
    uint32 packed[kPairWords];
    pack_pair(packed, out, run.sums[2 * pair], run.sums[2 * pair + 1]);
#pragma unroll
    for (int i = 0; i < kPairWords; ++i) words[pair * kPairWords + i] = packed[i];
  }
  store_global(out, words);
}

// The order of the splits is fixed, so the result is reproducible.
template <typename Sum, typename Out, SumConfig config, class Epilogue = IdentityEpilogue,
          typename... Operands>
__global__ void __launch_bounds__(kSumThreads)
    sum_splits(const Sum* partials, Out* out, const __grid_constant__ SumShape shape,
               Operands... operands) {
  wait_for_prerequisites();
  const RowPosition at = row_position<kSumThreads>(shape.tiling);
  const int64 column = (static_cast<int64>(at.segment) * at.lanes + at.lane) * config.vector;
  if (at.row >= shape.rows.count || column >= shape.columns) return;

  using Vector = Run<Sum, config.vector>;
  partials += at.row * shape.columns + column;
  Vector total = *reinterpret_cast<const Vector*>(partials);
#pragma unroll 4
  for (int split = 1; split < shape.splits; ++split) {
    partials += shape.split_stride;
    const Vector addend = *reinterpret_cast<const Vector*>(partials);
#pragma unroll
    for (int i = 0; i < config.vector; ++i) total.sums[i] += addend.sums[i];
  }
  Epilogue{operands...}(total.sums, SplitCoordinates{at.row * shape.columns + column, shape});
  store_run(out + row_offset(shape.rows, at.row) + column, total);
}

}  // namespace tilekern

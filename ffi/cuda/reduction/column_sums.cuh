// Sums of columns, or of the products of columns with a vector; memory is contiguous along rows.
// Products of a vector and a matrix that is not k-major are of this kind.
#pragma once

#include "reduction/reduction.cuh"

namespace tilekern {

// Compile-time choices; `ColumnPass` in `plans/reduction/column_sums.py` makes them.
struct ColumnConfig {
  // Bytes per load, whose elements are adjacent columns; every address is a multiple of it.
  int vector_bytes;
  // Rows whose loads are in flight at once.
  int unroll;

  // CTAs per SM, which bounds the registers of a thread.
  constexpr int min_blocks() const { return vector_bytes == 16 ? 3 : 4; }
};

// Run-time sizes; `ColumnPass` packs the same fields in the same order. Strides are in elements.
struct ColumnShape {
  ReductionBatch batch;
  int64 lhs_k;
  int64 rhs_k;
  int64 out_column;
  // The distance between the partial sums of one column's segments.
  int64 out_segment;
  int64 k;
  // Elements of k per segment.
  int64 segment_k;
  // Vectors per row.
  uint32 vectors;
  uint32 tiles;
  uint32 segments;
  // 2^log2_lanes threads are side by side on each row.
  uint32 log2_lanes;
};

// A thread's partial sums of its columns. Without kProducts, rhs is not read.
template <typename T, typename Sum, ColumnConfig config, bool kProducts>
class ColumnGroup {
  static constexpr int kBytes = config.vector_bytes;

 public:
  static constexpr int kVector = kBytes / static_cast<int>(sizeof(T));

  // Adds every `step`th row from `first` on, of `count` rows.
  void take(const T* lhs, const T* rhs, const ColumnShape& shape, uint32 first, uint32 step,
            uint32 count) {
    uint32 row = first;
    for (; row + (config.unroll - 1) * step < count; row += config.unroll * step) {
      take_rows<true>(lhs, rhs, shape, row, step, count);
    }
    if (row < count) take_rows<false>(lhs, rhs, shape, row, step, count);
  }

  Sum sums[kVector] = {};

 private:
  template <bool kAll>
  void take_rows(const T* lhs, const T* rhs, const ColumnShape& shape, uint32 first, uint32 step,
                 uint32 count) {
    Bits<kBytes> values[config.unroll] = {};
    Sum factors[config.unroll] = {};
#pragma unroll
    for (int i = 0; i < config.unroll; ++i) {
      const uint32 row = first + i * step;
      if (kAll || row < count) {
        values[i] = load_once<kBytes>(lhs + row * shape.lhs_k);
        if constexpr (kProducts) factors[i] = load_element<T, Sum>(rhs + row * shape.rhs_k);
      }
    }
#pragma unroll
    for (int i = 0; i < config.unroll; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const Sum value = element<T, Sum>(values[i], j);
        if constexpr (kProducts) {
          sums[j] += value * factors[i];
        } else {
          sums[j] += value;
        }
      }
    }
  }
};

template <typename T, typename Sum, typename Out, ColumnConfig config, bool kProducts>
inline void reduce_columns(const T* lhs, const T* rhs, Out* out, const ColumnShape& shape) {
  using Columns = ColumnGroup<T, Sum, config, kProducts>;
  constexpr int kVector = Columns::kVector;
  const uint32 thread = threadIdx.x;
  const uint32 lanes = 1u << shape.log2_lanes;
  const uint32 lane = thread & (lanes - 1);
  const uint32 row = thread >> shape.log2_lanes;
  const uint32 rows = kReductionThreads >> shape.log2_lanes;
  BlockIndex index;
  const uint32 first_vector = index.take(shape.tiles) * lanes;
  const uint32 segment = index.take(shape.segments);
  const ReductionOffsets offsets = reduction_offsets(shape.batch, index.rest());
  const int64 begin = segment * shape.segment_k;

  Columns columns;
  // Those beyond the last vector are the last again.
  const int64 column = static_cast<int64>(min_of(first_vector + lane, shape.vectors - 1)) * kVector;
  columns.take(lhs + offsets.lhs + begin * shape.lhs_k + column,
               rhs + offsets.rhs + begin * shape.rhs_k, shape, row, rows,
               static_cast<uint32>(min_of(shape.k - begin, shape.segment_k)));

  // A tree reduction over rows, with one array per element, so that threads access different banks.
  __shared__ Sum sums[kVector][kReductionThreads];
#pragma unroll
  for (int i = 0; i < kVector; ++i) sums[i][thread] = columns.sums[i];
  for (uint32 half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i][thread] += sums[i][thread + half * lanes];
    }
  }
  __syncthreads();
  out += offsets.out + segment * shape.out_segment;
  const uint32 found = min_of(lanes, shape.vectors - first_vector) * kVector;
  for (uint32 i = thread; i < found; i += kReductionThreads) {
    out[(static_cast<int64>(first_vector) * kVector + i) * shape.out_column] =
        rounded<Out>(sums[i % kVector][i / kVector]);
  }
}

template <typename T, typename Sum, typename Out, ColumnConfig config>
__global__ void __launch_bounds__(kReductionThreads, config.min_blocks())
    column_sums(const T* x, Out* out, const __grid_constant__ ColumnShape shape) {
  reduce_columns<T, Sum, Out, config, false>(x, x, out, shape);
}

template <typename T, typename Sum, typename Out, ColumnConfig config>
__global__ void __launch_bounds__(kReductionThreads, config.min_blocks())
    column_products(const T* lhs, const T* rhs, Out* out,
                    const __grid_constant__ ColumnShape shape) {
  reduce_columns<T, Sum, Out, config, true>(lhs, rhs, out, shape);
}

}  // namespace tilekern

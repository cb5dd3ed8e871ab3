// Where a generated epilogue (`plans/gemm/epilogue.py`) finds the elements of its arrays that
// belong to an accumulator.
#pragma once

#include "types.cuh"

namespace tilekern {

inline constexpr int kEpilogueBatchDims = 4;

// Strides in elements, 0 along dimensions that an array is broadcast over. `Epilogue.parameters`
// in `plans/gemm/epilogue.py` packs the same fields in the same order.
template <int kArrays>
struct ElementStrides {
  int64 row[kArrays];
  int64 column[kArrays];
  int64 batch[kArrays][kEpilogueBatchDims];
  // Sizes of the batch dimensions, outermost first; unused ones come first with size 1.
  int32 sizes[kEpilogueBatchDims];

  // The offset of a matrix, whose number counts batch dimensions as one, the last one fastest.
  int64 batch_offset(int array, int number) const {
    int64 offset = 0;
#pragma unroll
    for (int dim = kEpilogueBatchDims - 1; dim >= 0; --dim) {
      offset += number % sizes[dim] * batch[array][dim];
      number /= sizes[dim];
    }
    return offset;
  }
};

}  // namespace tilekern

// The arrays of a generated epilogue (`plans/gemm/epilogue.py`), of which each accumulator has an
// element: where that lies, and how it is read and written.
//
// Elements are read and written in runs of adjacent columns, by one instruction where the array is
// contiguous and aligned. bfloat16 and float16 are floats in the epilogue's function.
#pragma once

#include "convert.cuh"
#include "ptx.cuh"
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

template <typename T>
struct ComputedType {
  using Type = T;
};
template <>
struct ComputedType<bfloat16> {
  using Type = float;
};
template <>
struct ComputedType<float16> {
  using Type = float;
};

inline float computed(bfloat16 x) { return to_float(x); }
inline float computed(float16 x) { return to_float(x); }
template <typename T>
inline T computed(T x) {
  return x;
}
template <typename T>
inline T stored(typename ComputedType<T>::Type x) {
  if constexpr (kSame<T, typename ComputedType<T>::Type>) {
    return x;
  } else {
    return from_float<T>(x);
  }
}

// Words that one instruction reads.
template <int kBytes>
using WordOf = Select<
    kBytes == 1, uint8,
    Select<kBytes == 2, uint16, Select<kBytes == 4, uint32, Select<kBytes == 8, uint2, uint4>>>>;

// Elements of adjacent columns.
template <typename T, int kCount>
struct ElementRun {
  T elements[kCount];

  auto operator[](int i) const { return computed(elements[i]); }
};

// kContiguous says that the elements are adjacent in memory, and that a run is aligned.
template <int kCount, bool kContiguous, typename T>
inline ElementRun<T, kCount> read_run(const T* first, int64 stride) {
  constexpr int kBytes = (kContiguous ? kCount : 1) * static_cast<int>(sizeof(T));
  using Word = WordOf<kBytes>;
  ElementRun<T, kCount> run;
  if constexpr (kContiguous) {
    const Word word = *reinterpret_cast<const Word*>(first);
    memcpy(run.elements, &word, kBytes);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Word word = *reinterpret_cast<const Word*>(first + i * stride);
      memcpy(&run.elements[i], &word, kBytes);
    }
  }
  return run;
}

// Prefetches a block of a matrix whose columns are adjacent, a line by each lane of a warp.
template <int kRows, int kColumns, typename T, class Coordinates>
inline void prefetch_rows(const T* matrix, int64 row_stride, const Coordinates& at) {
  constexpr int kLineElements = 128 / static_cast<int>(sizeof(T));
  constexpr int kLines = (kColumns + kLineElements - 1) / kLineElements;
#pragma unroll
  for (int i = 0; i < kRows * kLines; i += 32) {
    const int line = i + threadIdx.x % 32;
    const int row = at.first_row() + line / kLines;
    const int column = at.tile_column() + line % kLines * kLineElements;
    const bool inside = row < at.rows() && column < at.columns();
    if (line < kRows * kLines && inside) prefetch_to_l2(matrix + row * row_stride + column);
  }
}

template <int kCount, bool kContiguous, typename T>
inline void write_run(T* first, int64 stride, const ElementRun<T, kCount>& run) {
  if constexpr (kContiguous) {
    WordOf<kCount* static_cast<int>(sizeof(T))> word;
    memcpy(&word, run.elements, sizeof(word));
    *reinterpret_cast<decltype(word)*>(first) = word;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) first[i * stride] = run.elements[i];
  }
}

}  // namespace tilekern

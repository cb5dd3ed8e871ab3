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

// Adjacent accumulators of each thread whose elements are read, computed and written together.
// Where Coordinates::kQuads, the accumulators that four adjacent lanes have of them are 2 rows of
// 32 adjacent columns, and each lane reads and writes 8 adjacent elements of a row: a lane's own
// pairs of elements are parts of sectors.
template <class Coordinates, int kRun>
inline constexpr int kBlockOf = Coordinates::kQuads ? 16 : kRun;

// The 4x4 transpose of what the lanes of a quad have: word i of a lane is then that which lane i
// had of the lane's number.
inline void transpose_in_quad(uint32 (&words)[4]) {
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const bool odd = (threadIdx.x & mask) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & mask) != 0) continue;
      uint32& low = words[i];
      uint32& high = words[i + mask];
      const uint32 received = __shfl_xor_sync(~0u, odd ? low : high, mask);
      (odd ? low : high) = received;
    }
  }
}

// A thread's elements of a block of accumulators, of 1 or 2 bytes where Coordinates::kQuads.
template <typename T, class Coordinates, int kBlock>
struct ElementBlock {
  static constexpr int kHalves = Coordinates::kQuads ? 2 : 1;
  static constexpr int kPairBytes = 2 * static_cast<int>(sizeof(T));
  using Pair = WordOf<kPairBytes>;
  // What a lane reads and writes of a row.
  using Word = WordOf<Coordinates::kQuads ? 4 * kPairBytes : kBlock * static_cast<int>(sizeof(T))>;

  Word words[kHalves];

  // `matrix` is the first element of the matrix, whose rows are aligned to 8 elements.
  void read(const T* matrix, int64 row_stride, const Coordinates& at, int first) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      words[half] =
          *reinterpret_cast<const Word*>(element(matrix, row_stride, at, first, half, at.rows()));
    }
  }

  void write(T* matrix, int64 row_stride, const Coordinates& at, int first) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (at.row(first + 2 * half) < at.rows()) {
        const T* place = element(matrix, row_stride, at, first, half, at.rows());
        *reinterpret_cast<Word*>(const_cast<T*>(place)) = words[half];
      }
    }
  }

  // From what a lane reads to elements of its accumulators.
  void to_accumulators(T (&elements)[kBlock]) const {
    if constexpr (Coordinates::kQuads) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Pair pairs[4];
        memcpy(pairs, &words[half], sizeof(Word));
        uint32 exchanged[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) exchanged[i] = pairs[i];
        transpose_in_quad(exchanged);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Pair pair = static_cast<Pair>(exchanged[i]);
          memcpy(&elements[4 * i + 2 * half], &pair, kPairBytes);
        }
      }
    } else {
      memcpy(elements, words, sizeof(elements));
    }
  }

  // The reverse.
  void from_accumulators(const T (&elements)[kBlock]) {
    if constexpr (Coordinates::kQuads) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 exchanged[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Pair pair;
          memcpy(&pair, &elements[4 * i + 2 * half], kPairBytes);
          exchanged[i] = pair;
        }
        transpose_in_quad(exchanged);
        Pair pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = static_cast<Pair>(exchanged[i]);
        memcpy(&words[half], pairs, sizeof(Word));
      }
    } else {
      memcpy(words, elements, sizeof(elements));
    }
  }

 private:
  static const T* element(const T* matrix, int64 row_stride, const Coordinates& at, int first,
                          int half, int rows) {
    const int row = min_of(at.row(first + 2 * half), rows - 1);
    // A lane of a quad has accumulators of columns 2 * lane and on, and elements of 8 * lane and
    // on.
    const int column =
        at.column(first) + (Coordinates::kQuads ? static_cast<int>(threadIdx.x) % 4 * 6 : 0);
    return matrix + row * row_stride + column;
  }
};

// Prefetches a block of a matrix whose columns are adjacent, a row by each lane of a warp.
template <int kRows, int kColumns, typename T, class Coordinates>
inline void prefetch_rows(const T* matrix, int64 row_stride, const Coordinates& at) {
  static_assert(kRows <= 32);
  const int lane = threadIdx.x % 32;
  const int row = at.first_row() + lane;
  const int columns = min_of(kColumns, at.columns() - at.tile_column());
  if (lane < kRows && row < at.rows()) {
    prefetch_to_l2(matrix + row * row_stride + at.tile_column(),
                   columns * static_cast<int>(sizeof(T)));
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

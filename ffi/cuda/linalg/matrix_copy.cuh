// Copies of small matrices between global and shared memory.
#pragma once

#include "types.cuh"

namespace tilekern {

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) MatrixVector {
  static constexpr int kSize = kCount;
  T items[kCount];
};

// The matrices of a team of threads. In global memory they are row-major and contiguous, and are
// accessed by coalesced vectors. In shared memory rows and matrices have strides.
template <typename T, int kN, int kMatrices, int kTeam, int kRowStride, int kMatrixStride>
struct MatrixTiles {
  static constexpr int kSize = kMatrices * kMatrixStride;
  static constexpr int kWidest = 16 / sizeof(T);
  static constexpr int kElements = kMatrices * kN * kN;
  // The first matrix of a team begins at a multiple of this many elements.
  static constexpr int kVector = kElements % kWidest == 0         ? kWidest
                                 : kElements % (kWidest / 2) == 0 ? kWidest / 2
                                                                  : 1;
  using Vector = MatrixVector<T, kVector>;
  static constexpr int kStep = kTeam * kVector;    // elements of a vector per thread
  static constexpr int kBatch = kN > 32 ? 16 : 8;  // vectors of a thread in flight

  static int offset(int matrix, int row, int column) {
    return matrix * kMatrixStride + row * kRowStride + column;
  }

  // Copies the first `matrices` matrices to shared memory.
  static void load(T* to, const T* __restrict__ from, int matrices, int thread) {
    const auto put = [&](int matrix, int row, int column, T value) {
      to[offset(matrix, row, column)] = value;
    };
    if (matrices < kMatrices) {
#pragma unroll 1
      for (int i = thread; i < matrices * kN * kN; i += kTeam) {
        each<1>(i, [&](int, auto... place) { put(place..., from[i]); });
      }
      return;
    }
#pragma unroll 1
    for (int begin = 0; begin < kElements; begin += kBatch * kStep) {
      const int mine = begin + thread * kVector;
      Vector vectors[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int element = mine + i * kStep;
        if (element < kElements) vectors[i] = *reinterpret_cast<const Vector*>(from + element);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int element = mine + i * kStep;
        if (element >= kElements) break;
        each<kVector>(element, [&](int j, auto... place) { put(place..., vectors[i].items[j]); });
      }
    }
  }

  // Stores the first `matrices` matrices; `read(matrix, row, column)` returns an element.
  template <typename Read>
  static void store(T* __restrict__ to, int matrices, int thread, const Read& read) {
    if (matrices < kMatrices) {
#pragma unroll 1
      for (int i = thread; i < matrices * kN * kN; i += kTeam) {
        each<1>(i, [&](int, auto... place) { to[i] = read(place...); });
      }
      return;
    }
#pragma unroll 4
    for (int i = thread * kVector; i < kElements; i += kStep) {
      Vector vector;
      each<kVector>(i, [&](int j, auto... place) { vector.items[j] = read(place...); });
      *reinterpret_cast<Vector*>(to + i) = vector;
    }
  }

 private:
  // Calls body(j, matrix, row, column) for elements `first` + j of all matrices, j < kCount.
  template <int kCount, typename Body>
  static void each(int first, const Body& body) {
    // A vector within a row needs one division.
    constexpr bool kWithinRow = kN % kCount == 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const uint32 element = kWithinRow ? first : first + j;
      const uint32 row = element / kN;
      body(j, row / kN, row % kN, element % kN + (kWithinRow ? j : 0));
    }
  }
};

}  // namespace tilekern

// out = lhs + rhs with broadcasting, the example of docs/add-an-operation.md.
#pragma once

#include "vector_loads.cuh"

namespace tilekern {

inline constexpr int kMaxAddDims = 6;

// Dimensions of the result, outermost first; unused ones come first with size 1. Strides are in
// elements, 0 to broadcast. `plans/add.py` packs the same fields in the same order.
struct AddShape {
  int64 lhs_strides[kMaxAddDims];
  int64 rhs_strides[kMaxAddDims];
  uint32 sizes[kMaxAddDims];
  uint32 elements;
};

// Moves addresses of operands to those of an element of the result, and returns its index in the
// innermost dimension.
template <typename T>
inline uint32 locate(const AddShape& shape, uint32 element, const T*& lhs, const T*& rhs) {
  uint32 rest = element;
#pragma unroll
  for (int dim = kMaxAddDims - 1; dim >= 0 && rest > 0; --dim) {
    const uint32 index = rest % shape.sizes[dim];
    rest /= shape.sizes[dim];
    lhs += index * shape.lhs_strides[dim];
    rhs += index * shape.rhs_strides[dim];
  }
  return element % shape.sizes[kMaxAddDims - 1];
}

// Loads elements that are adjacent or, with a stride of 0, the same.
template <int kBytes, typename T>
inline Bits<kBytes> load_elements(const T* from, int64 stride) {
  if (stride == 1 && reinterpret_cast<uint64>(from) % kBytes == 0) return load_reused<kBytes>(from);
  Bits<kBytes> bits;
#pragma unroll
  for (uint32 i = 0; i < kBytes / sizeof(T); ++i) {
    reinterpret_cast<T*>(bits.words)[i] = from[i * stride];
  }
  return bits;
}

// A thread adds adjacent elements, and writes kBytes at once.
template <typename T, int kBytes>
__global__ void add(const T* lhs, const T* rhs, T* out, const __grid_constant__ AddShape shape) {
  using Sum = Select<kSame<T, double>, double,
                     Select<kSame<T, float> || kSame<T, bfloat16> || kSame<T, float16>, float,
                            Select<sizeof(T) == 8, uint64, uint32>>>;
  constexpr uint32 kElements = kBytes / sizeof(T);
  const uint32 first = (blockIdx.x * blockDim.x + threadIdx.x) * kElements;
  if (first >= shape.elements) return;
  const T *left = lhs, *right = rhs;
  const uint32 inner = locate(shape, first, left, right);
  if (inner + kElements <= shape.sizes[kMaxAddDims - 1]) {
    const auto x = load_elements<kBytes>(left, shape.lhs_strides[kMaxAddDims - 1]);
    const auto y = load_elements<kBytes>(right, shape.rhs_strides[kMaxAddDims - 1]);
    alignas(kBytes) T sums[kElements];
#pragma unroll
    for (uint32 i = 0; i < kElements; ++i) {
      sums[i] = rounded<T>(element<T, Sum>(x, i) + element<T, Sum>(y, i));
    }
    *reinterpret_cast<WordOf<kBytes>*>(out + first) = reinterpret_cast<const WordOf<kBytes>&>(sums);
  } else {
    // The elements lie in several rows, or are the last ones.
    const uint32 end = min_of(first + kElements, shape.elements);
#pragma unroll 1
    for (uint32 i = first; i < end; ++i) {
      left = lhs;
      right = rhs;
      locate(shape, i, left, right);
      out[i] = rounded<T>(load_element<T, Sum>(left) + load_element<T, Sum>(right));
    }
  }
}

}  // namespace tilekern

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

// Loads elements of a row that are adjacent or, with a stride of 0, the same.
template <int kBytes, typename T>
inline Bits<kBytes> load_elements(const T* from, int64 stride) {
  if (stride == 1) return load_reused<kBytes>(from);
  Bits<kBytes> bits;
#pragma unroll
  for (uint32 i = 0; i < kBytes / sizeof(T); ++i) reinterpret_cast<T*>(bits.words)[i] = *from;
  return bits;
}

// A thread adds the elements of kBytes, which lie in one row.
template <typename T, int kBytes>
__global__ void add(const T* lhs, const T* rhs, T* out, const __grid_constant__ AddShape shape) {
  using Sum = Select<kSame<T, double>, double,
                     Select<kSame<T, float> || kSame<T, bfloat16> || kSame<T, float16>, float,
                            Select<sizeof(T) == 8, uint64, uint32>>>;
  constexpr uint32 kElements = kBytes / sizeof(T);
  const uint32 first = (blockIdx.x * blockDim.x + threadIdx.x) * kElements;
  if (first >= shape.elements) return;
  uint32 rest = first;
#pragma unroll
  for (int dim = kMaxAddDims - 1; dim >= 0 && rest > 0; --dim) {
    const uint32 index = rest % shape.sizes[dim];
    rest /= shape.sizes[dim];
    lhs += index * shape.lhs_strides[dim];
    rhs += index * shape.rhs_strides[dim];
  }
  const auto x = load_elements<kBytes>(lhs, shape.lhs_strides[kMaxAddDims - 1]);
  const auto y = load_elements<kBytes>(rhs, shape.rhs_strides[kMaxAddDims - 1]);
  alignas(kBytes) T sums[kElements];
#pragma unroll
  for (uint32 i = 0; i < kElements; ++i) {
    sums[i] = rounded<T>(element<T, Sum>(x, i) + element<T, Sum>(y, i));
  }
  *reinterpret_cast<WordOf<kBytes>*>(out + first) = reinterpret_cast<const WordOf<kBytes>&>(sums);
}

}  // namespace tilekern

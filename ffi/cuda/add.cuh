// out = lhs + rhs with broadcasting, the example of docs/add-an-operation.md.
#pragma once

#include "convert.cuh"

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

template <typename T>
inline T sum_of(T a, T b) {
  return a + b;
}
inline bfloat16 sum_of(bfloat16 a, bfloat16 b) {
  return from_float<bfloat16>(to_float(a) + to_float(b));
}
inline float16 sum_of(float16 a, float16 b) {
  return from_float<float16>(to_float(a) + to_float(b));
}

// A thread adds one pair of elements.
template <typename T>
__global__ void add(const T* lhs, const T* rhs, T* out, const __grid_constant__ AddShape shape) {
  const uint32 element = blockIdx.x * blockDim.x + threadIdx.x;
  if (element >= shape.elements) return;
  uint32 rest = element;
#pragma unroll
  for (int dim = kMaxAddDims - 1; dim >= 0 && rest > 0; --dim) {
    const uint32 index = rest % shape.sizes[dim];
    rest /= shape.sizes[dim];
    lhs += index * shape.lhs_strides[dim];
    rhs += index * shape.rhs_strides[dim];
  }
  out[element] = sum_of(*lhs, *rhs);
}

}  // namespace tilekern

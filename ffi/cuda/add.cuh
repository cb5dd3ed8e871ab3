// out = lhs + rhs with broadcasting, the example of docs/add-an-operation.md.
#pragma once

#include "convert.cuh"

namespace tilekern {

inline constexpr int kMaxAddDims = 6;

// Dimensions of the result, outermost first; unused ones come first with size 1. Strides are in
// elements, 0 to broadcast. The innermost dimension consists of vectors. `plans/add.py` packs the
// same fields in the same order.
struct AddShape {
  int64 lhs_strides[kMaxAddDims];
  int64 rhs_strides[kMaxAddDims];
  uint32 sizes[kMaxAddDims];
  uint32 threads;
};

// The elements of one vectorized access.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) AddVector {
  T elements[kCount];
};

// Loads a vector, or repeats an element that is broadcast.
template <int kCount, typename T>
inline AddVector<T, kCount> load_vector(const T* from, bool repeat) {
  if (!repeat) return *reinterpret_cast<const AddVector<T, kCount>*>(from);
  AddVector<T, kCount> vector;
#pragma unroll
  for (T& element : vector.elements) element = *from;
  return vector;
}

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

// A thread adds one vector.
template <typename T, int kVector>
__global__ void add(const T* lhs, const T* rhs, T* out, const __grid_constant__ AddShape shape) {
  const uint32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= shape.threads) return;
  uint32 rest = thread;
#pragma unroll
  for (int dim = kMaxAddDims - 1; dim >= 0 && rest > 0; --dim) {
    const uint32 index = rest % shape.sizes[dim];
    rest /= shape.sizes[dim];
    lhs += index * shape.lhs_strides[dim];
    rhs += index * shape.rhs_strides[dim];
  }
  auto sums = load_vector<kVector>(lhs, shape.lhs_strides[kMaxAddDims - 1] == 0);
  const auto addends = load_vector<kVector>(rhs, shape.rhs_strides[kMaxAddDims - 1] == 0);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sums.elements[i] = sum_of(sums.elements[i], addends.elements[i]);
  }
  reinterpret_cast<AddVector<T, kVector>*>(out)[thread] = sums;
}

}  // namespace tilekern

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
  int64 columns;  // of the innermost dimension
  uint32 sizes[kMaxAddDims - 1];
  uint32 vectors;  // that a row of columns takes
  uint32 threads;
};

// The elements of one vectorized access.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) AddVector {
  T elements[kCount];
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

// Loads a vector of an operand; a stride of 0 repeats one element.
template <typename T, int kVector>
inline AddVector<T, kVector> load_vector(const T* from, int64 stride, int count) {
  AddVector<T, kVector> vector;
  if (stride == 1 && count == kVector) {
    vector = *reinterpret_cast<const AddVector<T, kVector>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) vector.elements[i] = from[i < count ? i * stride : 0];
  }
  return vector;
}

// A thread adds one vector. Rows consist of whole vectors, unless there is only one row.
template <typename T, int kVector>
__global__ void add(const T* lhs, const T* rhs, T* out, const __grid_constant__ AddShape shape) {
  const uint32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= shape.threads) return;
  uint32 row = thread / shape.vectors;
  const int64 column = static_cast<int64>(thread % shape.vectors) * kVector;
  out += row * shape.columns + column;
  lhs += column * shape.lhs_strides[kMaxAddDims - 1];
  rhs += column * shape.rhs_strides[kMaxAddDims - 1];
#pragma unroll
  for (int dim = kMaxAddDims - 2; dim >= 0; --dim) {
    const uint32 index = row % shape.sizes[dim];
    row /= shape.sizes[dim];
    lhs += index * shape.lhs_strides[dim];
    rhs += index * shape.rhs_strides[dim];
    if (row == 0) break;
  }

  const int count = static_cast<int>(min_of<int64>(kVector, shape.columns - column));
  const auto a = load_vector<T, kVector>(lhs, shape.lhs_strides[kMaxAddDims - 1], count);
  const auto b = load_vector<T, kVector>(rhs, shape.rhs_strides[kMaxAddDims - 1], count);
  AddVector<T, kVector> sums;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sums.elements[i] = sum_of(a.elements[i], b.elements[i]);
  if (count == kVector) {
    *reinterpret_cast<AddVector<T, kVector>*>(out) = sums;
  } else {
    for (int i = 0; i < count; ++i) out[i] = sums.elements[i];
  }
}

}  // namespace tilekern

// A checked product, the argument of the drivers.
#pragma once

#include <cstdint>

#include "cpu/dtype.h"

namespace tilekern::cpu {

inline constexpr int kMaxBatchRank = 4;

// A matrix with its strides in elements.
template <typename Pointer>
struct StridedMatrix {
  Pointer data;
  DType type;
  int64_t row_stride;
  int64_t col_stride;

  Pointer At(int64_t row, int64_t col) const {
    return data + (row * row_stride + col * col_stride) * Bytes(type);
  }
};
using ConstMatrix = StridedMatrix<const char*>;
using MutableMatrix = StridedMatrix<char*>;

// out (m x n) = lhs (m x k) rhs (k x n)
struct Product {
  int64_t m, n, k;
  ConstMatrix lhs, rhs;
  MutableMatrix out;
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

}  // namespace tilekern::cpu

// Permutations that keep the innermost dimension: copies of whole rows.
#pragma once

#include "strided_rows.cuh"
#include "transpose/items.cuh"

namespace tilekern {

// Compile-time choices; `row_transpose` in `plans/transpose/candidate.py` makes them.
struct RowTransposeConfig {
  // A unit divides the length and the distance of all rows. With units of 16 bytes rows are
  // aligned.
  int unit_bytes;
  // Vectors per thread, all in flight at once.
  int copies;
};

inline constexpr int kRowThreads = 256;

// `row_transpose` packs the same fields.
struct RowTransposeShape {
  // Vectors per row, and one more if rows are unaligned.
  Divisor row_vectors;
  // Vectors of all rows.
  uint32 vectors;
  int64 row_bytes;
  // The outer dimensions enumerate the rows in the result's order.
  OuterDims outer;
};

// Vectors are numbered in the result's order, and adjacent threads copy adjacent vectors.
template <RowTransposeConfig config>
class RowTransposer {
 public:
  RowTransposer(const char* source, char* result, const RowTransposeShape& shape)
      : shape_(shape), source_(source), result_(result) {}

  void run() const {
    if constexpr (config.unit_bytes == 16) {
      copy();
    } else {
      cut();
    }
  }

 private:
  // A row in the source and in the result, and the offset of a vector in it.
  struct Position {
    const char* source;
    char* result;
    int64 offset;
  };

  static uint32 vector(int i) {
    return (blockIdx.x * config.copies + i) * kRowThreads + threadIdx.x;
  }
  bool is_there(int i) const { return vector(i) < shape_.vectors; }

  Position position(int i) const {
    const Quotient at = divide(vector(i), shape_.row_vectors);
    return {source_ + outer_offsets(shape_.outer, at.quotient).source,
            result_ + at.quotient * shape_.row_bytes, static_cast<int64>(at.remainder) * 16};
  }

  void copy() const {
    uint4 vectors[config.copies];
#pragma unroll
    for (int i = 0; i < config.copies; ++i) {
      if (!is_there(i)) break;
      const Position at = position(i);
      vectors[i] = *reinterpret_cast<const uint4*>(at.source + at.offset);
    }
#pragma unroll
    for (int i = 0; i < config.copies; ++i) {
      if (is_there(i)) reinterpret_cast<uint4*>(result_)[vector(i)] = vectors[i];
    }
  }

  // Vectors are aligned in the result, and each is cut out of two source vectors. A row's first and
  // last vector may contain units of neighbouring rows.
  void cut() const {
    char* results[config.copies];
    int64 offsets[config.copies];
    Window<16, config.unit_bytes> windows[config.copies];
#pragma unroll
    for (int i = 0; i < config.copies; ++i) {
      if (!is_there(i)) break;
      const Position at = position(i);
      offsets[i] = at.offset - misalignment(at.result);
      results[i] = at.result + offsets[i];
      windows[i].fetch(at.source + offsets[i], at.source + shape_.row_bytes, at.source);
    }
#pragma unroll
    for (int i = 0; i < config.copies; ++i) {
      if (!is_there(i)) break;
      const int64 left = shape_.row_bytes - offsets[i];
      uint32 words[4];
      windows[i].cut(words);
      if (offsets[i] >= 0 && left >= 16) {
        store_words(results[i], words);
      } else {
        store_some<config.unit_bytes>(results[i], words, -offsets[i] / config.unit_bytes,
                                      left / config.unit_bytes);
      }
    }
  }

  const RowTransposeShape& shape_;
  const char* source_;
  char* result_;
};

template <RowTransposeConfig config>
__global__ void __launch_bounds__(kRowThreads)
    transpose_rows(const char* __restrict__ source, char* __restrict__ result,
                   const __grid_constant__ RowTransposeShape shape) {
  RowTransposer<config>(source, result, shape).run();
}

}  // namespace tilekern

// Sums of rows, or of the products of rows with a vector; memory is contiguous along k. Dot
// products, and products of a k-major matrix and a vector are of this kind.
#pragma once

#include "reduction/reduction.cuh"

namespace tilekern {

// Compile-time choices; `RowPass` in `plans/reduction/row_sums.py` makes them.
struct RowConfig {
  // Bytes per load; every row's address is a multiple of it.
  int vector_bytes;
  // Rows per thread, which share the loads of the vector.
  int rows;
  // Loads of each row that are in flight at once.
  int unroll;

  // CTAs per SM, which bounds the registers of a thread.
  constexpr int min_blocks() const { return rows == 1 ? 4 : 2; }
};

// Run-time sizes; `RowPass` packs the same fields in the same order. Strides are in elements.
struct RowShape {
  ReductionBatch batch;
  int64 lhs_row;
  int64 out_row;
  // The distance between the partial sums of one row's segments.
  int64 out_segment;
  int64 k;
  // Elements of k per segment, a whole number of vectors.
  int64 segment_k;
  uint32 rows;
  // Groups of rows that a thread processes together: per matrix, and in total.
  uint32 row_groups;
  uint32 groups;
  uint32 segments;
  // 2^log2_lanes threads are side by side on each group.
  uint32 log2_lanes;
};

// One thread's partial sums of a row.
template <typename T, typename Sum, int kBytes>
class RowSum {
  // One instruction (dp4a) adds four 8-bit products.
  static constexpr bool kQuads = kSame<T, int8> && kSame<Sum, uint32> && kBytes >= 4;
  // Terms of a vector.
  static constexpr int kTerms = kQuads ? kBytes / 4 : kBytes / static_cast<int>(sizeof(T));
  // Independent chains of additions. More than 32 bytes of them do not stay in registers.
  static constexpr int kSums = min_of(kTerms, 32 / static_cast<int>(sizeof(Sum)));

 public:
  void add(const Bits<kBytes>& values) {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) sums_[i % kSums] += element<T, Sum>(values, i);
  }

  void add(const Bits<kBytes>& lhs, const Bits<kBytes>& rhs) {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      Sum& sum = sums_[i % kSums];
      if constexpr (kQuads) {
        sum = __dp4a(static_cast<int>(lhs.words[i]), static_cast<int>(rhs.words[i]),
                     static_cast<int>(sum));
      } else {
        sum += element<T, Sum>(lhs, i) * element<T, Sum>(rhs, i);
      }
    }
  }

  void add_one(Sum value) { sums_[0] += value; }

  Sum total() {
#pragma unroll
    for (int count = kSums / 2; count > 0; count /= 2) {
#pragma unroll
      for (int i = 0; i < count; ++i) sums_[i] += sums_[i + count];
    }
    return sums_[0];
  }

 private:
  Sum sums_[kSums] = {};
};

// A thread's partial sums of its rows. Without kProducts, rhs is not read.
template <typename T, typename Sum, RowConfig config, bool kProducts>
class RowGroup {
  static constexpr int kBytes = config.vector_bytes;
  static constexpr int kVector = kBytes / static_cast<int>(sizeof(T));

 public:
  // Rows start at `first`; indices beyond the last row read the last row again.
  RowGroup(const T* lhs, const T* rhs, const RowShape& shape, uint32 first) : rhs_(rhs) {
#pragma unroll
    for (int row = 0; row < config.rows; ++row) {
      lhs_[row] = lhs + min_of(first + row, shape.rows - 1) * shape.lhs_row;
    }
  }

  // Adds this lane's part of the first `count` elements of the rows.
  void take(int64 count, uint32 lane, uint32 lanes) {
    const uint32 vectors = static_cast<uint32>(count / kVector);
    uint32 first = lane;
    for (; first + (config.unroll - 1) * lanes < vectors; first += config.unroll * lanes) {
      take_vectors<true>(first, lanes, vectors);
    }
    if (first < vectors) take_vectors<false>(first, lanes, vectors);
    // The remainder has fewer elements than a vector.
    for (int64 i = static_cast<int64>(vectors) * kVector + lane; i < count; i += lanes) {
      Sum factor = 1;
      if constexpr (kProducts) factor = load_element<T, Sum>(rhs_ + i);
#pragma unroll
      for (int row = 0; row < config.rows; ++row) {
        sums_[row].add_one(load_element<T, Sum>(lhs_[row] + i) * factor);
      }
    }
  }

  Sum total(int row) { return sums_[row].total(); }

 private:
  template <bool kAll>
  void take_vectors(uint32 first, uint32 lanes, uint32 vectors) {
    Bits<kBytes> lhs[config.unroll][config.rows] = {};
    Bits<kBytes> rhs[config.unroll] = {};
#pragma unroll
    for (int step = 0; step < config.unroll; ++step) {
      const uint32 vector = first + step * lanes;
      if (kAll || vector < vectors) {
        const int64 at = static_cast<int64>(vector) * kVector;
#pragma unroll
        for (int row = 0; row < config.rows; ++row) {
          lhs[step][row] = load_once<kBytes>(lhs_[row] + at);
        }
        if constexpr (kProducts) rhs[step] = load_reused<kBytes>(rhs_ + at);
      }
    }
#pragma unroll
    for (int step = 0; step < config.unroll; ++step) {
#pragma unroll
      for (int row = 0; row < config.rows; ++row) {
        if constexpr (kProducts) {
          sums_[row].add(lhs[step][row], rhs[step]);
        } else {
          sums_[row].add(lhs[step][row]);
        }
      }
    }
  }

  const T* lhs_[config.rows];
  const T* rhs_;
  RowSum<T, Sum, kBytes> sums_[config.rows];
};

template <typename T, typename Sum, typename Out, RowConfig config, bool kProducts>
inline void reduce_rows(const T* lhs, const T* rhs, Out* out, const RowShape& shape) {
  constexpr int kWarps = kReductionThreads / 32;
  const uint32 lanes = 1u << shape.log2_lanes;
  const uint32 lane = threadIdx.x & (lanes - 1);
  BlockIndex index;
  const uint32 segment = index.take(shape.segments);
  const uint32 wanted =
      index.rest() * (kReductionThreads >> shape.log2_lanes) + (threadIdx.x >> shape.log2_lanes);
  // No thread exits early, because all take part in the shuffles below.
  const uint32 group = min_of(wanted, shape.groups - 1);
  const uint32 first = group % shape.row_groups * config.rows;
  const ReductionOffsets offsets = reduction_offsets(shape.batch, group / shape.row_groups);
  const int64 begin = segment * shape.segment_k;

  RowGroup<T, Sum, config, kProducts> rows(lhs + offsets.lhs + begin, rhs + offsets.rhs + begin,
                                           shape, first);
  rows.take(min_of(shape.k - begin, shape.segment_k), lane, lanes);

  __shared__ Sum of_warps[kWarps][config.rows];
#pragma unroll
  for (int row = 0; row < config.rows; ++row) {
    Sum total = rows.total(row);
    for (uint32 other = min_of(lanes, 32u) / 2; other > 0; other /= 2) {
      total += __shfl_xor_sync(~0u, total, other);
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][row] = total;
    // If a row has at most one warp, every lane has the total.
    if (lanes <= 32 && lane == 0 && wanted < shape.groups && first + row < shape.rows) {
      out[offsets.out + (first + row) * shape.out_row + segment * shape.out_segment] =
          rounded<Out>(total);
    }
  }
  if (lanes <= 32) return;

  __syncthreads();
  if (lane < config.rows && wanted < shape.groups && first + lane < shape.rows) {
    Sum total = of_warps[threadIdx.x / 32][lane];
    for (uint32 warp = 1; warp < lanes / 32; ++warp) {
      total += of_warps[threadIdx.x / 32 + warp][lane];
    }
    out[offsets.out + (first + lane) * shape.out_row + segment * shape.out_segment] =
        rounded<Out>(total);
  }
}

template <typename T, typename Sum, typename Out, RowConfig config>
__global__ void __launch_bounds__(kReductionThreads, config.min_blocks())
    row_sums(const T* x, Out* out, const __grid_constant__ RowShape shape) {
  reduce_rows<T, Sum, Out, config, false>(x, x, out, shape);
}

template <typename T, typename Sum, typename Out, RowConfig config>
__global__ void __launch_bounds__(kReductionThreads, config.min_blocks())
    row_products(const T* lhs, const T* rhs, Out* out, const __grid_constant__ RowShape shape) {
  reduce_rows<T, Sum, Out, config, true>(lhs, rhs, out, shape);
}

}  // namespace tilekern

// Splits float32 operands into float16 pairs (hi, lo) that tensor cores multiply, and decides
// whether the sum of their products is as accurate as float32 arithmetic.
//
// The bound is |error| <= c 2^-22 sum |a||b| in every element of a product of k terms, with c of
// about 4, besides the error of the summation. Call an element lost if hi + lo differs from it by
// more than 2^-22 of its magnitude. If no element is lost, the bound holds: each operand's error
// contributes one 2^-22 sum |a||b|, and the products lo * lo, which are omitted, another.
//
// Below, a row means a row of lhs or a column of rhs. Rows are scaled so that their largest element
// A is at least 2^14. A float16 pair then loses no element of magnitude 2^-3 or more, which is
// 2^-18 A or less, and misses a smaller one by at most 2^-25, which is 2^-39 A. Where a row of lhs
// with La lost elements meets a row of rhs with Lb,
//
//     error of lost elements <= (La + Lb) 2^-39 A B.
//
// Call an element dense if it is at least 2^-8 of its row's largest. With Da and Db of them in the
// two rows, at least Da + Db - k positions of k have two dense elements, so
//
//     sum |a||b| >= (Da + Db - k) 2^-16 A B,
//
// and the error of lost elements is at most another 2^-22 sum |a||b| if La + Lb <= 2 (Da + Db - k).
#pragma once

#include "ptx.cuh"
#include "strided_rows.cuh"

namespace tilekern {

// The float16 values of an element: hi and lo.
inline constexpr int kHalves = 2;

// Compile-time choices; `SplitPass` in `plans/gemm/passes/split_float32.py` makes them.
struct SplitConfig {
  // Whether the source is contiguous along k, rather than along MN.
  bool k_major;
  int threads;
  // Threads side by side along the rows of a CTA; each takes 1 row, or 4 unless k-major.
  int line_lanes;
  // CTAs per SM, which bounds the registers of a thread.
  int min_blocks;

  constexpr int step_lanes() const { return threads / line_lanes; }
  constexpr int thread_rows() const { return k_major ? 1 : 4; }
  constexpr int rows() const { return line_lanes * thread_rows(); }
};

// Run-time sizes; `SplitPass` packs the same fields in the same order. Strides are in bytes.
struct SplitShape {
  // The sources of the split rows, in their order. MN is among the dimensions of `rows` of a
  // k-major source only; otherwise an entry of `rows` is a matrix.
  StridedRows rows;
  // The distance between elements along k, unless k-major.
  int64 k_stride;
  // Rows of MN per matrix, unless k-major.
  uint32 mn;
  uint32 k;
  uint32 k_padded;
  // Rows of MN of the whole operand.
  uint32 all_rows;
};

// The statistics of each row of MN, one array after the other.
struct RowFacts {
  // The row is 2^exponent * (hi + lo).
  int32* exponents;
  // The number of lost elements, or kBeyondRepair.
  int32* lost;
  // The number of dense elements; in a row of zeros all are dense.
  int32* dense;

  RowFacts(int32* facts, uint32 rows)
      : exponents(facts), lost(facts + rows), dense(facts + 2 * static_cast<int64>(rows)) {}
};

// `lost` of a row with an element that is not finite.
inline constexpr int32 kBeyondRepair = 0x7fffffff;

// Bit patterns of float32: the magnitude's mask, and infinity.
inline constexpr uint32 kMagnitude = 0x7fffffff;
inline constexpr uint32 kInfinity = 0x7f800000;

// Returns 2^exponent, for exponents of normal numbers.
inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32>(exponent + 127) << 23);
}

// Returns the exponent e with 2^e <= x < 2^(e + 1), from the bits of a positive finite x.
inline int floor_log2(uint32 bits) {
  return bits >= 0x00800000 ? static_cast<int>(bits >> 23) - 127 : -118 - __clz(bits);
}

// Converts the two float16 values of a word.
inline void unpack_pair(float (&values)[2], uint32 word) {
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  mov.b32 {low, high}, %2;\n"
      "  cvt.f32.f16 %0, low;\n"
      "  cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(values[0]), "=f"(values[1])
      : "r"(word));
}

// Rounds four scaled elements, which are far from infinity, to float16, packs them, and subtracts
// the rounded values.
inline void take_half(uint32 (&words)[2], float (&rest)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32 word[1];
    pack_pair(word, static_cast<float16*>(nullptr), rest[2 * i], rest[2 * i + 1]);
    words[i] = word[0];
    float values[2];
    unpack_pair(values, word[0]);
    rest[2 * i] -= values[0];
    rest[2 * i + 1] -= values[1];
  }
}

// Reduces the values of threads that work on the same rows: every kFirst-th of kLanes lanes.
template <int kFirst, int kLanes = 32, typename T, typename Combine>
inline T combine_lanes(T value, Combine combine) {
#pragma unroll
  for (int distance = kFirst; distance < kLanes; distance *= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  return value;
}

// A CTA processes a strip of rows over all of k: it finds the largest magnitude of each, and then
// splits them from the end of k backwards, because the caches hold the end.
template <SplitConfig config>
class RowSplitter {
  static constexpr int kThreadRows = config.thread_rows();
  // The lanes of a warp on the same rows: every kFirstLane-th of kLanes.
  static constexpr int kFirstLane = config.k_major ? 1 : config.line_lanes;
  static constexpr int kLanes = config.k_major ? min_of(config.step_lanes(), 32) : 32;
  static_assert(32 % kLanes == 0 && kFirstLane < kLanes);
  // The CTA's threads load kStep elements of k at once, each 4, and kBatch times before they use
  // the first, so that enough bytes are in flight.
  static constexpr uint32 kStep = 4 * config.step_lanes();
  static constexpr int kBatch = config.k_major ? 4 : 1;

  // Reductions over the CTA's threads, per row, in shared memory.
  struct Statistics {
    uint32 largest[config.rows()];
    int32 lost[config.rows()];
    int32 dense[config.rows()];
  };

 public:
  RowSplitter(const float* source, const SplitShape& shape) : shape_(shape) {
    const int thread = threadIdx.x;
    const int row_lane = config.k_major ? thread / config.step_lanes() : thread % config.line_lanes;
    step_lane_ = config.k_major ? thread % config.step_lanes() : thread / config.line_lanes;
    first_in_block_ = row_lane * kThreadRows;

    const char* bytes = reinterpret_cast<const char*>(source);
    if constexpr (config.k_major) {
      first_row_ = blockIdx.x * config.rows() + first_in_block_;
      rows_ = first_row_ < shape.all_rows ? 1 : 0;
      source_ = bytes + (rows_ > 0 ? row_offset(shape.rows, first_row_) : 0);
      end_ = source_ + (rows_ > 0 ? 4 * static_cast<int64>(shape.k) : 0);
    } else {
      const uint32 strips = (shape.mn + config.rows() - 1) / config.rows();
      const uint32 matrix = blockIdx.x / strips;
      const uint32 row = blockIdx.x % strips * config.rows() + first_in_block_;
      first_row_ = matrix * shape.mn + row;
      rows_ = row < shape.mn ? min_of<uint32>(kThreadRows, shape.mn - row) : 0;
      source_ = bytes + row_offset(shape.rows, matrix) + 4 * static_cast<int64>(row);
      end_ = source_ + 4 * static_cast<int64>(rows_);
    }
  }

  void run(float16* halves, const RowFacts& facts) {
    __shared__ Statistics statistics;
    for (int i = threadIdx.x; i < config.rows(); i += config.threads) {
      statistics.largest[i] = 0;
      statistics.lost[i] = statistics.dense[i] = 0;
    }
    __syncthreads();
    find_largest(statistics);
    __syncthreads();
    split(halves, facts, statistics);
    __syncthreads();
    write_facts(facts, statistics);
  }

 private:
  using Elements = float[kThreadRows][4];

  // Returns this thread's first element of k in a part of a batch.
  uint32 k_of(uint32 batch, int part) const {
    return (batch * kBatch + part) * kStep + 4 * step_lane_;
  }
  uint32 batches() const { return (shape_.k_padded + kBatch * kStep - 1) / (kBatch * kStep); }

  void load_batch(Elements (&elements)[kBatch], uint32 batch) const {
#pragma unroll
    for (int part = 0; part < kBatch; ++part) load(elements[part], k_of(batch, part));
  }

  // Loads four elements of k of this thread's rows, with zeros beyond the end.
  void load(Elements& elements, uint32 k) const {
    if constexpr (config.k_major) {
      Window<16, 4> window;
      const char* first = source_ + 4 * static_cast<int64>(k);
      window.fetch(first, end_);
      uint32 words[4];
      window.cut(words);
      keep_bytes(words, end_ - first);
#pragma unroll
      for (int i = 0; i < 4; ++i) elements[0][i] = __uint_as_float(words[i]);
    } else {
      Window<16, 4> windows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64 offset = static_cast<int64>(k + i) * shape_.k_stride;
        windows[i].fetch(source_ + offset, k + i < shape_.k ? end_ + offset : source_);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32 words[4];
        windows[i].cut(words);
#pragma unroll
        for (int row = 0; row < 4; ++row) elements[row][i] = __uint_as_float(words[row]);
      }
    }
  }

  void find_largest(Statistics& statistics) const {
    uint32 largest[kThreadRows] = {};
#pragma unroll 1
    for (uint32 batch = 0; batch < batches(); ++batch) {
      Elements elements[kBatch];
      load_batch(elements, batch);
#pragma unroll
      for (int i = 0; i < kBatch * kThreadRows * 4; ++i) {
        const int row = i / 4 % kThreadRows;
        const float element = elements[i / 4 / kThreadRows][row][i % 4];
        largest[row] = max_of(largest[row], __float_as_uint(element) & kMagnitude);
      }
    }
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      largest[row] = combine_lanes<kFirstLane, kLanes>(largest[row], max_of<uint32>);
      if (leads()) atomicMax(&statistics.largest[first_in_block_ + row], largest[row]);
    }
  }

  // Scales the largest to [2^14, 2^15): products of such numbers are far from float32's limits.
  static int exponent_of(uint32 largest) {
    return largest > 0 && largest < kInfinity ? floor_log2(largest) - 14 : 0;
  }

  void split(float16* halves, const RowFacts& facts, Statistics& statistics) const {
    float magnitude[kThreadRows], scales[kThreadRows][2];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      const uint32 largest = statistics.largest[first_in_block_ + row];
      magnitude[row] = __uint_as_float(largest);
      // The scale has two factors, so that both are normal numbers.
      const int exponent = -exponent_of(largest);
      scales[row][0] = power_of_two(exponent / 2);
      scales[row][1] = power_of_two(exponent - exponent / 2);
    }
    int lost[kThreadRows] = {}, dense[kThreadRows] = {};
#pragma unroll 1
    for (uint32 batch = batches(); batch-- > 0;) {
      Elements elements[kBatch];
      load_batch(elements, batch);
#pragma unroll
      for (int part = 0; part < kBatch; ++part) {
        const uint32 k = k_of(batch, part);
#pragma unroll
        for (int row = 0; row < kThreadRows; ++row) {
          uint32 words[kHalves][2];
          split_four(words, elements[part][row], scales[row], magnitude[row], lost[row],
                     dense[row]);
          if (k < shape_.k_padded && row < rows_) store(halves, first_row_ + row, k, words);
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      const auto add = [](int a, int b) { return a + b; };
      lost[row] = combine_lanes<kFirstLane, kLanes>(lost[row], add);
      dense[row] = combine_lanes<kFirstLane, kLanes>(dense[row], add);
      if (leads()) {
        atomicAdd(&statistics.lost[first_in_block_ + row], lost[row]);
        atomicAdd(&statistics.dense[first_in_block_ + row], dense[row]);
      }
    }
  }

  static void split_four(uint32 (&words)[kHalves][2], const float (&elements)[4],
                         const float (&scales)[2], float magnitude, int& lost, int& dense) {
    float scaled[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scaled[i] = elements[i] * scales[0] * scales[1];
      rest[i] = scaled[i];
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) take_half(words[half], rest);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Scaling up for the comparison is exact. An element that scales down to zero is lost.
      const bool vanished = (scaled[i] == 0) & (elements[i] != 0);
      const bool kept = (fabsf(rest[i]) * 0x1p22f <= fabsf(scaled[i])) & !vanished;
      lost += !kept;
      dense += fabsf(elements[i]) * 0x1p8f >= magnitude;
    }
  }

  void store(float16* halves, uint32 row, uint32 k, const uint32 (&words)[kHalves][2]) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int64 split_row = static_cast<int64>(row) * kHalves + half;
      store_global(halves + split_row * shape_.k_padded + k, words[half]);
    }
  }

  void write_facts(const RowFacts& facts, const Statistics& statistics) const {
    if (step_lane_ != 0) return;
    for (int row = 0; row < static_cast<int>(rows_); ++row) {
      const uint32 largest = statistics.largest[first_in_block_ + row];
      facts.exponents[first_row_ + row] = exponent_of(largest);
      facts.lost[first_row_ + row] =
          largest >= kInfinity ? kBeyondRepair : statistics.lost[first_in_block_ + row];
      // In a row of zeros, each element (and the padding) would count as the largest.
      facts.dense[first_row_ + row] =
          largest == 0 ? static_cast<int>(shape_.k) : statistics.dense[first_in_block_ + row];
    }
  }

  // Whether this thread contributes the reduction of its warp's threads on the same rows.
  static bool leads() { return threadIdx.x % kLanes < kFirstLane; }

  const SplitShape& shape_;
  const char* source_;
  // The end of the row, or of the rows at one k.
  const char* end_;
  uint32 first_row_;
  uint32 rows_;
  int first_in_block_;
  int step_lane_;
};

// Writes halves[row][2][k_padded], and facts[3][row] as in RowFacts. The launch before may be the
// other operand's, of which nothing is read here.
template <SplitConfig config>
__global__ void __launch_bounds__(config.threads, config.min_blocks)
    split_float32(const float* source, float16* halves, int32* facts,
                  const __grid_constant__ SplitShape shape) {
  launch_dependents();
  RowSplitter<config>(source, shape).run(halves, RowFacts(facts, shape.all_rows));
  wait_for_prerequisites();
}

inline constexpr int kDecideThreads = 1024;
// Rows that a thread loads at a time.
inline constexpr int kDecideBatch = 8;

struct DecideShape {
  uint32 lhs_rows;
  uint32 rhs_rows;
  uint32 k;
};

// The statistics that bound a product's error, over all rows of an operand.
struct WorstRow {
  int32 lost;
  int32 dense;
};

inline WorstRow worst_row(const RowFacts& facts, uint32 rows) {
  WorstRow worst = {0, 0x7fffffff};
  for (int64 first = threadIdx.x; first < rows; first += kDecideThreads * kDecideBatch) {
    // All loads of a batch are issued before the first is used: one CTA hides latency by them
    // alone.
    WorstRow loaded[kDecideBatch];
#pragma unroll
    for (int i = 0; i < kDecideBatch; ++i) {
      const int64 row = first + i * kDecideThreads;
      const bool inside = row < rows;
      loaded[i].lost = inside ? facts.lost[row] : worst.lost;
      loaded[i].dense = inside ? facts.dense[row] : worst.dense;
    }
#pragma unroll
    for (int i = 0; i < kDecideBatch; ++i) {
      worst.lost = max_of(worst.lost, loaded[i].lost);
      worst.dense = min_of(worst.dense, loaded[i].dense);
    }
  }
  return worst;
}

// Runs as one CTA. Sets the flag to 0 if the condition above holds, and to 1 if float32 arithmetic
// is necessary.
__global__ void __launch_bounds__(kDecideThreads)
    decide_float32(int32* lhs_facts, int32* rhs_facts, int32* flag, DecideShape shape) {
  launch_dependents();
  wait_for_prerequisites();
  WorstRow worst[2] = {worst_row(RowFacts(lhs_facts, shape.lhs_rows), shape.lhs_rows),
                       worst_row(RowFacts(rhs_facts, shape.rhs_rows), shape.rhs_rows)};
  __shared__ WorstRow shared[2];
  if (threadIdx.x < 2) shared[threadIdx.x] = {0, 0x7fffffff};
  __syncthreads();
#pragma unroll
  for (int operand = 0; operand < 2; ++operand) {
    const int lost = combine_lanes<1>(worst[operand].lost, max_of<int>);
    const int dense = combine_lanes<1>(worst[operand].dense, min_of<int>);
    if (threadIdx.x % 32 == 0) {
      atomicMax(&shared[operand].lost, lost);
      atomicMin(&shared[operand].dense, dense);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64 lost = static_cast<int64>(shared[0].lost) + shared[1].lost;
    const int64 both_dense = static_cast<int64>(shared[0].dense) + shared[1].dense - shape.k;
    const bool good = lost == 0 || (lost < kBeyondRepair && lost <= 2 * both_dense);
    *flag = good ? 0 : 1;
  }
}

}  // namespace tilekern

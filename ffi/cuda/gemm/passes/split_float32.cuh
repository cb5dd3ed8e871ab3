// Splits float32 operands into pairs of float16 that tensor cores multiply, and decides whether the
// sum of the pieces' products is as accurate as float32's own arithmetic.
//
// The promise is |error| <= c 2^-22 sum |a||b| in every element of a product of k terms, with c of
// about 4 beside the error of adding up. Say that an element is lost if its pieces miss it by more
// than 2^-22 of itself. Where none is lost, the promise holds: each operand's error gives one
// 2^-22 sum |a||b|, and the products of two low pieces, which are left out, another.
//
// A float16 pair misses nothing down to 2^-3 of a line that is scaled so that its largest element A
// is at least 2^14, which is 2^-18 A or less; an element below is missed by at most 2^-25, which is
// 2^-39 A. Where a line of lhs with La lost elements meets a line of rhs with Lb,
//
//     error of lost elements <= (La + Lb) 2^-39 A B.
//
// Call an element dense if it is at least 2^-8 of its line's largest. With Da and Db of them in the
// two lines, in at least Da + Db - k places both are dense, so
//
//     sum |a||b| >= (Da + Db - k) 2^-16 A B,
//
// and the error of lost elements is at most another 2^-22 of that if La + Lb <= 2 (Da + Db - k).
#pragma once

#include "strided_rows.cuh"

namespace tilekern {

// Pieces of an element.
inline constexpr int kPieces = 2;

// Compile-time choices; `SplitPass` in `plans/gemm/passes/split_float32.py` makes them.
struct SplitConfig {
  // Whether the source's unit stride is along k, rather than along its lines.
  bool k_major;
  int threads;
  // Threads side by side across the lines of a block; each takes 1 line, or 4 unless k-major.
  int line_lanes;
  // Blocks that a multiprocessor holds, which bounds the registers of a thread.
  int min_blocks;

  constexpr int step_lanes() const { return threads / line_lanes; }
  constexpr int thread_lines() const { return k_major ? 1 : 4; }
  constexpr int lines() const { return line_lanes * thread_lines(); }
};

// Run-time sizes; `SplitPass` packs the same fields in the same order. Strides are in bytes.
struct SplitShape {
  // What the lines of pieces are made from, in their order. Lines are among the rows of a k-major
  // source only; otherwise a row is a matrix.
  StridedRows rows;
  // Between steps of k, unless k-major.
  int64 k_stride;
  // Of a matrix, unless k-major.
  uint32 lines;
  uint32 k;
  uint32 k_padded;
  // All lines of the operand.
  uint32 all_lines;
};

// What is known of each line, an array after the other.
struct LineFacts {
  // The line is 2^exponent times the sum of its pieces.
  int32* exponents;
  // Lost elements, or kBeyondRepair.
  int32* lost;
  // Dense elements; all of a line of zeros.
  int32* dense;

  LineFacts(int32* facts, uint32 lines)
      : exponents(facts), lost(facts + lines), dense(facts + 2 * static_cast<int64>(lines)) {}
};

// Of a line whose elements are not all finite.
inline constexpr int32 kBeyondRepair = 0x7fffffff;

// Bits of float32: all but the sign, and infinity.
inline constexpr uint32 kMagnitude = 0x7fffffff;
inline constexpr uint32 kInfinity = 0x7f800000;

// 2^exponent for exponents of normal numbers.
inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32>(exponent + 127) << 23);
}

// The exponent e with 2^e <= x < 2^(e + 1), of the bits of a positive finite number.
inline int floor_log2(uint32 bits) {
  return bits >= 0x00800000 ? static_cast<int>(bits >> 23) - 127 : -118 - __clz(bits);
}

// The two float16 of a word.
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

// Four scaled elements, which are far from infinity, rounded and packed; the pieces are subtracted
// from them.
inline void take_piece(uint32 (&words)[2], float (&rest)[4]) {
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

// Combines the values of a warp's threads that work on the same lines, kFirst lanes apart.
template <int kFirst, typename T, typename Combine>
inline T combine_lanes(T value, Combine combine) {
#pragma unroll
  for (int distance = kFirst; distance < 32; distance *= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  return value;
}

// A block takes a strip of lines, all of k: it finds the largest magnitude of each, and then splits
// them from the end of k, of which the caches have more.
template <SplitConfig config>
class LineSplitter {
  static constexpr int kThreadLines = config.thread_lines();
  // Of a warp, lanes on the same lines: all of them, or those this far apart.
  static constexpr int kFirstLane = config.k_major ? 1 : config.line_lanes;
  static_assert(config.k_major ? config.step_lanes() % 32 == 0 : config.line_lanes < 32);
  // Elements of k that the block's threads take at once, each 4; and how often before they use the
  // first, so that enough bytes are on their way.
  static constexpr uint32 kStep = 4 * config.step_lanes();
  static constexpr int kBatch = config.k_major ? 4 : 1;

  // In shared memory: per line, of all threads.
  struct Sums {
    uint32 largest[config.lines()];
    int32 lost[config.lines()];
    int32 dense[config.lines()];
  };

 public:
  LineSplitter(const float* source, const SplitShape& shape) : shape_(shape) {
    const int thread = threadIdx.x;
    const int line_lane =
        config.k_major ? thread / config.step_lanes() : thread % config.line_lanes;
    step_lane_ = config.k_major ? thread % config.step_lanes() : thread / config.line_lanes;
    first_in_block_ = line_lane * kThreadLines;

    const char* bytes = reinterpret_cast<const char*>(source);
    if constexpr (config.k_major) {
      first_line_ = blockIdx.x * config.lines() + first_in_block_;
      lines_ = first_line_ < shape.all_lines ? 1 : 0;
      source_ = bytes + (lines_ > 0 ? row_offset(shape.rows, first_line_) : 0);
      end_ = source_ + (lines_ > 0 ? 4 * static_cast<int64>(shape.k) : 0);
    } else {
      const uint32 strips = (shape.lines + config.lines() - 1) / config.lines();
      const uint32 matrix = blockIdx.x / strips;
      const uint32 line = blockIdx.x % strips * config.lines() + first_in_block_;
      first_line_ = matrix * shape.lines + line;
      lines_ = line < shape.lines ? min_of<uint32>(kThreadLines, shape.lines - line) : 0;
      source_ = bytes + row_offset(shape.rows, matrix) + 4 * static_cast<int64>(line);
      end_ = source_ + 4 * static_cast<int64>(lines_);
    }
  }

  void run(float16* pieces, const LineFacts& facts) {
    __shared__ Sums sums;
    for (int i = threadIdx.x; i < config.lines(); i += config.threads) {
      sums.largest[i] = 0;
      sums.lost[i] = sums.dense[i] = 0;
    }
    __syncthreads();
    find_largest(sums);
    __syncthreads();
    split(pieces, facts, sums);
    __syncthreads();
    write_facts(facts, sums);
  }

 private:
  using Elements = float[kThreadLines][4];

  // The first of this thread's elements of k in a part of a batch.
  uint32 k_of(uint32 batch, int part) const {
    return (batch * kBatch + part) * kStep + 4 * step_lane_;
  }
  uint32 batches() const { return (shape_.k_padded + kBatch * kStep - 1) / (kBatch * kStep); }

  void load_batch(Elements (&elements)[kBatch], uint32 batch) const {
#pragma unroll
    for (int part = 0; part < kBatch; ++part) load(elements[part], k_of(batch, part));
  }

  // This thread's lines at four elements of k, with zeros beyond it.
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
        for (int line = 0; line < 4; ++line) elements[line][i] = __uint_as_float(words[line]);
      }
    }
  }

  void find_largest(Sums& sums) const {
    uint32 largest[kThreadLines] = {};
#pragma unroll 1
    for (uint32 batch = 0; batch < batches(); ++batch) {
      Elements elements[kBatch];
      load_batch(elements, batch);
#pragma unroll
      for (int i = 0; i < kBatch * kThreadLines * 4; ++i) {
        const int line = i / 4 % kThreadLines;
        const float element = elements[i / 4 / kThreadLines][line][i % 4];
        largest[line] = max_of(largest[line], __float_as_uint(element) & kMagnitude);
      }
    }
#pragma unroll
    for (int line = 0; line < kThreadLines; ++line) {
      largest[line] = combine_lanes<kFirstLane>(largest[line], max_of<uint32>);
      if (leads()) atomicMax(&sums.largest[first_in_block_ + line], largest[line]);
    }
  }

  // Puts the largest into [2^14, 2^15): products of such numbers are far from float32's limits.
  static int exponent_of(uint32 largest) {
    return largest > 0 && largest < kInfinity ? floor_log2(largest) - 14 : 0;
  }

  void split(float16* pieces, const LineFacts& facts, Sums& sums) const {
    float magnitude[kThreadLines], scales[kThreadLines][2];
#pragma unroll
    for (int line = 0; line < kThreadLines; ++line) {
      const uint32 largest = sums.largest[first_in_block_ + line];
      magnitude[line] = __uint_as_float(largest);
      // In two factors, either of which is a normal number.
      const int exponent = -exponent_of(largest);
      scales[line][0] = power_of_two(exponent / 2);
      scales[line][1] = power_of_two(exponent - exponent / 2);
    }
    int lost[kThreadLines] = {}, dense[kThreadLines] = {};
#pragma unroll 1
    for (uint32 batch = batches(); batch-- > 0;) {
      Elements elements[kBatch];
      load_batch(elements, batch);
#pragma unroll
      for (int part = 0; part < kBatch; ++part) {
        const uint32 k = k_of(batch, part);
#pragma unroll
        for (int line = 0; line < kThreadLines; ++line) {
          uint32 words[kPieces][2];
          split_four(words, elements[part][line], scales[line], magnitude[line], lost[line],
                     dense[line]);
          if (k < shape_.k_padded && line < lines_) store(pieces, first_line_ + line, k, words);
        }
      }
    }
#pragma unroll
    for (int line = 0; line < kThreadLines; ++line) {
      const auto add = [](int a, int b) { return a + b; };
      lost[line] = combine_lanes<kFirstLane>(lost[line], add);
      dense[line] = combine_lanes<kFirstLane>(dense[line], add);
      if (leads()) {
        atomicAdd(&sums.lost[first_in_block_ + line], lost[line]);
        atomicAdd(&sums.dense[first_in_block_ + line], dense[line]);
      }
    }
  }

  static void split_four(uint32 (&words)[kPieces][2], const float (&elements)[4],
                         const float (&scales)[2], float magnitude, int& lost, int& dense) {
    float scaled[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scaled[i] = elements[i] * scales[0] * scales[1];
      rest[i] = scaled[i];
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) take_piece(words[piece], rest);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Nothing is lost when numbers are scaled up for a comparison. What scales down to zero is.
      const bool vanished = (scaled[i] == 0) & (elements[i] != 0);
      const bool kept = (fabsf(rest[i]) * 0x1p22f <= fabsf(scaled[i])) & !vanished;
      lost += !kept;
      dense += fabsf(elements[i]) * 0x1p8f >= magnitude;
    }
  }

  void store(float16* pieces, uint32 line, uint32 k, const uint32 (&words)[kPieces][2]) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int64 row = static_cast<int64>(line) * kPieces + piece;
      store_global(pieces + row * shape_.k_padded + k, words[piece]);
    }
  }

  void write_facts(const LineFacts& facts, const Sums& sums) const {
    if (step_lane_ != 0) return;
    for (int line = 0; line < static_cast<int>(lines_); ++line) {
      const uint32 largest = sums.largest[first_in_block_ + line];
      facts.exponents[first_line_ + line] = exponent_of(largest);
      facts.lost[first_line_ + line] =
          largest >= kInfinity ? kBeyondRepair : sums.lost[first_in_block_ + line];
      // Of a line of zeros, each (and the padding) counted as one of the largest.
      facts.dense[first_line_ + line] =
          largest == 0 ? static_cast<int>(shape_.k) : sums.dense[first_in_block_ + line];
    }
  }

  // Whether this thread speaks for its warp's threads on the same lines.
  static bool leads() { return threadIdx.x % 32 < kFirstLane; }

  const SplitShape& shape_;
  const char* source_;
  // Of the line, or of the lines at one k.
  const char* end_;
  uint32 first_line_;
  uint32 lines_;
  int first_in_block_;
  int step_lane_;
};

// Writes pieces[line][kPieces][k_padded], and facts[3][line] as in LineFacts.
template <SplitConfig config>
__global__ void __launch_bounds__(config.threads, config.min_blocks)
    split_float32(const float* source, float16* pieces, int32* facts,
                  const __grid_constant__ SplitShape shape) {
  LineSplitter<config>(source, shape).run(pieces, LineFacts(facts, shape.all_lines));
}

inline constexpr int kDecideThreads = 1024;

struct DecideShape {
  uint32 lhs_lines;
  uint32 rhs_lines;
  uint32 k;
};

// What bounds the error of a product, over all lines of an operand.
struct WorstLine {
  int32 lost;
  int32 dense;
};

inline WorstLine worst_line(const LineFacts& facts, uint32 lines) {
  WorstLine worst = {0, 0x7fffffff};
#pragma unroll 4
  for (int64 line = threadIdx.x; line < lines; line += kDecideThreads) {
    worst.lost = max_of(worst.lost, facts.lost[line]);
    worst.dense = min_of(worst.dense, facts.dense[line]);
  }
  return worst;
}

// One block. Sets the flag to 0 if the derivation above holds, and to 1 if float32 arithmetic has
// to be used.
__global__ void __launch_bounds__(kDecideThreads)
    decide_float32(int32* lhs_facts, int32* rhs_facts, int32* flag, DecideShape shape) {
  WorstLine worst[2] = {worst_line(LineFacts(lhs_facts, shape.lhs_lines), shape.lhs_lines),
                        worst_line(LineFacts(rhs_facts, shape.rhs_lines), shape.rhs_lines)};
  __shared__ WorstLine shared[2];
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

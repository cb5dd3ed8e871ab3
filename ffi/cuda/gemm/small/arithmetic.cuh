// The products of a warp's fragments: by mma.sync, or in float32 on CUDA cores.
//
// Accumulators lie as mma.sync has them: with lane = 4g + t, accumulator 2h + e of fragment i, j is
// that of line 2i + h of lhs in group g, and of line j of rhs in group t + 4e. Which row or column
// of the tile a line is depends on how it is loaded; row() and column() say it. Columns t of four
// lanes are adjacent, so that they are stored to different banks of shared memory.
#pragma once

#include "gemm/small/fragments.cuh"
#include "mma.cuh"

namespace tilekern {

template <typename Lhs, typename Rhs, SmallMatmulConfig config, SmallMatmulShape shape>
class SmallMma {
  using Product = Select<config.widen, Mma<float16, float16>, Mma<Lhs, Rhs>>;
  // A lane holds so many consecutive elements of the k of a step; the order of k is free as long as
  // both operands agree.
  static constexpr int kCount = (sizeof(Lhs) == 8 ? 16 : 8) / sizeof(Lhs);
  static constexpr bool kWhole = shape.k % (4 * kCount) == 0 && shape.chunk_k % (4 * kCount) == 0;
  using LhsFragments = SmallFragments<Lhs, config.lhs, shape.lhs, 2 * config.fragments_m, kCount>;
  using RhsFragments = SmallFragments<Rhs, config.rhs, shape.rhs, config.fragments_n, kCount>;
  using Register = Select<sizeof(Lhs) == 8, double, uint32>;

 public:
  using Accumulator = typename Product::Accumulator;
  using Accumulators = Accumulator[config.fragments_m][config.fragments_n][4];
  static constexpr int kStep = 4 * kCount;

  SmallMma(const char* lhs, const char* rhs, int rows, int columns, int warp_m, int warp_n,
           int lane)
      : lane_k_(lane % 4 * kCount),
        // Groups beyond the tile read what others do, which has no further conflicts of banks.
        lhs_(lhs, rows, lane_k_,
             [=](int i) { return warp_m + LhsFragments::line(i, min_of(lane / 4, rows - 1)); }),
        rhs_(rhs, columns, lane_k_, [=](int i) {
          const int group = lane / 8 + lane / 4 % 2 * 4;
          return warp_n + RhsFragments::line(i, min_of(group, columns - 1));
        }) {}

  // The row of the warp's tile whose accumulators are 2(i % 2) and 2(i % 2) + 1 of fragments i / 2.
  static int row(int i, int lane) { return LhsFragments::line(i, lane / 4); }
  // The column of the even accumulators of fragments j, and how far behind that of the odd ones is.
  static int column(int j, int lane) { return RhsFragments::line(j, lane % 4); }
  static int column_distance(int j) { return 4 * RhsFragments::lines_of_load(j); }

  // Adds the products of elements k to k + kStep - 1 of tiles that have `count`.
  void step(Accumulators& accumulators, uint32 lhs_tile, uint32 rhs_tile, int k, int count) const {
    typename LhsFragments::Registers lhs_words;
    typename RhsFragments::Registers rhs_words;
    lhs_.load(lhs_words, lhs_tile, k + lane_k_);
    rhs_.load(rhs_words, rhs_tile, k + lane_k_);
    if (!kWhole && k + kStep > count) {
      LhsFragments::clear(lhs_words, count - k - lane_k_);
      RhsFragments::clear(rhs_words, count - k - lane_k_);
    }
    if constexpr (config.widen) {
      multiply_widened<0>(accumulators, lhs_words, rhs_words);
      multiply_widened<1>(accumulators, lhs_words, rhs_words);
    } else {
      if constexpr (kSame<Lhs, float>) {
        round(lhs_words);
        round(rhs_words);
      }
      auto& lhs = reinterpret_cast<Register(&)[2 * config.fragments_m][2]>(lhs_words);
      auto& rhs = reinterpret_cast<Register(&)[config.fragments_n][2]>(rhs_words);
#pragma unroll
      for (int i = 0; i < config.fragments_m; ++i) {
#pragma unroll
        for (int j = 0; j < config.fragments_n; ++j) {
          Product::run(accumulators[i][j], lhs[2 * i], lhs[2 * i + 1], rhs[j]);
        }
      }
    }
  }

 private:
  template <int kLines>
  static void round(uint32 (&words)[kLines][2]) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      words[i][0] = round_to_tf32(words[i][0]);
      words[i][1] = round_to_tf32(words[i][1]);
    }
  }

  // Half of a step of 8-bit floats is a step of float16.
  template <int kHalf>
  static void multiply_widened(Accumulators& accumulators,
                               const typename LhsFragments::Registers& lhs,
                               const typename RhsFragments::Registers& rhs) {
    uint32 columns[config.fragments_n][2];
#pragma unroll
    for (int j = 0; j < config.fragments_n; ++j) {
      widen(columns[j], static_cast<Rhs*>(nullptr), rhs[j][kHalf]);
    }
#pragma unroll
    for (int i = 0; i < config.fragments_m; ++i) {
      uint32 low[2], high[2];
      widen(low, static_cast<Lhs*>(nullptr), lhs[2 * i][kHalf]);
      widen(high, static_cast<Lhs*>(nullptr), lhs[2 * i + 1][kHalf]);
#pragma unroll
      for (int j = 0; j < config.fragments_n; ++j) {
        Product::run(accumulators[i][j], low, high, columns[j]);
      }
    }
  }

  int lane_k_;
  LhsFragments lhs_;
  RhsFragments rhs_;
};

// Every lane multiplies all elements of k of its rows and columns.
template <SmallMatmulConfig config, SmallMatmulShape shape>
class SmallFma {
  static constexpr int kCount = 4;
  static constexpr bool kWhole = shape.k % kCount == 0 && shape.chunk_k % kCount == 0;
  using LhsFragments = SmallFragments<float, config.lhs, shape.lhs, 2 * config.fragments_m, kCount>;
  using RhsFragments = SmallFragments<float, config.rhs, shape.rhs, 2 * config.fragments_n, kCount>;

 public:
  using Accumulator = float;
  using Accumulators = float[config.fragments_m][config.fragments_n][4];
  static constexpr int kStep = kCount;

  SmallFma(const char* lhs, const char* rhs, int rows, int columns, int warp_m, int warp_n,
           int lane)
      : lhs_(lhs, rows, 0, [=](int i) { return warp_m + row(i, lane); }),
        rhs_(rhs, columns, 0, [=](int i) { return warp_n + column(i / 2, lane) + i % 2 * 4; }) {}

  // The same as SmallMma's.
  static int row(int i, int lane) { return 8 * i + lane / 4; }
  static int column(int j, int lane) { return 8 * j + lane % 4; }
  static int column_distance(int) { return 4; }

  void step(Accumulators& accumulators, uint32 lhs_tile, uint32 rhs_tile, int k, int count) const {
    typename LhsFragments::Registers lhs;
    typename RhsFragments::Registers rhs;
    lhs_.load(lhs, lhs_tile, k);
    rhs_.load(rhs, rhs_tile, k);
    if (!kWhole && k + kStep > count) {
      LhsFragments::clear(lhs, count - k);
      RhsFragments::clear(rhs, count - k);
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
#pragma unroll
      for (int i = 0; i < 2 * config.fragments_m; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * config.fragments_n; ++j) {
          float& sum = accumulators[i / 2][j / 2][i % 2 * 2 + j % 2];
          sum = __fmaf_rn(__uint_as_float(lhs[i][e]), __uint_as_float(rhs[j][e]), sum);
        }
      }
    }
  }

 private:
  LhsFragments lhs_;
  RhsFragments rhs_;
};

}  // namespace tilekern

// Tiles in shared memory, and their products by `mma.sync` (sm_80 and later).
//
// Four warps have 16 rows each of every block of 64 rows, as a warpgroup has of `wgmma`. Elements
// are bfloat16 or float16, or float32: rounded to TF32, or split into two numbers of TF32 each, of
// which three products are added.
#pragma once

#include "attention/scores.cuh"
#include "mma.cuh"

namespace tilekern {

inline constexpr int kMmaThreads = 128;

// Rows of a sequence. Eight consecutive rows have their elements of 16 bytes in different banks.
template <typename T, int kRows, int kFeatures>
struct RowTile {
  static constexpr int kRowBytes = kFeatures * static_cast<int>(sizeof(T));
  static constexpr int kPitch = kRowBytes + 16;
  static constexpr int kBytes = kRows * kPitch;
  static_assert(kRowBytes % 128 == 0);

  // Copies rows that are `stride` elements apart, as part of the thread's current group. Those from
  // `rows` on, and features beyond the array's, become zeros.
  static void load(uint32 to, const T* from, int64 stride, int rows, int features) {
    constexpr int kChunks = kRowBytes / 16, kElements = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int first = 0; first < kRows * kChunks; first += kMmaThreads) {
      const int i = first + threadIdx.x, row = i / kChunks, chunk = i % kChunks;
      if (kRows * kChunks % kMmaThreads != 0 && i >= kRows * kChunks) continue;
      const bool inside = row < rows && chunk * kElements < features;
      cp_async<16>(to + row * kPitch + chunk * 16, from + row * stride + chunk * kElements, inside);
    }
  }
};

// Registers of an operand of an MMA: those of lhs are of rows g and 8 + g, in the first half of k
// and then in the second.
template <typename T, bool kSplit, int kWords>
struct MmaWords {
  uint32 whole[kWords];
  // What rounding takes from finite numbers, and these rounded. Products of the parts of an
  // infinity could be NaN.
  uint32 rest[kWords], finite[kWords];

  explicit MmaWords(const uint32 (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      whole[i] = kSame<T, float> ? round_to_tf32(words[i]) : words[i];
      if constexpr (kSplit) {
        const float left = __uint_as_float(words[i]) - __uint_as_float(whole[i]);
        const bool is_finite = left == left;
        rest[i] = is_finite ? round_to_tf32(__float_as_uint(left)) : 0;
        finite[i] = is_finite ? whole[i] : 0;
      }
    }
  }
};

template <typename T, bool kSplit>
struct MmaArithmetic {
  using Lhs = MmaWords<T, kSplit, 4>;
  using Rhs = MmaWords<T, kSplit, 2>;

  static void multiply(float* sums, const Lhs& lhs, const Rhs& rhs) {
    if constexpr (kSplit) {
      run(sums, lhs.rest, rhs.finite);
      run(sums, lhs.finite, rhs.rest);
    }
    run(sums, lhs.whole, rhs.whole);
  }

 private:
  static void run(float* sums, const uint32 (&lhs)[4], const uint32 (&rhs)[2]) {
    Mma<T, T>::run(reinterpret_cast<float (&)[4]>(*sums), {lhs[0], lhs[2]}, {lhs[1], lhs[3]}, rhs);
  }
};

// sums += lhs rhs^T over the features of both: of kBlocks blocks of 64 rows of the tile `lhs`, by
// the rows of the tile `rhs`.
template <typename T, bool kSplit, class Lhs, class Rhs, int kBlocks, int kCount>
inline void multiply_by_features(float (&sums)[kBlocks][kCount], uint32 lhs, uint32 rhs) {
  using Arithmetic = MmaArithmetic<T, kSplit>;
  const int lane = threadIdx.x % 32;
  lhs += (threadIdx.x / 32 % 4 * 16 + lane % 16) * Lhs::kPitch + lane / 16 * 16;
  rhs += (lane / 16 * 8 + lane % 8) * Rhs::kPitch + lane / 8 % 2 * 16;
  // Further unrolling would keep operands of later steps in registers.
#pragma unroll(kSplit ? 1 : 2)
  for (int byte = 0; byte < Lhs::kRowBytes; byte += 32) {
    uint32 rows[kBlocks][4];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) ldmatrix(rows[b], lhs + 64 * b * Lhs::kPitch + byte);
#pragma unroll
    for (int j = 0; j < kCount; j += 8) {
      uint32 columns[4];
      ldmatrix(columns, rhs + 2 * j * Rhs::kPitch + byte);
      const typename Arithmetic::Rhs even({columns[0], columns[1]}), odd({columns[2], columns[3]});
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const typename Arithmetic::Lhs left(rows[b]);
        Arithmetic::multiply(&sums[b][j], left, even);
        Arithmetic::multiply(&sums[b][j + 4], left, odd);
      }
    }
  }
}

// The registers of lhs that are a step of accumulators: of 8 columns of float32 or 16 of others.
// Column 2t of float32 is k = t, and column 2t + 1 is k = 4 + t.
template <typename T, int kCount>
inline void step_as_lhs(uint32 (&words)[4], const float (&values)[kCount], int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kSame<T, float>) {
      words[i] = __float_as_uint(values[4 * step + i % 2 * 2 + i / 2]);
    } else {
      uint32 pair[1];
      pack_pair(pair, static_cast<T*>(nullptr), values[8 * step + 2 * i],
                values[8 * step + 2 * i + 1]);
      words[i] = pair[0];
    }
  }
}

// The registers of rhs that are 16 features of a step of positions, in step_as_lhs()'s order of k.
template <typename T, class Tile>
inline void load_positions(uint32 (&words)[4], uint32 tile, int step, int feature) {
  const int lane = threadIdx.x % 32;
  if constexpr (kSame<T, float>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * step + lane % 4 * 2 + i % 2, column = feature + i / 2 * 8 + lane / 4;
      words[i] = load_shared_as<uint32>(tile + row * Tile::kPitch + column * 4);
    }
  } else {
    ldmatrix_trans(words, tile + (16 * step + lane % 16) * Tile::kPitch + lane / 16 * 16 +
                              feature * static_cast<int>(sizeof(T)));
  }
}

// sums += weights rhs over the positions of the tile `rhs`. Tensor cores round the sums of an MMA
// towards zero, so split products are first added up for the tile alone.
template <typename T, bool kSplit, class Rhs, int kBlocks, int kSums, int kCount>
inline void multiply_by_positions(float (&sums)[kBlocks][kSums],
                                  const float (&weights)[kBlocks][kCount], uint32 rhs) {
  using Arithmetic = MmaArithmetic<T, kSplit>;
  constexpr int kSteps = kSame<T, float> ? kCount / 4 : kCount / 8;
  // Accumulators of so many are independent.
  constexpr int kPart = kSplit ? (kSums > 64 ? 8 : 16) : kSums;
#pragma unroll
  for (int part = 0; part < kSums; part += kPart) {
    float of_tile[kBlocks][kSplit ? kPart : 1] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32 rows[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) step_as_lhs<T>(rows[b], weights[b], step);
#pragma unroll
      for (int j = 0; j < kPart; j += 8) {
        uint32 columns[4];
        load_positions<T, Rhs>(columns, rhs, step, (part + j) * 2);
        const typename Arithmetic::Rhs even({columns[0], columns[1]}),
            odd({columns[2], columns[3]});
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const typename Arithmetic::Lhs left(rows[b]);
          float* to = kSplit ? &of_tile[b][j] : &sums[b][part + j];
          Arithmetic::multiply(to, left, even);
          Arithmetic::multiply(to + 4, left, odd);
        }
      }
    }
    if constexpr (kSplit) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) sums[b][part + j] += of_tile[b][j];
      }
    }
  }
}

// The bias of scores whose functions read it: they add it themselves.
struct NoBias {
  static float biased(float product, int, float scale, float factor) {
    return product * (scale * factor);
  }
};

}  // namespace tilekern

// What the kernels of attention of all architectures share: a call, the places of scores in
// accumulators, and the lists of tiles that a mask leaves.
//
// A warpgroup has 64 rows of scores, and each of its warps 16: accumulators of `wgmma` lie as those
// of `mma.sync` do.
#pragma once

#include "lanes.cuh"
#include "ptx.cuh"

namespace tilekern {

namespace lax {

// The hyperbolic tangent of a score: its absolute error is below 2^-22.
inline float tanh_of_score(float x) {
  // exp(2 x) as a power of two, and one multiplication less than two functions would have.
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 2.88539008f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return fmaf(-2.0f, result, 1.0f);
}

// By one operation of the special function unit: its relative error is below 2^-10.9.
inline float tanh_of_bfloat16_score(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace lax

// `shape_of` of plans/attention/launches.py.
struct AttentionShape {
  int32 queries, keys;
  // Heads of queries, and how many of them read the same head of keys.
  int32 heads, group;
  // Tiles of the rows of a head, those of all heads, and entries of a list of tiles.
  int32 tiles, works, listed;
  // Lists between those of neighbouring batches and heads; 0 where all have the same.
  int32 batch_lists, head_lists;
  // Steps of a bias along the batch and the heads: 0 where all have the same.
  int32 bias_batches, bias_heads;
  float scale;
};

struct AttentionConfig {
  // Rows of tiles. A CTA has one of queries or one of keys, with a consumer for 64 rows.
  int queries, keys;
  int features, value_features;
  int stages;
  bool listed;
  // Whether there is a bias whose tiles are staged in shared memory.
  bool biased;
  // Whether the logsumexp of a row is two numbers: a base, and that of scores less the base.
  bool based;

  static constexpr int threads(int rows) { return 2 * rows + 128; }
};

extern __shared__ __align__(1024) unsigned char attention_shared[];

inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// Rounds accumulators to the registers of a next product's lhs.
template <typename T, int kSteps, int kCount>
inline void as_lhs(uint32 (&words)[kSteps][4], const float (&values)[kCount]) {
  static_assert(kCount == 8 * kSteps);
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    uint32 pair[1];
    pack_pair(pair, static_cast<T*>(nullptr), values[2 * i], values[2 * i + 1]);
    words[i / 4][i % 4] = pair[0];
  }
}

inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

template <bool kValue>
struct BoolConstant {
  static constexpr bool value = kValue;
};

// Where this thread's accumulators of an MMA lie: accumulator i is in row row(i) of the warpgroup's
// 64, and in column column(i).
struct AccumulatorPlace {
  int row, column;

  AccumulatorPlace()
      : row(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4), column(threadIdx.x % 4 * 2) {}

  int row_of(int i) const { return row + (i >> 1 & 1) * 8; }
  int column_of(int i) const { return column + i / 4 * 8 + (i & 1); }
};

// What functions get of a score: the indices of its query and key, and their difference.
struct ScoreIndices {
  int query, key, difference;
};

// The scores of a thread's accumulators, whose rows are queries or keys. Differences are computed
// from that of the first, so that equal ones are known to be equal.
template <bool kRowsAreQueries>
struct ScorePlaces {
  int query, key;

  // Rows and columns of the MMA begin at this query and key.
  ScorePlaces(int first_query, int first_key) {
    const AccumulatorPlace place;
    query = first_query + (kRowsAreQueries ? place.row : place.column);
    key = first_key + (kRowsAreQueries ? place.column : place.row);
  }

  ScoreIndices at(int i) const {
    const int row = (i >> 1 & 1) * 8, column = i / 4 * 8 + (i & 1);
    const int of_query = kRowsAreQueries ? row : column, of_key = kRowsAreQueries ? column : row;
    return {query + of_query, key + of_key, query - key + (of_query - of_key)};
  }

  // The nearest of indices within the sequences, which functions may read arrays at.
  ScoreIndices readable(int i, const AttentionShape& shape) const {
    ScoreIndices found = at(i);
    found.query = min_of(found.query, shape.queries - 1);
    found.key = min_of(found.key, shape.keys - 1);
    return {found.query, found.key, found.query - found.key};
  }
};

// Reduces a value over the four threads that have a row's accumulators.
template <class Combine>
inline float reduced_over_row(float x, const Combine& combine) {
  x = combine(x, __shfl_xor_sync(~0u, x, 1));
  return combine(x, __shfl_xor_sync(~0u, x, 2));
}

struct Tile {
  int number;
  bool masked;  // whether the mask has to be evaluated
};

// The tiles that a tile of rows meets: those of a list, or all of them. An entry of a list is twice
// the tile's number, plus one if the mask leaves the whole tile.
template <bool kListed>
class TileList {
 public:
  TileList(const int32* counts, const int32* lists, const AttentionShape& shape, int batch,
           int head, int tile, int all) {
    count_ = all;
    if constexpr (kListed) {
      const int64 list =
          static_cast<int64>(batch) * shape.batch_lists + head * shape.head_lists + tile;
      count_ = counts[list];
      list_ = lists + list * shape.listed;
    }
  }

  int count() const { return count_; }

  Tile tile(int i) const {
    if constexpr (!kListed) return {i, false};
    const int entry = list_[i];
    return {entry >> 1, !(entry & 1)};
  }

 private:
  int count_;
  const int32* list_ = nullptr;
};

// Stores two adjacent features of a row.
template <typename T>
inline void store_pair(T* to, float first, float second) {
  uint32 pair[1];
  pack_pair(pair, static_cast<T*>(nullptr), first, second);
  *reinterpret_cast<uint32*>(to) = pair[0];
}

inline void store_pair(float* to, float first, float second) {
  *reinterpret_cast<float2*>(to) = {first, second};
}

// Stores 64 rows of accumulators times a factor for each row; `rows` of them lie in the array.
template <typename T, int kCount>
inline void store_rows(T* to, int64 row_elements, int rows, int features,
                       const float (&sums)[kCount], const float (&factors)[2]) {
  const AccumulatorPlace place;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int row = place.row_of(i), column = place.column_of(i);
    if (row < rows && column < features) {
      const float factor = factors[i >> 1 & 1];
      store_pair(to + row * row_elements + column, sums[i] * factor, sums[i + 1] * factor);
    }
  }
}

}  // namespace tilekern

// The softmax of rows of scores of which tiles of keys arrive one after the other.
//
// `Functions` has the score function and the mask as CUDA:
//
//   kScore, kMask                   whether there are any
//   kReads                          whether they read arrays, by indices within the sequences
//   stage()                         copies small arrays to shared memory, before __syncthreads()
//   score(s, b, h, at)              the score, of scale times the product of query and key
//   kInner, kOuter                  numbers that s and the score have to be multiplied by; rows
//                                   that have a base have one for the latter
//   kIsUpToOne                      whether score() is from -1 to 1, and kOuter so small that the
//                                   exponentials of scores and of their negatives are normal
//                                   numbers
//   visible(b, h, at)               whether the query sees the key
#pragma once

#include "attention/scores.cuh"

namespace tilekern {

// A tile of queries of one head.
template <bool kListed>
struct QueryWork {
  int first_query, head, batch;
  TileList<kListed> list;
};

// That of 64 rows, of which a thread has two.
template <AttentionConfig config, class Functions>
class RowSoftmax {
  using Work = QueryWork<config.listed>;
  static constexpr bool kScore = Functions::kScore || config.biased;
  static constexpr int kCount = config.keys / 2;
  static_assert(!config.based || (kScore && Functions::kOuter == 1));

 public:
  void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maxima_[r] = Functions::kIsUpToOne ? 0 : -INFINITY;
      totals_[r] = 0;
    }
  }

  // Turns products of queries, of which the rows begin at `first_query`, and keys into scores.
  template <class Bias>
  static void score(float (&scores)[kCount], const AttentionShape& shape,
                    const Functions& functions, const Work& work, int first_query, int first_key,
                    Bias& bias) {
    if constexpr (!kScore) return;
    const ScorePlaces<true> places(first_query, first_key);
    const auto evaluate = [&](auto clamps) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        float score = bias.biased(scores[j], j, shape.scale, Functions::kInner);
        if constexpr (Functions::kScore) {
          const ScoreIndices at =
              decltype(clamps)::value ? places.readable(j, shape) : places.at(j);
          score = functions.score(score, work.batch, work.head, at);
        }
        scores[j] = score;
      }
    };
    if (Functions::kReads &&
        (first_query + 64 > shape.queries || first_key + config.keys > shape.keys)) {
      evaluate(BoolConstant<true>());
    } else {
      evaluate(BoolConstant<false>());
    }
  }

  // Turns scores into weights relative to the maxima so far, and returns the factors that bring
  // earlier sums to these maxima. Neither is computed of scores up to one.
  void weigh(float (&scores)[kCount], float (&factors)[2], const AttentionShape& shape,
             const Functions& functions, const Work& work, int first_query, Tile tile) {
    const int first_key = tile.number * config.keys;
    const ScorePlaces<true> places(first_query, first_key);
    const auto hide = [&](float hidden) {
      if (!tile.masked && first_key + config.keys <= shape.keys) return;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        bool visible = places.at(j).key < shape.keys;
        if constexpr (Functions::kMask) {
          const ScoreIndices at = Functions::kReads ? places.readable(j, shape) : places.at(j);
          visible = visible && functions.visible(work.batch, work.head, at);
        }
        scores[j] = visible ? scores[j] : hidden;
      }
    };
    // Weights are powers of two of the scores less the maximum, times this.
    const float rate = kScore ? Functions::kOuter * kLog2E : shape.scale * kLog2E;
    if constexpr (Functions::kIsUpToOne) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        scores[j] = exp2_approximate(scores[j] * rate);
      }
      hide(0);
    } else {
      hide(-INFINITY);
      const auto larger = [](float x, float y) { return fmaxf(x, y); };
      float bases[2];
      // The difference of large scores is exact, and that of rounded products with the rate is not.
      const auto weight = [&](float score, int r) {
        return exp2_approximate(config.based ? (score - bases[r]) * rate : score * rate - bases[r]);
      };
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float maximum = maxima_[r];
#pragma unroll
        for (int j = 2 * r; j < kCount; j += 4) {
          maximum = fmaxf(maximum, fmaxf(scores[j], scores[j + 1]));
        }
        maximum = reduced_over_row(maximum, larger);
        // Before the first visible key, weights are zero.
        bases[r] = maximum == -INFINITY ? 0 : maximum * (config.based ? 1 : rate);
        factors[r] = weight(maxima_[r], r);
        maxima_[r] = maximum;
        totals_[r] *= factors[r];
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) scores[j] = weight(scores[j], j >> 1 & 1);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) totals_[j >> 1 & 1] += scores[j];
  }

  // Stores the sums of weights and values over those of weights, and the logarithms of the latter.
  template <typename T, int kSums>
  void store(const float (&sums)[kSums], const AttentionShape& shape, const Work& work,
             int first_query, T* out, float* logsumexp, float* bases, int value_features) const {
    const AccumulatorPlace place;
    const int rows = shape.queries - first_query;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = reduced_over_row(totals_[r], [](float x, float y) { return x + y; });
      factors[r] = total == 0 ? 0 : 1 / total;
      const int row = place.row + 8 * r;
      if (threadIdx.x % 4 == 0 && row < rows) {
        const int64 own =
            (static_cast<int64>(work.batch) * shape.heads + work.head) * shape.queries +
            first_query + row;
        float base = total == 0 ? 0 : maxima_[r] * (kScore ? Functions::kOuter : shape.scale);
        if constexpr (config.based) {
          bases[own] = base;
          base = 0;
        }
        logsumexp[own] = total == 0 ? -INFINITY : base + logf(total);
      }
    }
    const int64 row_elements = static_cast<int64>(shape.heads) * value_features;
    out += (static_cast<int64>(work.batch) * shape.queries + first_query) * row_elements +
           work.head * value_features;
    store_rows(out, row_elements, rows, value_features, sums, factors);
  }

 private:
  float maxima_[2], totals_[2];
};

}  // namespace tilekern

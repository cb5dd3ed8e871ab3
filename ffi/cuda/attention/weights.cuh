// Weights of attention and derivatives of scores, computed again from the logsumexp of the scores.
//
// `Functions` has besides those of the forward kernel
//
//   kNumbers                        numbers of a batch and head that derivatives are wanted by
//   kByDifference                   whether there is one of each difference of query and key, too
//   derivative(s, b, h, at, score, slope, partials)
//                                   the score, and its derivatives by s and by these numbers
//   kSlope                          what the derivative by s has to be multiplied by
#pragma once

#include "attention/scores.cuh"

namespace tilekern {

// The logsumexp of a row's scores: a base, and in base 2 the logsumexp of scores less the base.
// Equal scores of -1e9 have a logsumexp that rounds to -1e9, whatever their number is, so their
// weights would be one. Without a base it is zero.
struct RowLogarithm {
  float base, log;
};

// Sets the weights of accumulators j and j + 1: rounded to lhs, or as they are.
template <typename T, int kSteps>
inline void set_weights(uint32 (&weights)[kSteps][4], int j, float first, float second) {
  uint32 pair[1];
  pack_pair(pair, static_cast<T*>(nullptr), first, second);
  weights[j / 8][j / 2 % 4] = pair[0];
}
template <typename T, int kCount>
inline void set_weights(float (&weights)[kCount], int j, float first, float second) {
  weights[j] = first;
  weights[j + 1] = second;
}

// Products in, P times the slope out; P goes to `weights`. A function of an accumulator's
// index gives the RowLogarithm of its row. `use(j, weight, partials)` is called with each weight
// and the derivatives by the numbers. Places beyond the sequences are masked.
template <typename T, class Functions, int kCount, class Weights, class Places, class Bias,
          class Logarithm, class Use>
inline void weigh_again(float (&scores)[kCount], Weights& weights, const AttentionShape& shape,
                        const Functions& functions, int batch, int head, bool masked,
                        const Places& places, Bias& bias, const Logarithm& logarithm,
                        const Use& use) {
  const auto weigh = [&](auto is_masked) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      float both[2];
#pragma unroll
      for (int of = 0; of < 2; ++of) {
        float score = bias.biased(scores[j + of], j + of, shape.scale, Functions::kInner);
        float slope = 1, partials[Functions::kNumbers + 1];
        if constexpr (Functions::kScore) {
          const ScoreIndices at =
              decltype(is_masked)::value ? places.readable(j + of, shape) : places.at(j + of);
          functions.derivative(score, batch, head, at, score, slope, partials);
          slope *= Functions::kSlope;
        }
        const RowLogarithm row = logarithm(j + of);
        float weight =
            exp2_approximate((score - row.base) * (Functions::kOuter * kLog2E) - row.log);
        if constexpr (decltype(is_masked)::value) {
          const ScoreIndices at = places.at(j + of);
          bool visible = at.query < shape.queries && at.key < shape.keys;
          if constexpr (Functions::kMask) visible = visible && functions.visible(batch, head, at);
          weight = visible ? weight : 0;
          slope = visible ? slope : 0;
        }
        use(j + of, weight, partials);
        both[of] = weight;
        scores[j + of] = weight * slope;
      }
      set_weights<T>(weights, j, both[0], both[1]);
    }
  };
  if (masked) {
    weigh(BoolConstant<true>());
  } else {
    weigh(BoolConstant<false>());
  }
}

// Reads an array of statistics at a thread's two rows of accumulators, the first of which is
// `query`; `beyond` is what rows have that are none.
template <typename Statistic>
inline void read_statistics(Statistic (&values)[2], const Statistic* statistics,
                            const AttentionShape& shape, int batch, int head, int query,
                            Statistic beyond) {
  const int padded = (shape.queries + 63) / 64 * 64;
  const Statistic* own = statistics + (static_cast<int64>(batch) * shape.heads + head) * padded;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    values[r] = query + 8 * r < padded ? own[query + 8 * r] : beyond;
  }
}

// The same of logarithms, which are the first statistics: each with its base, if rows have one.
template <bool kBased>
inline void read_logarithms(RowLogarithm (&values)[2], const float* statistics,
                            const AttentionShape& shape, int batch, int head, int query) {
  if constexpr (kBased) {
    float2 found[2];
    read_statistics(found, reinterpret_cast<const float2*>(statistics), shape, batch, head, query,
                    float2{0, INFINITY});
#pragma unroll
    for (int r = 0; r < 2; ++r) values[r] = {found[r].x, found[r].y};
  } else {
    float found[2];
    read_statistics(found, statistics, shape, batch, head, query, INFINITY);
#pragma unroll
    for (int r = 0; r < 2; ++r) values[r] = {0, found[r]};
  }
}

// The `use` of kernels without numbers.
struct Unused {
  void operator()(int, float, const float*) const {}
};

}  // namespace tilekern

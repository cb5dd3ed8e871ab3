// Products of few rows of x with weights of 4 or 8 bits (sm_90a), which have a scale for each group
// of elements along k; `weight_only_matmul.cuh` says what is computed.
//
// Weights are the lhs of warp-level MMAs, and rows of x are the columns of rhs. Each team of warps
// has tiles of 16 rows of weights in turn, and its warps alternate along k. Nothing stands between
// a warp and its weights: each lane loads 16 bytes of a row to registers, where they are converted,
// and then loads those of the next k-tile, which may be of the next tile. Sums of a team's warps
// are added in order.
//
// Both operands have the same elements in the same lanes, and their order along k is free
// (`weight_fragments.cuh`). x lies in shared memory as fragments.
#pragma once

#include "epilogue.cuh"
#include "gemm/sm90/operand.cuh"
#include "gemm/sm90/weight_fragments.cuh"
#include "gemm/sm90/weight_only_tiles.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "vector_loads.cuh"

namespace tilekern {

extern __shared__ __align__(16) unsigned char few_rows_shared[];

// Rows of x in shared memory; warps of a team, and teams of a CTA; CTAs that an SM holds; and
// whether k-tiles are full.
struct FewRowsConfig {
  int rows;
  int warps;
  int teams;
  int ctas;
  bool whole;

  constexpr int team_threads() const { return 32 * warps; }
  constexpr int threads() const { return teams * team_threads(); }
};

inline constexpr int kFewRowsTile = 16;
// Floats of a row of x in the sums of a warp: four rows lie in banks of their own.
inline constexpr int kFewRowsStride = kFewRowsTile + 4;

// Where the results of a thread lie in the output, whose rows are those of x.
template <FewRowsConfig config>
struct FewRowsCoordinates {
  static constexpr int kAdjacentColumns = 1;
  static constexpr bool kConverged = false;
  static constexpr bool kQuads = false;

  int first_column;
  int out;
  const WeightOnlyShape& shape;

  int row(int i) const {
    return (threadIdx.x % config.team_threads() + i * config.team_threads()) / kFewRowsTile;
  }
  int column(int) const { return first_column + threadIdx.x % kFewRowsTile; }
  int rows() const { return shape.m; }
  int columns() const { return shape.n; }
  int batch(int) const { return out; }
};

// kGroup is the number of elements of a k-tile that have the same scale.
template <typename T, typename Scale, typename Zero, typename Weight, FewRowsConfig config,
          int kGroup, bool kZeros>
class WeightOnlyFewRows {
  static constexpr int kBits = kWeightBits<Weight>;
  static constexpr int kBlockK = 8 * kTileRowBytes / kBits;
  static constexpr int kVector = 16;
  // Vectors that a lane loads of a row of a k-tile; elements of one, and of those of a quad.
  static constexpr int kSpans = kTileRowBytes / (4 * kVector);
  static constexpr int kElements = 8 * kVector / kBits;
  static constexpr int kSpan = 4 * kElements;
  static constexpr int kGroups = kBlockK / kGroup;
  static constexpr int kGroupSpans = kSpans / kGroups;
  static_assert(kBlockK % kGroup == 0 && kGroup % kSpan == 0);
  // A vector of x has the elements of so many words of weights, of so many MMA steps each.
  static constexpr int kXElements = 8;
  static constexpr int kXWords = kBits / 4;
  static constexpr int kSteps = 8 / kBits;
  static constexpr int kXVectors = kElements / kXElements;
  static constexpr int kXBytes = 4 * config.rows * kVector;
  static constexpr int kColumnTiles = (config.rows + 7) / 8;
  static constexpr int kSums = 4 * kColumnTiles;
  static constexpr int kPartBytes = config.rows * kFewRowsStride * 4;
  // Results of a tile that a thread of its team has.
  static constexpr int kResults =
      (config.rows * kFewRowsTile + config.team_threads() - 1) / config.team_threads();
  using Floats = WeightPairs<T, Weight, kZeros>;

 public:
  WeightOnlyFewRows(const WeightOnlyShape& shape, int k, const uint8* weights,
                    const WeightScales<Scale, Zero>& numbers)
      : shape_(shape),
        k_(k),
        weights_(weights),
        numbers_(numbers),
        team_(threadIdx.x / config.team_threads()),
        warp_(threadIdx.x / 32 % config.warps),
        quad_(threadIdx.x % 32 / 4),
        lane_(threadIdx.x % 4),
        // Not a constant, which ptxas would move to a register before each use.
        mask_(shape.m < 0 ? 0 : Floats::kMask),
        x_(shared_address(few_rows_shared)),
        parts_(x_ + shape.k_tiles * kSpans * kXVectors * kXBytes +
               2 * team_ * config.warps * kPartBytes) {}

  template <typename Out, class Epilogue>
  void run(const T* x, Out* out, const Epilogue& epilogue) {
    const int first = team_ * gridDim.x + blockIdx.x;
    begin_loads(first);
#pragma unroll
    for (int span = 0; span < kSpans; ++span) load(span);
    advance_loads();
    order(x + static_cast<int64>(blockIdx.y) * shape_.x_step * shape_.m * k_);
    __syncthreads();
    uint32 parts = parts_;
    for (int tile = first; tile < tiles(); tile += config.teams * gridDim.x) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) result_[i] = 0;
      for (int k_tile = warp_; k_tile < shape_.k_tiles; k_tile += config.warps) multiply(k_tile);
      finish(tile, parts, out, epilogue);
      // Threads may still read those of this tile.
      parts = parts == parts_ ? parts_ + config.warps * kPartBytes : parts_;
    }
  }

 private:
  int tiles() const { return (shape_.n + kFewRowsTile - 1) / kFewRowsTile; }

  // Loads are a k-tile of the warp ahead.
  void begin_loads(int tile) {
    next_tile_ = warp_ < shape_.k_tiles ? tile : tiles();
    next_k_tile_ = warp_;
    const int matrix = blockIdx.y * shape_.weights_step;
    const int row_bytes = k_ / kElements * kVector;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min_of(tile * kFewRowsTile + quad_ + 8 * half, shape_.n - 1);
      const int block = shape_.row_block == 1 ? row : row / shape_.row_block;
      from_[half] = weights_ + (static_cast<int64>(matrix) * shape_.n + row) * row_bytes +
                    warp_ * kTileRowBytes + lane_ * kVector;
      first_[half] = (matrix * shape_.row_blocks + block) * shape_.groups;
    }
  }

  void advance_loads() {
    next_k_tile_ += config.warps;
#pragma unroll
    for (int half = 0; half < 2; ++half) from_[half] += config.warps * kTileRowBytes;
    if (next_k_tile_ >= shape_.k_tiles) begin_loads(next_tile_ + config.teams * gridDim.x);
  }

  // Loads the vectors of a span, and the numbers of a group that begins with it.
  void load(int span) {
    if (next_tile_ >= tiles()) return;
    const int first = next_k_tile_ * kTileRowBytes + span * 4 * kVector + lane_ * kVector;
    const bool inside = config.whole || first < k_ / kElements * kVector;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!config.whole) words_[half][span] = {};
      if (inside) words_[half][span] = load_once<kVector>(from_[half] + span * 4 * kVector);
    }
    if (span % kGroupSpans > 0) return;
    const int group = span / kGroupSpans;
    const bool own_group = kGroups > 1 || shape_.group == kGroup;
    const int own =
        own_group ? next_k_tile_ * kGroups + group : next_k_tile_ * kGroup / shape_.group;
    const int at = config.whole ? own : min_of(own, shape_.groups - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors_[half][group] = numbers_.scales[first_[half] + at];
      if constexpr (kZeros) offsets_[half][group] = numbers_.zeros[first_[half] + at];
    }
  }

  // Writes rows of x as fragments: rows behind the last one have its elements, and elements behind
  // those of a row are zeros.
  void order(const T* x) const {
    const int row_vectors = shape_.k_tiles * kSpans * kXVectors * 4;
    for (int at = threadIdx.x; at < config.rows * row_vectors; at += config.threads()) {
      const int row = at / row_vectors, of_row = at % row_vectors;
      const int lane = of_row % 4, vector = of_row / 4;
      const int element =
          (vector / kXVectors * 4 + lane) * kElements + vector % kXVectors * kXElements;
      Bits<kVector> loaded = {};
      if (config.whole || element < k_) {
        loaded =
            load_reused<kVector>(x + static_cast<int64>(min_of(row, shape_.m - 1)) * k_ + element);
      }
      uint32 words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Elements of a pair are 2 * kSteps apart.
        const int left = i / kSteps * 2 * kSteps + i % kSteps;
        words[2 * i] = permute_bytes(loaded.words[left], loaded.words[left + kSteps], 0x5410);
        words[2 * i + 1] = permute_bytes(loaded.words[left], loaded.words[left + kSteps], 0x7632);
      }
      store_shared(x_ + vector * kXBytes + (row * 4 + lane) * kVector, words);
    }
  }

  void multiply(int k_tile) {
    const int row = min_of(quad_, config.rows - 1);
    const uint32 x = x_ + k_tile * kSpans * kXVectors * kXBytes + (row * 4 + lane_) * kVector;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      Floats floats[2];
      float factors[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors[half] = to_float(factors_[half][group]);
        if constexpr (kZeros) floats[half] = Floats(to_float(offsets_[half][group]));
      }
      float sums[kColumnTiles][4] = {};
#pragma unroll
      for (int span = group * kGroupSpans; span < (group + 1) * kGroupSpans; ++span) {
#pragma unroll
        for (int i = 0; i < kXVectors; ++i) {
          multiply(sums, floats, span, i, x + (span * kXVectors + i) * kXBytes);
        }
        load(span);
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) result_[i] += sums[i / 4][i % 4] * factors[i / 2 % 2];
    }
    advance_loads();
  }

  // Multiplies the words of a span by a vector of x.
  void multiply(float (&sums)[kColumnTiles][4], const Floats (&floats)[2], int span, int vector,
                uint32 x) const {
    uint32 rhs[kColumnTiles][4];
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) load_shared(rhs[c], x + c * 32 * kVector);
#pragma unroll
    for (int word = 0; word < kXWords; ++word) {
      uint32 pairs[2][2 * kSteps];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        floats[half](pairs[half], words_[half][span].words[vector * kXWords + word], mask_);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32 low[2] = {pairs[0][2 * step], pairs[0][2 * step + 1]};
        const uint32 high[2] = {pairs[1][2 * step], pairs[1][2 * step + 1]};
        const int first = 2 * (word * kSteps + step);
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) {
          const uint32 own[2] = {rhs[c][first], rhs[c][first + 1]};
          Mma<T, T>::run(sums[c], low, high, own);
        }
      }
    }
  }

  // Adds the sums of the warps, and stores the results of a tile.
  template <typename Out, class Epilogue>
  void finish(int tile, uint32 parts, Out* out, const Epilogue& epilogue) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int row = i / 4 * 8 + lane_ * 2 + i % 2, column = i / 2 % 2 * 8 + quad_;
      if (row >= config.rows) continue;
      store_shared(parts + warp_ * kPartBytes + (row * kFewRowsStride + column) * 4, result_[i]);
    }
    sync_team();
    const FewRowsCoordinates<config> at = {tile * kFewRowsTile, static_cast<int>(blockIdx.y),
                                           shape_};
    if (at.row(0) >= shape_.m) return;
    float results[kResults];
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      const uint32 own =
          parts + (min_of(at.row(i), config.rows - 1) * kFewRowsStride + threadIdx.x % 16) * 4;
      results[i] = 0;
#pragma unroll
      for (int warp = 0; warp < config.warps; ++warp) {
        results[i] += load_shared_as<float>(own + warp * kPartBytes);
      }
    }
    epilogue(results, at);
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      if (at.row(i) >= shape_.m || at.column(i) >= shape_.n) continue;
      const int64 row = static_cast<int64>(blockIdx.y) * shape_.m + at.row(i);
      out[row * shape_.columns + at.column(i)] = from_float<Out>(results[i]);
    }
  }

  void sync_team() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team_), "n"(config.team_threads()) : "memory");
  }

  const WeightOnlyShape& shape_;
  int k_;
  const uint8* weights_;
  WeightScales<Scale, Zero> numbers_;
  int team_, warp_, quad_, lane_;
  uint32 mask_;
  // Fragments of x, and twice the sums of the warps.
  uint32 x_, parts_;
  // What is loaded next: of rows quad and 8 + quad of a tile.
  int next_tile_, next_k_tile_;
  const uint8* from_[2];
  int first_[2];
  Bits<kVector> words_[2][kSpans];
  Scale factors_[2][kGroups];
  Zero offsets_[2][kGroups];
  float result_[kSums];
};

template <typename T, typename Scale, typename Zero, typename Out, typename Weight,
          FewRowsConfig config, int kGroup, bool kZeros, class Epilogue = IdentityEpilogue,
          typename... Operands>
__global__ void __launch_bounds__(config.threads(), config.ctas)
    weight_only_few_rows(const uint8* weights, const T* x, const Scale* scales, const Zero* zeros,
                         Out* out, const __grid_constant__ WeightOnlyShape shape, int k,
                         Operands... operands) {
  const WeightScales<Scale, Zero> numbers = {scales, zeros};
  WeightOnlyFewRows<T, Scale, Zero, Weight, config, kGroup, kZeros>(shape, k, weights, numbers)
      .run(x, out, Epilogue{operands...});
}

}  // namespace tilekern

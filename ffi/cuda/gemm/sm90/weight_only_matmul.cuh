// Products with weights of 4 or 8 bits, which have a scale for each group of elements along k
// (sm_90a):
//
//   out[m][n] = sum over groups of scale[n][group] *
//               (sum over the group's k of (weights[n][k] - zero[n][group]) * x[m][k])
//
// where zero points are optional, and rows of weights may share scales and zero points.
//
// MMAs compute the transpose: weights are lhs and pass through registers, where they become
// integers in 16-bit floats, and rows of x are columns. Scales multiply the sums of a group in
// float32. One thread of a warp of its own loads the k-tiles of a CTA by TMA. A k-tile has
// 128 bytes of each row of weights. Cooperative consumers have 64 rows of weights each, and others
// alternate k-tiles of the same rows. Rows of x have the order along k that fragments of weights
// have, which `fragment_order.cuh` gives them.
#pragma once

#include "epilogue.cuh"
#include "gemm/sm90/config.cuh"
#include "gemm/sm90/operand.cuh"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/weight_fragments.cuh"
#include "gemm/sm90/weight_only_tiles.cuh"
#include "ptx.cuh"

namespace tilekern {

extern __shared__ __align__(1024) unsigned char weight_only_shared[];

// Whether consumers take registers of the producer's warpgroup, of which one warp is enough
// otherwise.
inline constexpr bool weight_only_takes_registers(const WgmmaConfig& config) {
  return config.block_n > 32;
}

inline constexpr int weight_only_threads(const WgmmaConfig& config) {
  return 128 * config.consumers + (weight_only_takes_registers(config) ? 128 : 32);
}

// Where the sums of a thread lie in the output, whose rows are tokens and whose columns are rows of
// weights.
struct WeightOnlyCoordinates {
  static constexpr int kAdjacentColumns = 1;
  static constexpr bool kConverged = false;
  static constexpr bool kQuads = false;

  // Those of the first one.
  int first_row;
  int first_column;
  const WeightOnlyTile& tile;
  const WeightOnlyShape& shape;

  int row(int i) const { return first_row + i / 4 * 8 + (i & 1); }
  int column(int i) const { return first_column + (i >> 1 & 1) * 8; }
  int rows() const { return tile.end; }
  int columns() const { return shape.n; }
  int batch(int) const { return tile.out; }
};

// kGroup is the number of elements of a k-tile that have the same scale.
template <typename T, typename Scale, typename Zero, typename Out, typename Weight,
          WgmmaConfig config, int kGroup, bool kZeros, class Tiles>
class WeightOnlyMatmul {
  static constexpr int kChunk = 64;
  static constexpr int kChunks = config.block_k / kChunk;
  static constexpr int kStep = 16;
  using XChunk = OperandTile<T, true, config.block_n, kChunk>;
  static constexpr int kWeightBytes = config.block_m * kTileRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kChunks * XChunk::kBytes;
  using Pipeline = MainloopPipeline<config, kStageBytes, 0>;
  using Fragments = WeightFragments<T, Weight, kZeros>;
  using Floats = typename Fragments::Floats;
  using Types = WgmmaTypes<T, T>;
  // Groups of a k-tile.
  static constexpr int kGroups = config.block_k / kGroup;
  // MMA steps of a batch of MMAs, and batches of a group and of a k-tile.
  static constexpr int kSteps = min_of(kChunk, kGroup) / kStep;
  static constexpr int kBatches = kGroup / (kSteps * kStep);
  static constexpr int kTileBatches = kGroups * kBatches;
  static_assert(kTileBatches % 2 == 0);
  static constexpr int kCount = config.block_n / 2;
  // Groups whose sums have registers beside the result.
  static constexpr int kSums = kCount > 32 ? 1 : 2;
  // Scales of few groups are loaded a k-tile ahead.
  static constexpr bool kAhead = kGroups <= 2;
  static constexpr bool kTakesRegisters = weight_only_takes_registers(config);
  static_assert(config.block_k * kWeightBits<Weight> == 8 * kTileRowBytes &&
                config.block_k % kGroup == 0);
  // Whether the first fragments of a k-tile are converted while the MMAs of the one before run.
  // That holds its stage until the next one is full, and others of an SM hide the conversion, too.
  static constexpr bool kBeginsEarly = config.cooperative;
  static constexpr int kKConsumers = config.consumers / config.tile_consumers();
  // Each has stages of its own. In a stage of the other one, whose k-tile had not come in yet, the
  // wait for the next phase would end at once, as parities tell only neighbouring phases apart.
  static_assert(config.stages % kKConsumers == 0);
  static constexpr int kResultsBytes = (kKConsumers - 1) * kCount * 128 * 4;
  static_assert(config.consumer_m() == 64);
  // Which consumer has which k-tiles of a later tile depends on its place: two sums commute.
  static_assert(!Tiles::kMany || kKConsumers <= 2);

 public:
  using Scales = WeightScales<Scale, Zero>;

  WeightOnlyMatmul(const WeightOnlyShape& shape, const Tiles& tiles, const Scales& first,
                   const Scales& second, Out* out)
      : shape_(shape),
        tiles_(tiles),
        first_(first),
        second_(second),
        out_(out),
        stages_(shared_address(weight_only_shared)),
        pipeline_(stages_, stages_, stages_ + Pipeline::kStagesBytes),
        results_(stages_ + Pipeline::kStagesBytes + Pipeline::kBarriersBytes) {}

  template <class Epilogue>
  void run(const TensorMap& weights, const TensorMap& second, const TensorMap& x,
           const Epilogue& epilogue) {
    launch_dependents();
    if (threadIdx.x == 0) {
      prefetch_tensor_map(weights);
      if constexpr (Tiles::kMany) prefetch_tensor_map(second);
      prefetch_tensor_map(x);
      pipeline_.init();
      fence_barrier_init();
    }
    tiles_.prepare(weight_only_shared + Pipeline::kStagesBytes + Pipeline::kBarriersBytes +
                   kResultsBytes);
    __syncthreads();
    if (threadIdx.x / 128 < config.consumers) {
      if constexpr (kTakesRegisters) warpgroup_reg_alloc<232>();
      consume(epilogue);
    } else {
      if constexpr (kTakesRegisters) warpgroup_reg_dealloc<40>();
      if (threadIdx.x % 128 == 0) produce(weights, second, x);
    }
  }

 private:
  // Weights do not depend on the launch before, which orders rows of x.
  void produce(const TensorMap& weights, const TensorMap& second, const TensorMap& x) const {
    WeightOnlyTile tile;
    typename Pipeline::State state;
    for (int number = 0; tiles_.find(number, tile); ++number) {
      const int early = number > 0 ? 0 : min_of(config.stages, tile.k_tiles);
      for (int i = 0; i < early; ++i) load_weights(weights, second, tile, i, i);
      if (number == 0) wait_for_prerequisites();
      for (int i = 0; i < tile.k_tiles; ++i, state.advance()) {
        if (i >= early) {
          pipeline_.wait_empty(state);
          load_weights(weights, second, tile, i, state.stage);
        }
        tma_load(pipeline_.stage(state.stage) + kWeightBytes, x,
                 {{0, tile.token, (tile.first_k_tile + i) * kChunks, tile.x, 0}},
                 pipeline_.full(state.stage));
      }
    }
  }

  Scales scales_of(const WeightOnlyTile& tile) const {
    return Tiles::kMany && tile.second ? second_ : first_;
  }

  // The first scale of a row of the tile, or of the last row of weights.
  int64 first_group(const WeightOnlyTile& tile, int row) const {
    const int block = min_of(tile.row + row, shape_.n - 1) / shape_.row_block;
    return (static_cast<int64>(tile.weights) * shape_.row_blocks + block) * shape_.groups;
  }

  // The barrier of the stage counts the bytes of x, too.
  void load_weights(const TensorMap& weights, const TensorMap& second, const WeightOnlyTile& tile,
                    int k_tile, int stage) const {
    const uint32 full = pipeline_.full(stage), to = pipeline_.stage(stage);
    const TmaCoordinates from = {
        {(tile.first_k_tile + k_tile) * kTileRowBytes, tile.row, tile.weights, 0, 0}};
    mbarrier_arrive_expect_tx(full, kStageBytes);
    if (Tiles::kMany && tile.second) {
      tma_load(to, second, from, full);
    } else {
      tma_load(to, weights, from, full);
    }
  }

  template <class Epilogue>
  void consume(const Epilogue& epilogue) {
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 % (4 * config.tile_consumers()) * 16;
    // Uniform in a warp for the compiler, which so keeps descriptors in uniform registers.
    const int first = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0) % kKConsumers;
    const Fragments fragments(warp_row, lane, shape_.m);
    typename Pipeline::State state;
    state.skip(first);
    WeightOnlyTile tile;
    // The k-tile of the consumer that is next, from the first one of the tile on.
    int own = first;
    for (int number = 0; tiles_.find(number, tile); ++number) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64 first = first_group(tile, warp_row + lane / 4 + 8 * half);
        scales_[half] = scales_of(tile).scales + first;
        zeros_[half] = scales_of(tile).zeros + first;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) result_[i] = 0;
      if (own < tile.k_tiles) {
        load(scales_, loaded_scales_, tile.first_k_tile + own);
        begin_k_tile(fragments, state, tile.first_k_tile + own);
        take_factors(tile.first_k_tile + own + kKConsumers);
      }
      while (own < tile.k_tiles) {
        const int stage = state.stage;
        typename Pipeline::State next = state;
        state.skip(kKConsumers);
        own += kKConsumers;
        // There is none after the last one, which is then begun again.
        if (own < tile.k_tiles) next = state;
        multiply_k_tile(fragments, pipeline_.stage(stage), tile.first_k_tile + own, next);
        pipeline_.release(stage);
        if (!kBeginsEarly && own < tile.k_tiles) {
          begin_k_tile(fragments, state, tile.first_k_tile + own);
        }
      }
      own -= tile.k_tiles;
      if constexpr (kKConsumers > 1) {
        add_results();
        if (first > 0) continue;
      }
      const WeightOnlyCoordinates at = {tile.token + lane % 4 * 2, tile.row + warp_row + lane / 4,
                                        tile, shape_};
      epilogue(result_, at);
      store(at);
    }
  }

  // Loads the numbers of a k-tile's groups. Elements behind the last group are zeros of x.
  template <typename Number>
  void load(const Number* const (&numbers)[2], Number (&loaded)[kGroups][2], int k_tile) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const bool own_group = kGroups > 1 || shape_.group == kGroup;
      const int own = own_group ? k_tile * kGroups + group : k_tile * kGroup / shape_.group;
      const int at = min_of(own, shape_.groups - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) loaded[group][half] = numbers[half][at];
    }
  }

  // Takes the scales that are loaded, and loads those of the k-tile behind the next one.
  void take_factors(int k_tile) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factors_[group][half] = to_float(loaded_scales_[group][half]);
    }
    if constexpr (kAhead) load(scales_, loaded_scales_, k_tile);
  }

  // Waits for a k-tile, and converts its first fragments.
  void begin_k_tile(const Fragments& fragments, const typename Pipeline::State& state, int k_tile) {
    if constexpr (kZeros) load(zeros_, loaded_zeros_, k_tile);
    const uint32 stage = pipeline_.stage(state.stage);
    pipeline_.wait_full(state);
    fragments.template load<kSteps>(integers_, stage, 0);
    convert(fragments, stage, 0);
  }

  // Converts the fragments of a batch, from integers that are loaded, and loads the next ones.
  void convert(const Fragments& fragments, uint32 stage, int batch) {
    Floats floats[2];
    if constexpr (kZeros) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        floats[half] = Floats(to_float(loaded_zeros_[batch / kBatches][half]));
      }
    }
    fragments.template convert<kSteps>(words_[batch % 2], integers_, floats);
    if (batch + 1 < kTileBatches) {
      fragments.template load<kSteps>(integers_, stage, (batch + 1) * kSteps);
    }
  }

  // While the MMAs of a batch run, the fragments of the next one, which may be of the next k-tile,
  // are converted. The sums of a group are added to the result when the first MMAs of the next
  // group run, or before them if there is one set of sums.
  void multiply_k_tile(const Fragments& fragments, uint32 stage, int next_k_tile,
                       const typename Pipeline::State& next) {
    const uint64 x = XChunk::descriptor(stage + kWeightBytes);
#pragma unroll
    for (int batch = 0; batch < kTileBatches; ++batch) {
      const int group = batch / kBatches;
      const bool begins_group = batch % kBatches == 0;
      auto& sums = sums_[group % kSums];
      if (kSums == 1 && group > 0 && begins_group) {
        warpgroup_wait<0>();
        promote(group - 1);
      }
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = batch * kSteps + i;
        const uint64 rhs =
            x + step / 4 * (XChunk::kBytes / kDescriptorUnit) + XChunk::offset(0, step % 4);
        multiply<Types, SignsAndOrders<true, true>>(sums, words_[batch % 2][i], rhs,
                                                    !begins_group || i > 0);
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      if (kSums > 1 && group > 0 && begins_group) promote(group - 1);
      if (batch + 1 < kTileBatches) {
        convert(fragments, stage, batch + 1);
      } else if (kBeginsEarly) {
        begin_k_tile(fragments, next, next_k_tile);
      }
    }
    warpgroup_wait<0>();
    promote(kGroups - 1);
    if constexpr (!kAhead) load(scales_, loaded_scales_, next_k_tile);
    take_factors(next_k_tile + kKConsumers);
  }

  void promote(int group) {
    auto& sums = sums_[group % kSums];
    warpgroup_fence_operand(sums);
#pragma unroll
    for (int i = 0; i < kCount; ++i) result_[i] += sums[i] * factors_[group][i >> 1 & 1];
  }

  // Adds those of the other consumers to the first one's, in order.
  void add_results() {
    const int consumer = threadIdx.x / 128;
    const auto address = [&](int other, int i) {
      return results_ + ((other * kCount + i) * 128 + threadIdx.x % 128) * 4;
    };
    // The first consumer has read those of the tile before.
    if constexpr (Tiles::kMany) sync_consumers();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (consumer > 0) store_shared(address(consumer - 1, i), result_[i]);
    }
    sync_consumers();
    if (consumer > 0) return;
#pragma unroll
    for (int other = 0; other < kKConsumers - 1; ++other) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) result_[i] += load_shared_as<float>(address(other, i));
    }
  }

  static void sync_consumers() {
    asm volatile("bar.sync %0, %1;" ::"r"(1), "n"(128 * config.consumers) : "memory");
  }

  void store(const WeightOnlyCoordinates& at) const {
    const int64 first = static_cast<int64>(at.tile.out) * shape_.m;
    const int first_column = at.tile.second ? shape_.n : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int m = at.row(i), n = at.column(i);
      if (n >= shape_.n || m >= at.rows()) continue;
      out_[(first + m) * shape_.columns + first_column + n] = from_float<Out>(result_[i]);
    }
  }

  const WeightOnlyShape& shape_;
  Tiles tiles_;
  Scales first_, second_;
  // Those of rows row and 8 + row of a consumer's tile.
  const Scale* scales_[2];
  const Zero* zeros_[2];
  Out* out_;
  uint32 stages_;
  Pipeline pipeline_;
  uint32 results_;
  uint32 words_[2][kSteps][4];
  uint32 integers_[kSteps / Fragments::kUnitSteps][2];
  Scale loaded_scales_[kGroups][2];
  Zero loaded_zeros_[kGroups][2];
  float factors_[kGroups][2];
  float sums_[kSums][kCount];
  float result_[kCount];
};

template <typename T, typename Scale, typename Zero, typename Out, typename Weight,
          WgmmaConfig config, int kGroup, bool kZeros, int kCtas, class Epilogue = IdentityEpilogue,
          typename... Operands>
__global__ void __launch_bounds__(weight_only_threads(config), kCtas)
    weight_only_matmul(const __grid_constant__ TensorMap weights,
                       const __grid_constant__ TensorMap x, const Scale* scales, const Zero* zeros,
                       Out* out, const __grid_constant__ WeightOnlyShape shape,
                       Operands... operands) {
  using Tiles = WeightOnlyGrid<config>;
  const WeightScales<Scale, Zero> of_weights = {scales, zeros};
  WeightOnlyMatmul<T, Scale, Zero, Out, Weight, config, kGroup, kZeros, Tiles>(
      shape, Tiles(shape), of_weights, of_weights, out)
      .run(weights, weights, x, Epilogue{operands...});
}

}  // namespace tilekern

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
// alternate k-tiles of the same rows. Rows of x have the order along k that
// fragments of weights have, which `fragment_order.cuh` gives them.
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
template <typename T, typename Scale, typename Zero, typename Out, int kBits, WgmmaConfig config,
          int kGroup, bool kZeros, class Tiles>
class WeightOnlyMatmul {
  static constexpr int kChunk = 64;
  static constexpr int kChunks = config.block_k / kChunk;
  static constexpr int kStep = 16;
  using XChunk = OperandTile<T, true, config.block_n, kChunk>;
  static constexpr int kWeightBytes = config.block_m * kTileRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kChunks * XChunk::kBytes;
  using Pipeline = MainloopPipeline<config, kStageBytes, 0>;
  using Fragments = WeightFragments<T, kBits, kZeros>;
  using Floats = typename Fragments::Floats;
  using Types = WgmmaTypes<T, T>;
  // Groups of a k-tile.
  static constexpr int kGroups = config.block_k / kGroup;
  // MMA steps of a batch of MMAs, and batches of a group.
  static constexpr int kSteps = min_of(kChunk, kGroup) / kStep;
  static constexpr int kBatches = kGroup / (kSteps * kStep);
  static constexpr int kCount = config.block_n / 2;
  // Groups whose sums have registers beside the result.
  static constexpr int kSums = kCount > 32 ? 1 : 2;
  // Scales of few groups are loaded a k-tile ahead.
  static constexpr bool kAhead = kGroups <= 2 && !kZeros;
  static constexpr bool kTakesRegisters = weight_only_takes_registers(config);
  static_assert(config.block_k * kBits == 8 * kTileRowBytes && config.block_k % kGroup == 0);
  static constexpr int kKConsumers = config.consumers / config.tile_consumers();
  static constexpr int kResultsBytes = (kKConsumers - 1) * kCount * 128 * 4;
  static_assert(config.consumer_m() == 64);
  // Which consumer has which k-tiles of a later tile depends on its place: two sums commute.
  static_assert(!Tiles::kMany || kKConsumers <= 2);

 public:
  WeightOnlyMatmul(const WeightOnlyShape& shape, const Tiles& tiles, const Scale* scales,
                   const Zero* zeros, Out* out)
      : shape_(shape),
        tiles_(tiles),
        scales_(scales),
        zeros_(zeros),
        out_(out),
        stages_(shared_address(weight_only_shared)),
        pipeline_(stages_, stages_, stages_ + Pipeline::kStagesBytes),
        results_(stages_ + Pipeline::kStagesBytes + Pipeline::kBarriersBytes) {}

  template <class Epilogue>
  void run(const TensorMap& weights, const TensorMap& x, const Epilogue& epilogue) {
    launch_dependents();
    if (threadIdx.x == 0) {
      prefetch_tensor_map(weights);
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
      if (threadIdx.x % 128 == 0) produce(weights, x);
    }
  }

 private:
  // Weights do not depend on the launch before, which orders rows of x.
  void produce(const TensorMap& weights, const TensorMap& x) const {
    WeightOnlyTile tile;
    typename Pipeline::State state;
    for (int number = 0; tiles_.find(number, tile); ++number) {
      const int early = number > 0 ? 0 : min_of(config.stages, tile.k_tiles);
      for (int i = 0; i < early; ++i) load_weights(weights, tile, i, i);
      if (number == 0) wait_for_prerequisites();
      for (int i = 0; i < tile.k_tiles; ++i, state.advance()) {
        if (i >= early) {
          pipeline_.wait_empty(state);
          load_weights(weights, tile, i, state.stage);
        }
        tma_load(pipeline_.stage(state.stage) + kWeightBytes, x,
                 {{0, tile.token, (tile.first_k_tile + i) * kChunks, tile.x, 0}},
                 pipeline_.full(state.stage));
      }
    }
  }

  // The barrier of the stage counts the bytes of x, too.
  void load_weights(const TensorMap& weights, const WeightOnlyTile& tile, int k_tile,
                    int stage) const {
    const uint32 full = pipeline_.full(stage);
    mbarrier_arrive_expect_tx(full, kStageBytes);
    tma_load(pipeline_.stage(stage), weights,
             {{(tile.first_k_tile + k_tile) * kTileRowBytes, tile.row, tile.weights, 0, 0}}, full);
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
    int next = first;
    for (int number = 0; tiles_.find(number, tile); ++number) {
      const int row = tile.row + warp_row + lane / 4;
      int64 first_group[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64 block = static_cast<int64>(tile.weights) * shape_.row_blocks +
                            min_of(row + 8 * half, shape_.n - 1) / shape_.row_block;
        first_group[half] = block * shape_.groups;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) result_[i] = 0;
      if (kAhead) load_scales(first_group, tile.first_k_tile + next);
      for (; next < tile.k_tiles; next += kKConsumers, state.skip(kKConsumers)) {
        if (!kAhead) load_scales(first_group, tile.first_k_tile + next);
        take_scales();
        if (kAhead) load_scales(first_group, tile.first_k_tile + next + kKConsumers);
        pipeline_.wait_full(state);
        multiply_tile(fragments, pipeline_.stage(state.stage));
        pipeline_.release(state.stage);
      }
      next -= tile.k_tiles;
      if constexpr (kKConsumers > 1) {
        add_results();
        if (first > 0) continue;
      }
      const WeightOnlyCoordinates at = {tile.token + lane % 4 * 2, row, tile, shape_};
      epilogue(result_, at);
      store(at);
    }
  }

  // Elements behind the last group are zeros of x.
  void load_scales(const int64 (&first_group)[2], int k_tile) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const bool own_group = kGroups > 1 || shape_.group == kGroup;
      const int own = own_group ? k_tile * kGroups + group : k_tile * kGroup / shape_.group;
      const int at = min_of(own, shape_.groups - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        loaded_scales_[group][half] = scales_[first_group[half] + at];
        if constexpr (kZeros) loaded_zeros_[group][half] = zeros_[first_group[half] + at];
      }
    }
  }

  void take_scales() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors_[group][half] = to_float(loaded_scales_[group][half]);
        if constexpr (kZeros) floats_[group][half] = Floats(to_float(loaded_zeros_[group][half]));
      }
    }
  }

  // While the MMAs of a batch run, the fragments of the next one are converted, from integers that
  // are loaded before. The sums of a group are added to the result when the first MMAs of the next
  // group run, or before them if there is one set of sums.
  void multiply_tile(const Fragments& fragments, uint32 stage) {
    const uint64 x = XChunk::descriptor(stage + kWeightBytes);
    uint32 words[2][kSteps][4], integers[kSteps / Fragments::kUnitSteps][2];
    fragments.template load<kSteps>(integers, stage, 0);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        const int first_step = (group * kBatches + batch) * kSteps;
        auto& own = words[(group * kBatches + batch) % 2];
        fragments.template convert<kSteps>(own, integers, floats_[group]);
        if (first_step + kSteps < config.block_k / kStep) {
          fragments.template load<kSteps>(integers, stage, first_step + kSteps);
        }
        auto& sums = sums_[group % kSums];
        if (kSums == 1 && group > 0 && batch == 0) {
          warpgroup_wait<0>();
          promote(group - 1);
        }
        warpgroup_fence_operand(sums);
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int step = first_step + i;
          const uint64 rhs =
              x + step / 4 * (XChunk::kBytes / kDescriptorUnit) + XChunk::offset(0, step % 4);
          multiply<Types, SignsAndOrders<true, true>>(sums, own[i], rhs, batch + i > 0);
        }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        if (kSums > 1 && group > 0 && batch == 0) promote(group - 1);
      }
    }
    warpgroup_wait<0>();
    promote(kGroups - 1);
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
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int m = at.row(i), n = at.column(i);
      if (n >= shape_.n || m >= at.rows()) continue;
      out_[(first + m) * shape_.n + n] = from_float<Out>(result_[i]);
    }
  }

  const WeightOnlyShape& shape_;
  Tiles tiles_;
  const Scale* scales_;
  const Zero* zeros_;
  Out* out_;
  uint32 stages_;
  Pipeline pipeline_;
  uint32 results_;
  Scale loaded_scales_[kGroups][2];
  Zero loaded_zeros_[kGroups][2];
  float factors_[kGroups][2];
  Floats floats_[kGroups][2];
  float sums_[kSums][kCount];
  float result_[kCount];
};

template <typename T, typename Scale, typename Zero, typename Out, int kBits, WgmmaConfig config,
          int kGroup, bool kZeros, int kCtas, class Epilogue = IdentityEpilogue,
          typename... Operands>
__global__ void __launch_bounds__(weight_only_threads(config), kCtas)
    weight_only_matmul(const __grid_constant__ TensorMap weights,
                       const __grid_constant__ TensorMap x, const Scale* scales, const Zero* zeros,
                       Out* out, const __grid_constant__ WeightOnlyShape shape,
                       Operands... operands) {
  using Tiles = WeightOnlyGrid<config>;
  WeightOnlyMatmul<T, Scale, Zero, Out, kBits, config, kGroup, kZeros, Tiles>(shape, Tiles(shape),
                                                                              scales, zeros, out)
      .run(weights, x, Epilogue{operands...});
}

}  // namespace tilekern

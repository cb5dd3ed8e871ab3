// The mainloop of a matrix product: one CTA computes one tile of the output.
#pragma once

#include "gemm/sm80/config.cuh"
#include "gemm/sm80/epilogue.cuh"
#include "gemm/sm80/tile_load.cuh"
#include "rasterization.cuh"

namespace tilekern {

extern __shared__ uint4 shared_memory[];

// The work of a CTA: the output tile that starts at first_m, first_n and is clipped at the ends,
// accumulated over k from first_k to end_k. The ends are references, so that kernel parameters are
// read when they are needed and occupy no registers in between.
struct TileRange {
  int first_m;
  int first_n;
  int first_k;
  const int32& end_m;
  const int32& end_n;
  const int32& end_k;
};

// k-tiles pass through a ring of stages in shared memory, filled by cp.async copies that run
// kStages - 1 tiles ahead. Within a tile, an engine multiplies in steps, and loads the registers of
// the next step meanwhile:
//
//   copies      | tile 3              | tile 4              |
//   registers   | 0:1   0:2   0:3 1:0 | 1:1   1:2   1:3 2:0 |     tile:step
//   MMAs        | 0:0   0:1   0:2 0:3 | 1:0   1:1   1:2 1:3 |
//                               ^ barrier: tile 1 has arrived, tile 0 has been read
//
// An engine is the arithmetic of one warp:
//   LhsTile, RhsTile          the layouts of the operands in shared memory
//   kSteps                    MMA k-steps in a k-tile
//   kSlots                    register sets for operands: with 1, loads follow MMAs
//   load<slot>(lhs, rhs, i)   loads the operands of step i to registers
//   multiply<slot>()          adds their product to the accumulators
//   finish_tile()             runs after the last step of a tile
//   Layout                    where a lane's accumulators lie, for WarpCoordinates
//   accumulators()            all of them as one array, for epilogue functors
// and the members that store_output() needs.
template <class Engine, MatmulConfig config, typename Lhs, typename Rhs, typename Out>
class MatmulBlock {
  using LhsTile = typename Engine::LhsTile;
  using RhsTile = typename Engine::RhsTile;
  static constexpr int kStages = config.stages;
  static constexpr int kSlots = Engine::kSlots;
  static constexpr int kSteps = Engine::kSteps;
  static constexpr int kStageBytes = LhsTile::kBytes + RhsTile::kBytes;
  static_assert(kStages >= 2);
  static_assert(kSteps % kSlots == 0, "a tile starts with the first slot of registers");
  static_assert(Staging<Out, Engine::kColumns>::kBytes * (config.threads() / 32) <=
                    kStages * kStageBytes,
                "the epilogue reuses the stages");

 public:
  MatmulBlock(const Lhs* lhs, const Rhs* rhs, const MatmulShape& shape, const TileRange& range)
      : lhs_loader_(lhs + range.first_m * (config.lhs_k_major ? shape.lhs_stride : 1) +
                        range.first_k * (config.lhs_k_major ? 1 : shape.lhs_stride),
                    shape.lhs_stride * static_cast<int>(sizeof(Lhs)), threadIdx.x),
        rhs_loader_(rhs + range.first_n * (config.rhs_k_major ? shape.rhs_stride : 1) +
                        range.first_k * (config.rhs_k_major ? 1 : shape.rhs_stride),
                    shape.rhs_stride * static_cast<int>(sizeof(Rhs)), threadIdx.x),
        rows_(range.end_m - range.first_m),
        columns_(range.end_n - range.first_n),
        k_left_(range.end_k - range.first_k),
        stages_(shared_address(shared_memory)) {}

  void accumulate(Engine& engine) {
    int tiles = (k_left_ + config.block_k - 1) / config.block_k;
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) {
      copy<0, 1>(stage);
      finish_copy();
    }
    cp_async_wait<kStages - 2>();
    __syncthreads();

    int read = 0, write = kStages - 1;
    load<0>(engine, read, 0);
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      run_steps<0>(engine, read, write);
      write = write + 1 == kStages ? 0 : write + 1;
    }
    // The epilogue reuses the stages.
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  template <int kStep>
  void run_steps(Engine& engine, int& read, int write) {
    constexpr bool kLast = kStep == kSteps - 1;
    copy<kStep, kSteps>(write);
    if constexpr (kSlots == 1) engine.template multiply<0>();
    if constexpr (kLast) {
      finish_copy();
      cp_async_wait<kStages - 2>();
      __syncthreads();
      read = read + 1 == kStages ? 0 : read + 1;
    }
    // After the last tile, no MMA uses these registers.
    load<(kStep + 1) % kSlots>(engine, read, (kStep + 1) % kSteps);
    if constexpr (kSlots == 2) engine.template multiply<kStep % 2>();
    if constexpr (kLast) {
      engine.finish_tile();
    } else {
      run_steps<kStep + 1>(engine, read, write);
    }
  }

  template <int kSlot>
  void load(Engine& engine, int stage, int step) {
    const uint32 lhs = stages_ + stage * kStageBytes;
    engine.template load<kSlot>(lhs, lhs + LhsTile::kBytes, step);
  }

  template <int kPart, int kParts>
  void copy(int stage) {
    if (k_left_ <= 0) return;
    const int k = min_of(k_left_, config.block_k);
    const uint32 lhs = stages_ + stage * kStageBytes;
    copy_operand<config.lhs_k_major, Lhs, kPart, kParts>(lhs_loader_, lhs, rows_, k);
    copy_operand<config.rhs_k_major, Rhs, kPart, kParts>(rhs_loader_, lhs + LhsTile::kBytes,
                                                         columns_, k);
  }

  // The part inside the matrix has extent `mn` (rows of lhs or columns of rhs) by `k`.
  template <bool kMajorK, typename T, int kPart, int kParts, class Loader>
  static void copy_operand(Loader& loader, uint32 tile, int mn, int k) {
    constexpr int kTileExtent = Loader::kRowBytes / static_cast<int>(sizeof(T));
    if constexpr (kMajorK) {
      loader.template load<kPart, kParts>(tile, mn, k * static_cast<int>(sizeof(T)));
    } else {
      loader.template load<kPart, kParts>(tile, k,
                                          min_of(mn, kTileExtent) * static_cast<int>(sizeof(T)));
    }
  }

  void finish_copy() {
    cp_async_commit();
    k_left_ -= config.block_k;
    lhs_loader_.template advance<config.lhs_k_major>();
    rhs_loader_.template advance<config.rhs_k_major>();
  }

  TileLoader<LhsTile, config.threads(), config.lhs_load_bytes> lhs_loader_;
  TileLoader<RhsTile, config.threads(), config.rhs_load_bytes> rhs_loader_;
  int rows_;
  int columns_;
  int k_left_;
  uint32 stages_;
};

// Computes one tile of the product of the matrices at `offsets`, which are number `batch`.
template <template <typename, typename, MatmulConfig> class EngineOf, MatmulConfig config,
          typename Lhs, typename Rhs, typename Out, class Epilogue>
inline void compute_tile(const Lhs* lhs, const Rhs* rhs, Out* out, const MatmulShape& shape,
                         const BatchOffsets& offsets, const TileRange& range, int batch,
                         const Epilogue& epilogue) {
  using Engine = EngineOf<Lhs, Rhs, config>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / config.warps_n * config.warp_m();
  const int warp_n = warp % config.warps_n * config.warp_n();

  Engine engine(warp_m, warp_n, lane);
  MatmulBlock<Engine, config, Lhs, Rhs, Out>(lhs + offsets.lhs, rhs + offsets.rhs, shape, range)
      .accumulate(engine);
  epilogue(engine.accumulators(), WarpCoordinates<typename Engine::Layout>{
                                      range.first_m + warp_m, range.first_n + warp_n, range.end_m,
                                      range.end_n, batch, range.end_k > 0});

  const int64 row = range.first_m + warp_m;
  const int column = range.first_n + warp_n;
  const OutputTile<Out> output = {out + offsets.out + row * shape.out_stride + column,
                                  shape.out_stride, range.end_m - range.first_m - warp_m,
                                  range.end_n - column};
  const uint32 staging =
      shared_address(shared_memory) + warp * Staging<Out, Engine::kColumns>::kBytes;
  store_output(engine, output, shape.out_vectors != 0, staging, lane);
}

template <template <typename, typename, MatmulConfig> class EngineOf, MatmulConfig config,
          typename Lhs, typename Rhs, typename Out, class Epilogue>
inline void matmul_tile(const Lhs* lhs, const Rhs* rhs, Out* out, const MatmulShape& shape,
                        const Epilogue& epilogue) {
  const int tiles = shape.tiles_m * shape.tiles_n;
  const BatchOffsets offsets = batch_offsets(shape, blockIdx.x / tiles);
  const TileCoordinates tile =
      rasterized_tile(blockIdx.x % tiles, shape.tiles_m, shape.tiles_n, shape.raster_height);
  compute_tile<EngineOf, config>(
      lhs, rhs, out, shape, offsets,
      {tile.m * config.block_m, tile.n * config.block_n, 0, shape.m, shape.n, shape.k},
      blockIdx.x / tiles, epilogue);
}

}  // namespace tilekern

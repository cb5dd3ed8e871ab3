// Products of small matrices and of odd sizes, mostly in batches, which memory and latency bound.
//
// A CTA computes a tile of one product. It copies all of k to shared memory at once where that
// fits, as rows of any alignment, and lanes gather fragments from there: no operand is packed
// first, and no pipeline is filled. The code is short, because a launch of a few microseconds waits
// for its instructions too.
#pragma once

#include "gemm/small/arithmetic.cuh"

namespace tilekern {

extern __shared__ uint4 shared_memory[];

struct SmallTile {
  int first_m;
  int first_n;
  int64 lhs = 0;
  int64 rhs = 0;
  int64 out = 0;
};

template <SmallMatmulConfig config, SmallMatmulShape shape>
inline SmallTile small_tile() {
  uint32 index = blockIdx.x, tile_m = 0, tile_n = 0;
  if constexpr (shape.tiles_n > 1) {
    tile_n = index % shape.tiles_n;
    index /= shape.tiles_n;
  }
  if constexpr (shape.tiles_m > 1) {
    tile_m = index % shape.tiles_m;
    index /= shape.tiles_m;
  }
  SmallTile tile{static_cast<int>(tile_m) * config.block_m(),
                 static_cast<int>(tile_n) * config.block_n()};
#pragma unroll
  for (int dim = shape.batch_dims - 1; dim >= 0; --dim) {
    int64 position = index;
    if (dim > 0) {
      position = index % shape.batch[dim];
      index /= shape.batch[dim];
    }
    tile.lhs += position * shape.lhs.batch_strides[dim];
    tile.rhs += position * shape.rhs.batch_strides[dim];
    tile.out += position * shape.out.batch_strides[dim];
  }
  return tile;
}

// Adds up the accumulators of the warps that share a part of the tile, in the order of the warps.
// The first of them gets the sum.
template <SmallMatmulConfig config, typename Accumulator, int kCount>
inline void reduce_warps(Accumulator (&accumulators)[kCount], int warp_k, int part, int lane) {
  constexpr int kParts = config.warps_m * config.warps_n;
  auto* partial = reinterpret_cast<Accumulator*>(shared_memory);
  if (warp_k > 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      partial[(((warp_k - 1) * kParts + part) * kCount + i) * 32 + lane] = accumulators[i];
    }
  }
  __syncthreads();
  if (warp_k == 0) {
#pragma unroll 1
    for (int other = 0; other < config.warps_k - 1; ++other) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        accumulators[i] += partial[((other * kParts + part) * kCount + i) * 32 + lane];
      }
    }
  }
  __syncthreads();
}

// Converts two accumulators and writes them to two elements of a row in shared memory, which are
// `distance` columns apart. Those from column `columns` on, counted from the first, are outside.
template <typename Out, typename Accumulator>
inline void stage_pair(uint32 address, Accumulator first, Accumulator second, int distance,
                       int columns) {
  constexpr int kWords = sizeof(Out) / 2;
  uint32 words[kWords];
  pack_pair(words, static_cast<Out*>(nullptr), first, second);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (e * distance >= columns) continue;
    const uint32 target = address + e * distance * static_cast<int>(sizeof(Out));
    if constexpr (sizeof(Out) == 2) {
      store_shared(target, static_cast<uint16>(words[0] >> (16 * e)));
    } else {
      uint32 element[kWords / 2];
#pragma unroll
      for (int w = 0; w < kWords / 2; ++w) element[w] = words[e * (kWords / 2) + w];
      store_shared(target, element);
    }
  }
}

template <typename Lhs, typename Rhs, typename Out, SmallMatmulConfig config,
          SmallMatmulShape shape>
__global__ void __launch_bounds__(config.threads(), 1)
    small_matmul(const char* lhs, const char* rhs, char* out) {
  using Product = Select<config.fma, SmallFma<config, shape>, SmallMma<Lhs, Rhs, config, shape>>;
  constexpr int kThreads = config.threads();
  static_assert((kThreads & (kThreads - 1)) == 0, "rows are shared by powers of two");
  constexpr int kLhsSize = sizeof(Lhs), kRhsSize = sizeof(Rhs), kOutSize = sizeof(Out);
  const SmallTile tile = small_tile<config, shape>();
  const int rows = min_of(config.block_m(), shape.m - tile.first_m);
  const int columns = min_of(config.block_n(), shape.n - tile.first_n);
  lhs += tile.lhs + tile.first_m * (config.lhs.k_major ? shape.lhs.stride : kLhsSize);
  rhs += tile.rhs + tile.first_n * (config.rhs.k_major ? shape.rhs.stride : kRhsSize);
  const uint32 stages = shared_address(shared_memory);

  // Starts the copies of k from `first_k` on.
  const auto load = [&](uint32 stage, int first_k) {
    const int k = min_of(shape.chunk_k, shape.k - first_k);
    if (k > 0) {
      load_rows<kThreads, shape.lhs>(
          stage, lhs + first_k * (config.lhs.k_major ? kLhsSize : shape.lhs.stride),
          config.lhs.k_major ? rows : k, (config.lhs.k_major ? k : rows) * kLhsSize);
      load_rows<kThreads, shape.rhs>(
          stage + shape.lhs_stage_bytes,
          rhs + first_k * (config.rhs.k_major ? kRhsSize : shape.rhs.stride),
          config.rhs.k_major ? columns : k, (config.rhs.k_major ? k : columns) * kRhsSize);
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int s = 0; s < config.stages; ++s) load(stages + s * shape.stage_bytes, s * shape.chunk_k);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = warp / config.warps_k, warp_k = warp % config.warps_k;
  const int warp_m = part / config.warps_n * config.warp_m();
  const int warp_n = part % config.warps_n * config.warp_n();
  const Product product(lhs, rhs, rows, columns, warp_m, warp_n, lane);
  typename Product::Accumulators accumulators = {};

  uint32 stage = stages;
#pragma unroll 1
  for (int first_k = 0; first_k < shape.k; first_k += shape.chunk_k) {
    const int chunk_k = min_of(shape.chunk_k, shape.k - first_k);
    cp_async_wait<config.stages - 1>();
    __syncthreads();
#pragma unroll 1
    for (int k = warp_k * Product::kStep; k < chunk_k; k += config.warps_k * Product::kStep) {
      product.step(accumulators, stage, stage + shape.lhs_stage_bytes, k, chunk_k);
    }
    __syncthreads();
    if constexpr (config.stages > 1) {
      load(stage, first_k + config.stages * shape.chunk_k);
      stage += shape.stage_bytes;
      if (stage == stages + config.stages * shape.stage_bytes) stage = stages;
    }
  }
  cp_async_wait<0>();

  if constexpr (config.warps_k > 1) {
    using Flat = typename Product::Accumulator[config.fragments_m * config.fragments_n * 4];
    reduce_warps<config>(reinterpret_cast<Flat&>(accumulators), warp_k, part, lane);
  }
  char* const first = out + tile.out + tile.first_m * shape.out.stride +
                      static_cast<int64>(tile.first_n) * kOutSize;
  const int phase = shift_of<shape.out>(first);
  constexpr int kRowShift = shape.out.flat ? 0 : shape.out.stride % kVectorBytes;
  if (warp_k == 0) {
#pragma unroll
    for (int i = 0; i < 2 * config.fragments_m; ++i) {
      const int row = warp_m + Product::row(i, lane);
      if (row >= rows) continue;
      const uint32 target =
          stages + row * shape.out.pitch + ((phase + row * kRowShift) & (kVectorBytes - 1));
#pragma unroll
      for (int j = 0; j < config.fragments_n; ++j) {
        const int column = warp_n + Product::column(j, lane);
        const auto& pair = accumulators[i / 2][j];
        stage_pair<Out>(target + column * kOutSize, pair[i % 2 * 2], pair[i % 2 * 2 + 1],
                        Product::column_distance(j), columns - column);
      }
    }
  }
  __syncthreads();
  store_rows<kOutSize, kThreads, shape.out>(stages, first, rows, columns * kOutSize);
}

}  // namespace tilekern

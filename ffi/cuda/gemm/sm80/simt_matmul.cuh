// Matrix products of float32 on CUDA cores, by FFMA instructions.
#pragma once

#include "gemm/sm80/matmul_block.cuh"
#include "ptx.cuh"

namespace tilekern {

// One operand of a warp whose lanes form a grid: kLanes of them are side by side along MN (rows of
// lhs, columns of rhs), and each takes 8 rows of MN by 4 elements of k at a time. Where memory is
// contiguous along MN, a lane reads 4 adjacent elements at once.
template <bool kMajorK, int kBlock, int kBlockK, int kLanes>
class SimtOperand {
  static constexpr int kInterleave = kMajorK ? 1 : 4;
  static constexpr int kRowBytes = (kMajorK ? kBlockK : kBlock) * 4;

 public:
  using Tile = SharedTile<kMajorK ? kBlock : kBlockK, kRowBytes,
                          kMajorK ? swizzle_for_core_matrices(kRowBytes) : kNoSwizzle>;
  using Fragment = float[8][4];

  // The i-th row of MN of a lane, counted from the warp's first.
  static constexpr int mn_index(int i, int lane) {
    return i / kInterleave * (kLanes * kInterleave) + kInterleave * lane + i % kInterleave;
  }

  // `first_mn` is the warp's first row of MN in the tile.
  SimtOperand(int first_mn, int lane) {
    const int mn_of_lane = first_mn + mn_index(0, lane);
    lane_offset_ = kMajorK ? Tile::offset(mn_of_lane, 0) : Tile::offset(0, 4 * mn_of_lane);
  }

  void load(Fragment& fragment, uint32 tile, int step) const {
    if constexpr (kMajorK) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Row kLanes * i has another swizzle where it is not a multiple of 8.
        const int swizzle = kLanes * i % 8 * 16;
        load_shared(fragment[i],
                    tile + (lane_offset_ ^ (16 * step) ^ swizzle) + kLanes * i * kRowBytes);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          float values[4];
          load_shared(values,
                      tile + lane_offset_ + (4 * step + k) * kRowBytes + 4 * mn_index(i, 0));
#pragma unroll
          for (int j = 0; j < 4; ++j) fragment[i + j][k] = values[j];
        }
      }
    }
  }

 private:
  uint32 lane_offset_;
};

template <typename Lhs, typename Rhs, MatmulConfig config>
class SimtEngine {
  // The lanes of a warp are 4 along m by 8 along n. In each half warp, lanes 2i and 2i+1 read the
  // same words of lhs and alternate lanes the same words of rhs, which shared memory broadcasts:
  //
  //     0  1  8  9 16 17 24 25
  //     2  3 10 11 18 19 26 27
  //     4  5 12 13 20 21 28 29
  //     6  7 14 15 22 23 30 31
  static constexpr int lane_m(int lane) { return lane / 2 % 4; }
  static constexpr int lane_n(int lane) { return lane % 2 + lane / 8 * 2; }

  using LhsOperand = SimtOperand<config.lhs_k_major, config.block_m, config.block_k, 4>;
  using RhsOperand = SimtOperand<config.rhs_k_major, config.block_n, config.block_k, 8>;
  static_assert(kSame<Lhs, float> && kSame<Rhs, float>);
  static_assert(config.warp_m() == 32 && config.warp_n() == 64);

 public:
  using LhsTile = typename LhsOperand::Tile;
  using RhsTile = typename RhsOperand::Tile;
  static constexpr int kSlots = 2;
  static constexpr int kSteps = config.block_k / 4;
  static constexpr int kRows = config.warp_m();
  static constexpr int kColumns = config.warp_n();

  struct Layout {
    static constexpr int row(int lane, int i) { return LhsOperand::mn_index(i / 8, lane_m(lane)); }
    static constexpr int column(int lane, int i) {
      return RhsOperand::mn_index(i % 8, lane_n(lane));
    }
  };

  SimtEngine(int warp_m, int warp_n, int lane)
      : lhs_(warp_m, lane_m(lane)), rhs_(warp_n, lane_n(lane)) {}

  template <int kSlot>
  void load(uint32 lhs_tile, uint32 rhs_tile, int step) {
    lhs_.load(lhs_fragments_[kSlot], lhs_tile, step);
    rhs_.load(rhs_fragments_[kSlot], rhs_tile, step);
  }

  template <int kSlot>
  void multiply() {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          accumulators_[i][j] += lhs_fragments_[kSlot][i][k] * rhs_fragments_[kSlot][j][k];
        }
      }
    }
  }

  void finish_tile() {}

  auto& accumulators() { return reinterpret_cast<float (&)[64]>(accumulators_); }

  // A subtile holds four of each lane's rows.
  static constexpr int subtile_row(int subtile, int staged_row) {
    return LhsOperand::mn_index(4 * subtile + staged_row / 4, staged_row % 4);
  }

  template <typename Out>
  void stage_subtile(int subtile, uint32 staging, int pitch, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32 word[1] = {__float_as_uint(accumulators_[4 * subtile + i][j])};
        const int column = RhsOperand::mn_index(j, lane_n(lane));
        store_shared(staging + (4 * i + lane_m(lane)) * pitch + 4 * column, word);
      }
    }
  }

 private:
  LhsOperand lhs_;
  RhsOperand rhs_;
  typename LhsOperand::Fragment lhs_fragments_[kSlots];
  typename RhsOperand::Fragment rhs_fragments_[kSlots];
  float accumulators_[8][8] = {};
};

template <typename Lhs, typename Rhs, typename Out, MatmulConfig config,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), config.min_blocks)
    simt_matmul(const Lhs* lhs, const Rhs* rhs, Out* out, const __grid_constant__ MatmulShape shape,
                Operands... operands) {
  matmul_tile<SimtEngine, config>(lhs, rhs, out, shape, Epilogue{operands...});
}

// The same kernel, which does nothing unless `use_float32` is set.
template <MatmulConfig config, class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), config.min_blocks)
    simt_matmul_if(const int32* use_float32, const float* lhs, const float* rhs, float* out,
                   const __grid_constant__ MatmulShape shape, Operands... operands) {
  wait_for_prerequisites();
  if (*use_float32) {
    matmul_tile<SimtEngine, config>(lhs, rhs, out, shape, Epilogue{operands...});
  }
}

}  // namespace tilekern

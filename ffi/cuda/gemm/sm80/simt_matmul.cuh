// Matrix products of float32 with float32's own multiplications and additions.
#pragma once

#include "gemm/sm80/matmul_block.cuh"

namespace tilekern {

// One operand of a warp whose lanes form a grid: kLanes of them are side by side along this
// operand's lines (rows of lhs, columns of rhs), and each takes 8 lines, 4 elements of k at a time.
// Where memory has lines side by side, a lane reads 4 adjacent ones at once.
template <bool kMajorK, int kBlock, int kBlockK, int kLanes>
class SimtOperand {
  static constexpr int kInterleave = kMajorK ? 1 : 4;
  static constexpr int kRowBytes = (kMajorK ? kBlockK : kBlock) * 4;

 public:
  using Tile = SharedTile<kMajorK ? kBlock : kBlockK, kRowBytes,
                          kMajorK ? swizzle_for_row_octets(kRowBytes) : kNoSwizzle>;
  using Fragment = float[8][4];

  // Line i of lane `lane`, counted from the warp's first.
  static constexpr int line(int i, int lane) {
    return i / kInterleave * (kLanes * kInterleave) + kInterleave * lane + i % kInterleave;
  }

  // `first_line` is the warp's first line in the tile.
  SimtOperand(int first_line, int lane) {
    const int line_of_lane = first_line + line(0, lane);
    lane_offset_ = kMajorK ? Tile::offset(line_of_lane, 0) : Tile::offset(0, 4 * line_of_lane);
  }

  void load(Fragment& fragment, uint32 tile, int step) const {
    if constexpr (kMajorK) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Line kLanes * i of the lane, whose swizzle differs where that is not a multiple of 8.
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
          load_shared(values, tile + lane_offset_ + (4 * step + k) * kRowBytes + 4 * line(i, 0));
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
  // Lanes of a warp: 4 along m by 8 along n, arranged so that in each half warp neighbours read
  // the same words of lhs, and neighbours' neighbours of rhs, which shared memory serves at once:
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
    static constexpr int row(int lane, int i) { return LhsOperand::line(i / 8, lane_m(lane)); }
    static constexpr int column(int lane, int i) { return RhsOperand::line(i % 8, lane_n(lane)); }
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
          sums_[i][j] += lhs_fragments_[kSlot][i][k] * rhs_fragments_[kSlot][j][k];
        }
      }
    }
  }

  void finish_tile() {}

  auto& accumulators() { return reinterpret_cast<float (&)[64]>(sums_); }

  // A slab holds four of each lane's rows.
  static constexpr int slab_row(int slab, int staged_row) {
    return LhsOperand::line(4 * slab + staged_row / 4, staged_row % 4);
  }

  template <typename Out>
  void write_slab(int slab, uint32 staging, int pitch, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32 word[1] = {__float_as_uint(sums_[4 * slab + i][j])};
        const int column = RhsOperand::line(j, lane_n(lane));
        store_shared(staging + (4 * i + lane_m(lane)) * pitch + 4 * column, word);
      }
    }
  }

 private:
  LhsOperand lhs_;
  RhsOperand rhs_;
  typename LhsOperand::Fragment lhs_fragments_[kSlots];
  typename RhsOperand::Fragment rhs_fragments_[kSlots];
  float sums_[8][8] = {};
};

template <typename Lhs, typename Rhs, typename Out, MatmulConfig config,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), config.min_blocks)
    simt_matmul(const Lhs* lhs, const Rhs* rhs, Out* out, const __grid_constant__ MatmulShape shape,
                Operands... operands) {
  matmul_tile<SimtEngine, config>(lhs, rhs, out, shape, Epilogue{operands...});
}

// The same where `use_float32` says so, and nothing otherwise.
template <MatmulConfig config, class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), config.min_blocks)
    simt_matmul_if(const int32* use_float32, const float* lhs, const float* rhs, float* out,
                   const __grid_constant__ MatmulShape shape, Operands... operands) {
  if (*use_float32) {
    matmul_tile<SimtEngine, config>(lhs, rhs, out, shape, Epilogue{operands...});
  }
}

}  // namespace tilekern

// Matrix products on the tensor cores by mma.sync, for sm_80 and later (8-bit floats: sm_89).
#pragma once

#include "gemm/sm80/matmul_block.cuh"
#include "gemm/sm80/mma_operand.cuh"
#include "mma.cuh"

namespace tilekern {

template <typename Lhs, typename Rhs, MatmulConfig config>
class MmaEngine {
  using LhsOperand =
      MmaOperand<Lhs, true, config.lhs_k_major, config.block_m, config.block_k, config.warp_m()>;
  using RhsOperand =
      MmaOperand<Rhs, false, config.rhs_k_major, config.block_n, config.block_k, config.warp_n()>;
  using Product = Select<config.widen, Mma<float16, float16>, Mma<Lhs, Rhs>>;
  using Accumulator = typename Product::Accumulator;

 public:
  using LhsTile = typename LhsOperand::Tile;
  using RhsTile = typename RhsOperand::Tile;
  // Fragments of float64 take twice the registers, and its MMAs are slow enough to hide loads.
  static constexpr int kSlots = sizeof(Lhs) == 8 ? 1 : 2;
  static constexpr int kSteps = config.block_k / LhsOperand::kStep;
  static constexpr int kRows = config.warp_m();
  static constexpr int kColumns = config.warp_n();

  // Accumulator 4j + 2h + e of 16 rows is that of row g of 8-row core matrix h, and of column 2t +
  // e of core matrix j, with lane = 4g + t.
  struct Layout {
    static constexpr int kRowBlock = kColumns / 2;

    static constexpr int row(int lane, int i) {
      return LhsOperand::mn_index(2 * (i / kRowBlock) + i / 2 % 2, lane / 4);
    }
    static constexpr int column(int lane, int i) {
      return RhsOperand::mn_index(i % kRowBlock / 4, lane % 4 * 2 + i % 2);
    }
  };

  MmaEngine(int warp_m, int warp_n, int lane) : lhs_(warp_m, lane), rhs_(warp_n, lane) {}

  template <int kSlot>
  void load(uint32 lhs_tile, uint32 rhs_tile, int step) {
    lhs_.load(lhs_fragments_[kSlot], lhs_tile, step);
    rhs_.load(rhs_fragments_[kSlot], rhs_tile, step);
  }

  template <int kSlot>
  void multiply() {
    auto& lhs = lhs_fragments_[kSlot];
    auto& rhs = rhs_fragments_[kSlot];
    LhsOperand::prepare(lhs);
    RhsOperand::prepare(rhs);
    if constexpr (config.widen) {
      multiply_widened<0>(lhs, rhs);
      multiply_widened<1>(lhs, rhs);
    } else {
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          // Columns alternate in direction, so that consecutive MMAs share an operand.
          const int column = i % 2 == 0 ? j : kColumns / 8 - 1 - j;
          Product::run(accumulators_[i][column], lhs[2 * i], lhs[2 * i + 1], rhs[column]);
        }
      }
    }
  }

  void finish_tile() {
    if constexpr (config.promote) {
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            promoted_[i][j][e] += accumulators_[i][j][e];
            accumulators_[i][j][e] = 0;
          }
        }
      }
    }
  }

  auto& accumulators() {
    using Flat = Accumulator[kRows / 16 * (kColumns / 8) * 4];
    return reinterpret_cast<Flat&>(config.promote ? promoted_ : accumulators_);
  }

  // Staged row 8 * half + g of a subtile is row g of core matrix `half`.
  static constexpr int subtile_row(int subtile, int staged_row) {
    return LhsOperand::mn_index(2 * subtile + staged_row / 8, staged_row % 8);
  }

  // A lane's columns 2t and 2t+1 of kInterleave core matrices are 2 * kInterleave adjacent columns.
  template <typename Out>
  void stage_subtile(int subtile, uint32 staging, int pitch, int lane) const {
    constexpr int kInterleave = RhsOperand::kInterleave;
    const auto& accumulators = config.promote ? promoted_ : accumulators_;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int core = 0; core < kColumns / 8; core += kInterleave) {
        Accumulator run[2 * kInterleave];
#pragma unroll
        for (int i = 0; i < kInterleave; ++i) {
          run[i] = accumulators[subtile][core + i][2 * half];
          run[kInterleave + i] = accumulators[subtile][core + i][2 * half + 1];
        }
        const int column = RhsOperand::mn_index(core, 2 * t);
        stage_run<Out>(staging + (8 * half + g) * pitch + column * static_cast<int>(sizeof(Out)),
                       run);
      }
    }
  }

 private:
  // Half a step of 8-bit floats is a whole step of float16. Its order of k is 4t, 4t+1 and 4t+2,
  // 4t+3 where the MMA expects 2t, 2t+1 and 8+2t, 8+2t+1; both operands agree, so the sum is the
  // same.
  template <int kHalf, typename LhsFragment, typename RhsFragment>
  void multiply_widened(const LhsFragment& lhs, const RhsFragment& rhs) {
    uint32 columns[kColumns / 8][2];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      widen(columns[j], static_cast<Rhs*>(nullptr), rhs[j][kHalf]);
    }
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      uint32 low[2], high[2];
      widen(low, static_cast<Lhs*>(nullptr), lhs[2 * i][kHalf]);
      widen(high, static_cast<Lhs*>(nullptr), lhs[2 * i + 1][kHalf]);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        Product::run(accumulators_[i][j], low, high, columns[j]);
    }
  }

  using Accumulators = Accumulator[kRows / 16][kColumns / 8][4];

  LhsOperand lhs_;
  RhsOperand rhs_;
  typename LhsOperand::Fragment lhs_fragments_[kSlots];
  typename RhsOperand::Fragment rhs_fragments_[kSlots];
  Accumulators accumulators_ = {};
  Accumulators promoted_ = {};
};

template <typename Lhs, typename Rhs, typename Out, MatmulConfig config,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), config.min_blocks)
    mma_matmul(const Lhs* lhs, const Rhs* rhs, Out* out, const __grid_constant__ MatmulShape shape,
               Operands... operands) {
  matmul_tile<MmaEngine, config>(lhs, rhs, out, shape, Epilogue{operands...});
}

}  // namespace tilekern

// How a consumer multiplies a k-tile: the MMA policy, its concept and its parts.
//
// An MMA policy holds the accumulators of one consumer, kRowBlocks blocks of 64 rows by the output
// tile's columns. Each of its functions is called by all threads of the consumer. It provides
//
//   Accumulator                    the accumulators' type
//   result()                       the accumulators of a finished work tile, for the epilogue
//   Coordinates, coordinates(i, work, shape, column_end, is_group)
//                                  where those of row block i belong in the output (epilogue.cuh)
//   kInPlace                       whether MMAs add to result() itself; the first MMA of a work
//                                  tile may then overwrite it
//   Params, Mma(params, row, warp_row)
//                                  what the kernel passes to it; the consumer's first row in the
//                                  tile, and the warp's
//   void clear()                   before a work tile, where MMAs add to what they find
//   void start(scheduler)          before the first k-tile of a work tile
//   kFragmentSets                  sets of registers for operands that pass through registers: MMAs
//                                  of a k-tile read one set while the next is loaded
//   kRetireEachTile                whether MMAs of a k-tile have to retire before the next k-tile
//   kResultsMayWait                whether results of two bytes have registers while the next work
//                                  tile's MMAs run (store.cuh)
//   load<kSet>(stage)              operand fragments of the k-tile in a stage, if there are any
//   issue<kSet, kColumns, kFirstStep>(stage, accumulate)
//                                  the k-tile's MMAs, which run asynchronously, as one batch: of
//                                  the first kColumns columns, from MMA step kFirstStep on. Unless
//                                  `accumulate`, the first ones overwrite the accumulators
//   retire(stage, scales)          waits for all MMAs. The accumulators may be used, and so may
//                                  the scales of the stage of the last batch, at this address
//   kScaleBytes                    room for scales in a stage, 0 if no thread reads any. Otherwise
//                                  the producer thread calls
//   loaded_bytes(params, work)     how many of them are loaded
//   load_scales(to, params, work, k_tile, full)
//                                  starts to load them to a stage whose full barrier is `full`
//
// ScaledMma (scaled_mma.cuh) is a policy with scales for each k-tile.
#pragma once

#include "gemm/sm90/config.cuh"
#include "gemm/sm90/epilogue.cuh"
#include "gemm/sm90/operand.cuh"

namespace tilekern {

// Where MMAs read lhs: a source of lhs for row block i and an MMA step. SharedLhs reads the stage.
template <class Tile, int kRowBlocks>
class SharedLhs {
 public:
  static constexpr bool kPairedRows = false;
  static constexpr bool kThroughRegisters = false;
  static constexpr int kFragmentSets = 1;

  SharedLhs(int, int) {}

  template <int kSet>
  void load(uint32) {}

  // `descriptor` is that of the consumer's rows of the tile.
  template <int kSet>
  uint64 operand(uint64 descriptor, int i, int step) const {
    return descriptor + Tile::offset(64 * i, step);
  }
};

// RegisterLhs passes an M-major tile through registers, all of a k-tile at once.
template <class Types, class Tile, int kRowBlocks, int kSets>
class RegisterLhs {
 public:
  static constexpr bool kPairedRows = true;
  static constexpr bool kThroughRegisters = true;
  static constexpr int kFragmentSets = kSets;

  // `warp_row` is the warp's first row in the tile.
  RegisterLhs(int warp_row, int lane) : loader_(warp_row, lane) {}

  template <int kSet>
  void load(uint32 stage) {
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int step = 0; step < kMmaStepsPerTile; ++step) {
        loader_.load(fragments_[kSet][i][step], stage, 64 * i, step);
      }
    }
  }

  template <int kSet>
  const uint32 (&operand(uint64, int i, int step) const)[4] {
    return fragments_[kSet][i][step];
  }

 private:
  TransposedLhsLoader<Types, Tile> loader_;
  uint32 fragments_[kSets][kRowBlocks][kMmaStepsPerTile][4];
};

// What MMAs add to. PlainAccumulators are the result themselves.
template <typename T, int kRowBlocks, int kCount>
class PlainAccumulators {
 public:
  static constexpr bool kPromoted = false;
  using Array = T[kRowBlocks][kCount];

  Array& mma() { return accumulators_; }
  Array& result() { return accumulators_; }
  void promote(int) {}

 private:
  Array accumulators_;
};

// PromotedAccumulators add the accumulators of each k-tile to the result in float32 arithmetic of
// the CUDA cores. MMAs of a k-tile overwrite the accumulators.
template <typename T, int kRowBlocks, int kCount>
class PromotedAccumulators {
 public:
  static constexpr bool kPromoted = true;
  using Array = T[kRowBlocks][kCount];

  Array& mma() { return accumulators_; }
  Array& result() { return promoted_; }
  void promote(int i) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) promoted_[i][j] += accumulators_[i][j];
  }

 private:
  Array accumulators_;
  Array promoted_;
};

// The MMA policy of wgmma, composed of a source of lhs, accumulators, and the number of parts that
// operands are split into (split-float16 emulation; see WgmmaConfig).
template <class Lhs, class Rhs, WgmmaConfig config>
class WarpgroupMma {
  using LhsTile =
      OperandTile<typename Lhs::Shared, config.lhs_k_major, config.block_m, config.block_k>;
  using RhsTile =
      OperandTile<typename Rhs::Shared, config.rhs_k_major, config.block_n, config.block_k>;
  static constexpr int kLhsBytes = sizeof(typename Lhs::Shared);
  static_assert(kSame<typename Rhs::Shared, typename Rhs::Mma>, "rhs is read from shared memory");
  static_assert(config.rhs_k_major || sizeof(typename Rhs::Mma) == 2,
                "wgmma reads MN-major tiles of 16-bit types alone");

  using Types = WgmmaTypes<typename Lhs::Mma, typename Rhs::Mma>;
  static constexpr int kRowBlocks = config.consumer_m() / 64;
  static constexpr int kCount = config.block_n / 2;
  static_assert(config.consumer_m() % 64 == 0);

  static constexpr bool kTransposedLhs = !config.lhs_k_major && kLhsBytes != 2;
  // A second set of fragments takes registers that 8-bit operands leave. Without it, a k-tile's
  // MMAs retire before the next ones are issued, and those of the other consumer keep the tensor
  // cores busy.
  static constexpr int kSets = kTransposedLhs && !config.promote && kLhsBytes == 1 ? 2 : 1;

 public:
  using Accumulator = typename Types::Accumulator;

 private:
  using Accumulators = Select<config.promote, PromotedAccumulators<Accumulator, kRowBlocks, kCount>,
                              PlainAccumulators<Accumulator, kRowBlocks, kCount>>;
  using Source = Select<kTransposedLhs, RegisterLhs<Lhs, LhsTile, kRowBlocks, kSets>,
                        SharedLhs<LhsTile, kRowBlocks>>;
  using Flags = Select<kLhsBytes == 2, SignsAndOrders<config.lhs_k_major, config.rhs_k_major>,
                       Select<kSame<Accumulator, float>, Signs, NoFlags>>;

 public:
  static constexpr int kStageBytes = config.parts * (LhsTile::kBytes + RhsTile::kBytes);
  using Coordinates = WgmmaCoordinates<Source::kPairedRows>;
  static constexpr bool kInPlace = !Accumulators::kPromoted;
  static constexpr int kFragmentSets = kSets;
  static constexpr bool kResultsMayWait = true;
  static constexpr int kScaleBytes = 0;
  static constexpr bool kRetireEachTile =
      (Accumulators::kPromoted || Source::kThroughRegisters) && kSets == 1;

  struct Params {};

  // `row` is the consumer's first row in the tile, and `warp_row` the warp's.
  WarpgroupMma(const Params&, int row, int warp_row)
      : warp_row_(warp_row),
        row_offset_(LhsTile::mn_offset(row)),
        lhs_(warp_row, threadIdx.x % 32) {}

  typename Accumulators::Array& result() { return accumulators_.result(); }

  Coordinates coordinates(int i, const WorkTile& work, const WgmmaShape& shape,
                          const int& column_end, bool is_group) const {
    return {work, shape, warp_row_ + 64 * i, column_end, is_group};
  }

  void clear() {
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) result()[i][j] = 0;
    }
  }

  template <class Scheduler>
  void start(const Scheduler&) {}

  template <int kSet>
  void load(uint32 stage) {
    lhs_.template load<kSet>(stage);
  }

  template <int kSet, int kColumns, int kFirstStep = 0>
  void issue(uint32 stage, int accumulate) {
    warpgroup_arrive();
    // The smallest products come first.
#pragma unroll
    for (int order = config.parts - 1; order >= 0; --order) {
#pragma unroll
      for (int part = 0; part < config.parts; ++part) {
        if (order - part < 0 || order - part >= config.parts) continue;
        const uint64 lhs = LhsTile::descriptor(stage + row_offset_ + part * LhsTile::kBytes);
        const uint64 rhs = RhsTile::descriptor(stage + config.parts * LhsTile::kBytes +
                                               (order - part) * RhsTile::kBytes);
#pragma unroll
        for (int step = kFirstStep; step < kMmaStepsPerTile; ++step) {
#pragma unroll
          for (int i = 0; i < kRowBlocks; ++i) {
            auto& accumulators =
                reinterpret_cast<Accumulator(&)[kColumns / 2]>(accumulators_.mma()[i]);
            const uint64 rhs_step = rhs + RhsTile::offset(0, step);
            multiply<Types, Flags>(accumulators, lhs_.template operand<kSet>(lhs, i, step),
                                   rhs_step, accumulate);
          }
          accumulate = 1;
        }
      }
    }
    warpgroup_commit_batch();
  }

  void retire(uint32, uint32) {
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      warpgroup_fence_operand(accumulators_.mma()[i]);
      accumulators_.promote(i);
    }
  }

 private:
  int warp_row_;
  int row_offset_;
  Source lhs_;
  Accumulators accumulators_;
};

}  // namespace tilekern

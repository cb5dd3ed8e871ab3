// Matrix products on Hopper's warpgroup tensor cores, fed by its tensor memory accelerator
// (sm_90a).
//
// A block stays on its multiprocessor and computes tile after tile. One warpgroup copies: a single
// thread of it keeps a ring of stages filled, each with a tile of k of both operands. The others
// multiply what has arrived, and store the output while the next tile's operands come in:
//
//   copies     | tile 0          | tile 1          | tile 2          |
//   consumer 0 |    products 0      | store 0 |  products 2 ...                  taking turns
//   consumer 1 |                    | products 1      | store 1 | ...
//
// or both consumers work on each tile, which is then larger and takes fewer bytes for its work.
// Results of two bytes then wait in registers, and are stored while the next tile's products run.
#pragma once

#include "cluster.cuh"
#include "gemm/sm90/epilogue.cuh"
#include "gemm/sm90/finish.cuh"
#include "gemm/sm90/operand.cuh"
#include "gemm/sm90/tile_scheduler.cuh"
#include "mbarrier.cuh"

namespace tilekern {

extern __shared__ __align__(1024) unsigned char wgmma_shared[];

// `Items` says which tiles the block computes; `Finish` is applied to sums before they are stored.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config, class Items, class Finish>
class WgmmaMatmul {
  using LhsTile = WgmmaTile<Lhs, config.lhs_k_major, config.block_m, config.block_k>;
  // What a block of a cluster copies of the rhs that all of them use.
  using RhsShare =
      WgmmaTile<Rhs, config.rhs_k_major, config.block_n / config.cluster, config.block_k>;
  using RhsTile = WgmmaTile<Rhs, config.rhs_k_major, config.block_n, config.block_k>;
  using Types = WgmmaTypes<Lhs, Rhs>;
  using Sum = typename Types::Sum;
  using Flags = Select<sizeof(Lhs) == 2, SignsAndOrders<config.lhs_k_major, config.rhs_k_major>,
                       Select<kSame<Sum, float>, Signs, NoFlags>>;
  // wgmma reads lines side by side from shared memory in 16-bit types alone.
  static constexpr bool kTransposedLhs = !config.lhs_k_major && sizeof(Lhs) != 2;
  static_assert(config.rhs_k_major || sizeof(Rhs) == 2);
  using Epilogue = WgmmaEpilogue<Out, config, kTransposedLhs, Items::kPartialLines>;

  static constexpr int kStages = config.stages;
  static constexpr int kStageBytes = config.pieces * (LhsTile::kBytes + RhsTile::kBytes);
  static constexpr int kRowBlocks = config.consumer_m() / 64;
  static constexpr int kSums = config.block_n / 2;
  static constexpr bool kMayBeEmpty = Items::kPartialLines || Items::kPartialK;
  // Lines of rhs are copied and multiplied in steps, of a partial tile as many as it needs.
  static constexpr int kLineStep = Items::kLineStep;
  static_assert(!Items::kPartialLines || (config.rhs_k_major && config.out_m_major &&
                                          config.pieces == 1 && config.block_n % kLineStep == 0));
  static_assert(config.consumer_m() % 64 == 0 && RhsShare::kBytes % 1024 == 0);
  static_assert(config.consumers <= 2, "registers");

 public:
  WgmmaMatmul(const WgmmaShape& shape, const typename Items::Source& source, const Finish& finish)
      : shape_(shape), source_(source), finish_(finish), stages_(shared_address(wgmma_shared)) {
    slabs_ = stages_ + kStages * kStageBytes;
    full_ = slabs_ + config.consumers * kSlabs * kSlabBytes;
    empty_ = full_ + kStages * kBarrierBytes;
    turns_ = empty_ + kStages * kBarrierBytes;
    block_ = config.cluster > 1 ? block_in_cluster() : 0;
  }

  // `rhs_step` is a map of rhs in boxes of one step of lines, for partial tiles.
  void run(const TensorMap& lhs, const TensorMap& rhs, const TensorMap& rhs_step,
           const TensorMap& out_map, Out* out) {
    if (threadIdx.x == 0) {
      prefetch(lhs);
      prefetch(rhs);
      if (Items::kPartialLines) prefetch(rhs_step);
      if (config.out_boxes) prefetch(out_map);
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        init_barrier(full_ + stage * kBarrierBytes, 1);
        init_barrier(empty_ + stage * kBarrierBytes, config.cluster * config.tile_consumers());
      }
#pragma unroll
      for (int i = 0; i < config.consumers; ++i) init_barrier(turns_ + i * kBarrierBytes, 1);
      publish_barriers();
    }
    const uint32 barriers_end = turns_ + config.consumers * kBarrierBytes;
    source_.prepare(wgmma_shared + (barriers_end - stages_ + 15) / 16 * 16);
    sync_blocks();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == config.consumers) {
      release_registers<40>();
      if (threadIdx.x % 128 == 0) produce(lhs, rhs, rhs_step);
      if constexpr (Items::kScheduled) {
        if (threadIdx.x % 128 == 32 && block_ == 0) Items::schedule(source_);
      }
    } else {
      acquire_registers<config.consumers == 1 ? 248 : 232>();
      consume(out_map, out, warpgroup);
    }
    // Blocks of a cluster arrive at each other's barriers to the end.
    if constexpr (config.cluster > 1) sync_cluster();
  }

 private:
  static void sync_blocks() {
    if constexpr (config.cluster > 1) {
      sync_cluster();
    } else {
      __syncthreads();
    }
  }

  void produce(const TensorMap& lhs, const TensorMap& rhs, const TensorMap& rhs_step) const {
    RingPosition<kStages> ring;
    Items items(source_, block_);
    items.ask();
    while (items.next()) {
      const WorkItem work = items.work();
      const int k_tiles = items.k_tiles();
      // Of rhs, in whole steps.
      const int lines = (items.lines() + kLineStep - 1) / kLineStep * kLineStep;
      // Early enough, and no earlier: who takes an item should be who can soonest begin it.
      const int asking = max_of(0, k_tiles - kStages);
      if (k_tiles == 0) items.ask();
      for (int tile = 0; tile < k_tiles; ++tile) {
        if (tile == asking) items.ask();
        const uint32 full = full_ + ring.stage * kBarrierBytes;
        wait(empty_ + ring.stage * kBarrierBytes, ring.parity ^ 1);
        arrive_expecting(
            full, Items::kPartialLines ? LhsTile::kBytes + lines * kTileRowBytes : kStageBytes);
        const int k = work.k + tile * config.block_k;
        uint32 to = stages_ + ring.stage * kStageBytes;
#pragma unroll
        for (int piece = 0; piece < config.pieces; ++piece) {
          // Not unrolled: the copying thread has few registers.
#pragma unroll 1
          for (int chunk = 0; chunk < LhsTile::kChunks; ++chunk) {
            load_box(to, lhs,
                     LhsTile::box(chunk, work.m, k + piece * shape_.piece_step, work.lhs_batch),
                     full);
            to += LhsTile::kChunkBytes;
          }
        }
#pragma unroll
        for (int piece = 0; piece < config.pieces; ++piece) {
          if constexpr (Items::kPartialLines) {
            copy_lines(to, rhs, rhs_step, work, lines, k, full);
          } else {
            copy_rhs(to, rhs, work, k + piece * shape_.piece_step, full);
          }
          to += RhsTile::kBytes;
        }
        ring.advance();
      }
    }
  }

  // The block's share, in few boxes, for each takes the copying thread some time.
  void copy_lines(uint32 to, const TensorMap& rhs, const TensorMap& rhs_step, const WorkItem& work,
                  int lines, int k, uint32 full) const {
    constexpr int kLong = Items::kLongBoxLines, kShort = Items::kCopyStep;
    const int shorts = lines / kShort;
    int line = shorts * block_ / config.cluster * kShort;
    const int end = shorts * (block_ + 1) / config.cluster * kShort;
#pragma unroll 1
    for (; line + kLong <= end; line += kLong) {
      load_shared_box(to + line * kTileRowBytes, rhs,
                      RhsTile::box(0, work.n + line, k, work.rhs_batch), full);
    }
#pragma unroll 1
    for (; line < end; line += kShort) {
      load_shared_box(to + line * kTileRowBytes, rhs_step,
                      RhsTile::box(0, work.n + line, k, work.rhs_batch), full);
    }
  }

  void copy_rhs(uint32 to, const TensorMap& rhs, const WorkItem& work, int k, uint32 full) const {
    const int line = work.n + block_ * (config.block_n / config.cluster);
    to += block_ * RhsShare::kBytes;
#pragma unroll 1
    for (int chunk = 0; chunk < RhsShare::kChunks; ++chunk) {
      load_shared_box(to, rhs, RhsShare::box(chunk, line, k, work.rhs_batch), full);
      to += RhsShare::kChunkBytes;
    }
  }

  // For all blocks of the cluster.
  static void load_shared_box(uint32 to, const TensorMap& map, const BoxOrigin& box, uint32 full) {
    if constexpr (config.cluster > 1) {
      load_box_multicast(to, map, box, full, (1 << config.cluster) - 1);
    } else {
      load_box(to, map, box, full);
    }
  }

  void consume(const TensorMap& out_map, Out* out, int consumer) {
    const int row = config.cooperative ? consumer * config.consumer_m() : 0;
    const int warp_row = row + threadIdx.x / 32 % 4 * 16;
    Epilogue epilogue(slabs_ + consumer * kSlabs * kSlabBytes, 1 + consumer, out_map, out, shape_);
    Products products(*this, epilogue, row, warp_row);
    RingPosition<kStages> ring;
    int turn = 0;
    uint32 turn_parity = consumer == 0;
    Items items(source_, block_);
    for (; items.next(); items.release()) {
      const int k_tiles = items.k_tiles();
      if (!config.cooperative) {
        const bool mine = turn == consumer;
        turn = turn + 1 == config.consumers ? 0 : turn + 1;
        if (!mine) {
          ring.skip(k_tiles);
          continue;
        }
        // The parity of a stage's barrier tells only neighbouring rounds of the ring apart, so one
        // waits for its tile's stages no earlier than all before have come in.
        wait(turns_ + consumer * kBarrierBytes, turn_parity);
        turn_parity ^= 1;
      }
      products.accumulate(ring, items, consumer);
      const WorkItem work = items.work();
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        finish_.apply(products.result()[i], work, warp_row + 64 * i, shape_);
      }
      const int (&batch)[kBoxBatchDims] = work.out_batch;
      epilogue.store(products.result(),
                     {work.m + row, work.n, {batch[0], batch[1], batch[2]}, items.lines()});
    }
    epilogue.finish();
    epilogue.wait();
  }

  // One consumer's share of an output tile.
  class Products {
   public:
    using Sums = Sum[kRowBlocks][kSums];

    Products(const WgmmaMatmul& matmul, Epilogue& epilogue, int row, int warp_row)
        : matmul_(matmul),
          epilogue_(epilogue),
          row_offset_(LhsTile::line_offset(row)),
          lhs_(warp_row, threadIdx.x % 32) {}

    Sums& result() {
      if constexpr (config.promote) {
        return totals_;
      } else {
        return sums_;
      }
    }

    void accumulate(RingPosition<kStages>& ring, const Items& items, int consumer) {
      if constexpr (config.promote || kMayBeEmpty) {
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
          for (int j = 0; j < kSums; ++j) result()[i][j] = 0;
        }
      }
      if constexpr (Items::kPartialK) {
        // Whole steps are left out.
        const int rest = items.foreign_k() % LhsTile::kStep;
        if (rest > 0) {
          wait(matmul_.full_ + ring.stage * kBarrierBytes, ring.parity);
          clear_rows(matmul_.stages_ + ring.stage * kStageBytes, items.foreign_k() - rest, rest);
        }
      }
      multiply_tiles<kLineStep>(ring, items, consumer);
    }

   private:
    // While products run, the registers that they use wait: those of an lhs that passes through
    // registers, which comes in two sets where there are enough, and sums that are added up
    // outside. Without a second set, products must be over before the next begin, and those of the
    // other consumer keep the tensor cores busy.
    static constexpr int kSlots = kTransposedLhs && !config.promote && sizeof(Lhs) == 1 ? 2 : 1;
    static constexpr bool kOneAtATime = (config.promote || kTransposedLhs) && kSlots == 1;

    // Of the tile's columns only the first kColumns, or more if it has more lines.
    template <int kColumns>
    void multiply_tiles(RingPosition<kStages>& ring, const Items& items, int consumer) {
      if constexpr (kColumns < config.block_n) {
        if (items.lines() > kColumns) {
          multiply_tiles<kColumns + kLineStep>(ring, items, consumer);
          return;
        }
      }
      const int k_tiles = items.k_tiles();
      int previous = -1, tile = 0;
      if constexpr (Items::kPartialK) {
        if (k_tiles > 0) multiply_first_tile<0>(ring, items.foreign_k() / LhsTile::kStep);
        tile = 1;
      }
      if constexpr (kSlots == 2) {
        // Registers are named, not indexed, so each slot has its copy of the loop's body.
        for (; tile + 2 <= k_tiles; tile += 2) {
          multiply_tile<0, kColumns>(ring, tile, k_tiles, previous);
          multiply_tile<1, kColumns>(ring, tile + 1, k_tiles, previous);
        }
        // One finish() after both would make the assembler copy sums that products still add to.
        if (tile < k_tiles) {
          multiply_tile<0, kColumns>(ring, tile, k_tiles, previous);
          finish(previous, consumer);
        } else {
          finish(previous, consumer);
        }
      } else {
        for (; tile < k_tiles; ++tile) multiply_tile<0, kColumns>(ring, tile, k_tiles, previous);
        finish(previous, consumer);
      }
    }

    // From a step on. It is over before others begin, for which the assembler would wait anyway.
    template <int kFirstStep>
    void multiply_first_tile(RingPosition<kStages>& ring, int first_step) {
      if constexpr (kFirstStep + 1 < kStepsPerTile) {
        if (first_step > kFirstStep) {
          multiply_first_tile<kFirstStep + 1>(ring, first_step);
          return;
        }
      }
      wait(matmul_.full_ + ring.stage * kBarrierBytes, ring.parity);
      multiply_pieces<0, config.block_n, kFirstStep>(matmul_.stages_ + ring.stage * kStageBytes, 1);
      commit_products();
      finish_products();
      matmul_.release(ring.stage);
      ring.advance();
    }

    template <int kSlot, int kColumns>
    void multiply_tile(RingPosition<kStages>& ring, int tile, int k_tiles, int& previous) {
      const uint32 stage = matmul_.stages_ + ring.stage * kStageBytes;
      wait(matmul_.full_ + ring.stage * kBarrierBytes, ring.parity);
      if constexpr (kTransposedLhs) {
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
          for (int step = 0; step < kStepsPerTile; ++step) {
            lhs_.load(fragments_[kSlot][i][step], stage, 64 * i, step);
          }
        }
      }
      multiply_pieces<kSlot, kColumns>(stage, !config.promote && (kMayBeEmpty || tile > 0));
      commit_products();
      if constexpr (kOneAtATime) {
        epilogue_.store_next(tile, k_tiles);
        finish_products();
        matmul_.release(ring.stage);
      } else {
        // The products before these are over.
        wait_products<1>();
        if (kMayBeEmpty ? previous >= 0 : tile > 0) matmul_.release(previous);
        epilogue_.store_next(tile, k_tiles);
      }
      previous = ring.stage;
      ring.advance();
    }

    void finish(int previous, int consumer) {
      if constexpr (!config.cooperative) matmul_.pass_turn(consumer);
      if constexpr (!kOneAtATime) {
        finish_products();
        if (!kMayBeEmpty || previous >= 0) matmul_.release(previous);
      }
    }

    void finish_products() {
      wait_products<0>();
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        fence_sums(sums_[i]);
        if constexpr (config.promote) {
#pragma unroll
          for (int j = 0; j < kSums; ++j) totals_[i][j] += sums_[i][j];
        }
      }
    }

    template <int kSlot, int kColumns, int kFirstStep = 0>
    void multiply_pieces(uint32 stage, int accumulate) {
      fence_products();
      // The smallest products first.
#pragma unroll
      for (int order = config.pieces - 1; order >= 0; --order) {
#pragma unroll
        for (int piece = 0; piece < config.pieces; ++piece) {
          if (order - piece < 0 || order - piece >= config.pieces) continue;
          const uint64 lhs = LhsTile::descriptor(stage + row_offset_ + piece * LhsTile::kBytes);
          const uint64 rhs = RhsTile::descriptor(stage + config.pieces * LhsTile::kBytes +
                                                 (order - piece) * RhsTile::kBytes);
#pragma unroll
          for (int step = kFirstStep; step < kStepsPerTile; ++step) {
#pragma unroll
            for (int i = 0; i < kRowBlocks; ++i) {
              auto& sums = reinterpret_cast<Sum(&)[kColumns / 2]>(sums_[i]);
              const uint64 rhs_step = rhs + RhsTile::offset(0, step);
              if constexpr (kTransposedLhs) {
                multiply<Types, Flags>(sums, fragments_[kSlot][i][step], rhs_step, accumulate);
              } else {
                multiply<Types, Flags>(sums, lhs + LhsTile::offset(64 * i, step), rhs_step,
                                       accumulate);
              }
            }
            accumulate = 1;
          }
        }
      }
    }

    const WgmmaMatmul& matmul_;
    Epilogue& epilogue_;
    int row_offset_;
    TransposedLhs<Select<kTransposedLhs, Lhs, float>, LhsTile> lhs_;
    uint32 fragments_[kSlots][kRowBlocks][kStepsPerTile][4];
    Sums sums_;
    Sums totals_;
  };

  // Clears `count` rows of k of both operands, whose elements may be no numbers. By all threads
  // that read the stage.
  static void clear_rows(uint32 stage, int first, int count) {
    static_assert(!config.lhs_k_major && !config.rhs_k_major && config.pieces == 1);
    constexpr int kThreads = 128 * config.tile_consumers();
    constexpr int kChunkBytes = config.block_k * kTileRowBytes;
    const uint32 zeros[4] = {};
    for (int chunk = 0; chunk < kStageBytes; chunk += kChunkBytes) {
      for (int byte = threadIdx.x % kThreads * 16; byte < count * kTileRowBytes;
           byte += kThreads * 16) {
        store_shared(stage + chunk + first * kTileRowBytes + byte, zeros);
      }
    }
    fence_async_proxy();
    // A named barrier besides those of the epilogues, for each consumer if they take turns.
    const int barrier = 1 + config.consumers + (config.cooperative ? 0 : threadIdx.x / 128);
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
  }

  // Tells the copying threads of the cluster that this consumer has read a stage.
  void release(int stage) const {
    const int thread = threadIdx.x % 128;
    const uint32 barrier = empty_ + stage * kBarrierBytes;
    if constexpr (config.cluster > 1) {
      if (thread < config.cluster) arrive_remote(barrier, thread);
    } else {
      if (thread == 0) arrive(barrier);
    }
  }

  void pass_turn(int consumer) const {
    const int next = consumer + 1 == config.consumers ? 0 : consumer + 1;
    if (threadIdx.x % 128 == 0) arrive(turns_ + next * kBarrierBytes);
  }

  const WgmmaShape& shape_;
  typename Items::Source source_;
  const Finish& finish_;
  uint32 stages_;
  uint32 slabs_;
  uint32 full_;
  uint32 empty_;
  uint32 turns_;
  int block_;
};

template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_matmul(const __grid_constant__ TensorMap lhs, const __grid_constant__ TensorMap rhs,
                 const __grid_constant__ TensorMap out_map, Out* out,
                 const __grid_constant__ WgmmaShape shape) {
  WgmmaMatmul<Lhs, Rhs, Out, config, DenseItems<config>, NoFinish>(shape, {shape}, {})
      .run(lhs, rhs, rhs, out_map, out);
}

// The product of float32 operands that split_float32() took apart. If their pieces are not good
// enough, it is left to another kernel.
template <WgmmaConfig config>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_matmul_of_pieces(const __grid_constant__ TensorMap lhs,
                           const __grid_constant__ TensorMap rhs,
                           const __grid_constant__ TensorMap out_map, float* out,
                           const int32* lhs_exponents, const int32* rhs_exponents,
                           const int32* use_float32, const __grid_constant__ WgmmaShape shape,
                           const __grid_constant__ PieceStrides strides) {
  if (*use_float32) return;
  const ScaleByExponents scale = {lhs_exponents, rhs_exponents, strides};
  WgmmaMatmul<float16, float16, float, config, DenseItems<config>, ScaleByExponents>(shape, {shape},
                                                                                     scale)
      .run(lhs, rhs, rhs, out_map, out);
}

}  // namespace tilekern

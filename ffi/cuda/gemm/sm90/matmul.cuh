// GEMM on Hopper's warpgroup tensor cores, fed by TMA (sm_90a).
//
// CTAs are persistent and warp-specialised. One warpgroup is the producer: a single thread of it
// keeps the pipeline's stages filled, each with a k-tile of both operands. The others are
// consumers: they multiply what has come in, and store the output while the next work tile's
// operands come in.
//
//   producer   | tile 0          | tile 1          | tile 2          |
//   consumer 0 |    MMAs 0          | store 0 |  MMAs 2 ...                  ping-pong
//   consumer 1 |                    | MMAs 1          | store 1 | ...
//
// Cooperative consumers work on each tile together, which is then larger and takes fewer bytes for
// its work. Their results of two bytes wait in registers, and are stored while the next tile's MMAs
// run.
//
// The producer gives up registers, which the consumers take (setmaxnreg): 232 each of two, 248 of
// one. Accumulators take 128 of a thread's in a cooperative tile of 256x128 or 128x256, and 192 in
// a ping-pong tile of 128x192.
//
// ptxas keeps MMAs asynchronous only if no register of an MMA in flight is touched. Otherwise it
// serializes them, and says so in a note of severity "info" (C7511, C7514 and others).
// `compiler.py` keeps these notes, and the tests that compile the kernels accept none.
//
// A kernel is composed of four parts, each of which says what another value of it has to provide:
//
//   tile scheduler   which work tiles a CTA computes              tile_scheduler.cuh
//   mainloop         how k-tiles reach the tensor cores           producer.cuh, consumer.cuh
//   MMA policy       how a k-tile is multiplied                   mma_policy.cuh
//   epilogue         what becomes of the accumulators             ../../epilogue.cuh, store.cuh
#pragma once

#include "epilogue.cuh"
#include "gemm/sm90/consumer.cuh"
#include "gemm/sm90/epilogue.cuh"
#include "gemm/sm90/mma_policy.cuh"
#include "gemm/sm90/producer.cuh"
#include "gemm/sm90/staged_operands.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/sm90/tile_scheduler.cuh"
#include "ptx.cuh"

namespace tilekern {

extern __shared__ __align__(1024) unsigned char wgmma_shared[];

// `Lhs` and `Rhs` are OperandTypes.
template <class Lhs, class Rhs, typename Out, WgmmaConfig config, class Scheduler, class Epilogue,
          class Mma = WarpgroupMma<Lhs, Rhs, config>>
class WgmmaMatmul {
  using Pipeline = MainloopPipeline<config, Mma::kStageBytes, Mma::kScaleBytes>;
  using Producer = TmaProducer<Lhs, Rhs, config, Pipeline, Scheduler, Epilogue, Mma>;
  // With two copies of the loop's body, ptxas serializes the MMAs (C7515) where they would
  // overwrite what an epilogue has left in the accumulators.
  static constexpr bool kClears = Mma::kFragmentSets == 2 && !kSame<Epilogue, IdentityEpilogue>;
  using Mainloop = ConsumerMainloop<Mma, config, Pipeline, Scheduler, kClears>;
  using Order = OrderedBarrier<config>;
  // Lines of the output, across its unit stride, may be another tile's.
  static constexpr bool kPartialLines = Scheduler::kPartialM || Scheduler::kPartialN;
  static_assert(!kPartialLines || Scheduler::kPartialN == config.out_m_major);
  using Store = TileStore<Out, config, typename Mma::Coordinates::Layout, kPartialLines,
                          Scheduler::kMirrors, Mma::kResultsMayWait>;
  static constexpr int kRowBlocks = config.consumer_out_m() / 64;
  static_assert(config.consumers <= 2, "registers");
  // Ping-pong consumers would keep stages from each other, and hide what the epilogue reads anyway.
  static_assert(Epilogue::kStagedColumns == 0 ||
                (config.cooperative && !config.pair && !config.lhs_pair));

 public:
  WgmmaMatmul(const WgmmaShape& shape, const typename Scheduler::Params& params,
              const Epilogue& epilogue, const typename Mma::Params& mma_params = {})
      : shape_(shape),
        params_(params),
        epilogue_(epilogue),
        mma_params_(mma_params),
        stages_(shared_address(wgmma_shared)),
        subtiles_(stages_ + Pipeline::kStagesBytes),
        scales_(subtiles_ + config.consumers * kSubtileBuffers * kSubtileBytes),
        barriers_(scales_ + Pipeline::kScalesBytes),
        order_(barriers_ + Pipeline::kBarriersBytes),
        pipeline_(stages_, scales_, barriers_),
        cta_(config.cluster > 1 ? cluster_cta_rank() : 0) {}

  // `second` is what TmaProducer has of it, and `mirror_map` what TileStore has.
  void run(const OperandMaps& operands, const OperandMaps& second, const TensorMap& out_map,
           const TensorMap& mirror_map, Out* out) {
    // With a dynamic scheduler no launch overlaps: in a grouped GEMM, which none follows, ptxas
    // would serialize the MMAs for want of registers (C7511).
    if constexpr (!Scheduler::kDynamic) launch_dependents();
    if (threadIdx.x == 0) {
      Producer::prefetch(operands, second);
      if (config.tma_store) prefetch_tensor_map(out_map);
      if (Scheduler::kMirrors) prefetch_tensor_map(mirror_map);
      pipeline_.init();
      Order::init(order_);
      fence_barrier_init();
    }
    const uint32 barriers_end = order_ + Order::kBytes;
    params_.prepare(wgmma_shared + (barriers_end - stages_ + 15) / 16 * 16);
    sync();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == config.consumers) {
      warpgroup_reg_dealloc<40>();
      if (threadIdx.x % 128 == 0) {
        Producer(pipeline_, shape_, cta_, epilogue_, operands, second, mma_params_).run(params_);
      }
      if constexpr (Scheduler::kDynamic) {
        if (threadIdx.x % 128 == 32 && cta_ == 0) Scheduler::schedule(params_);
      }
    } else {
      warpgroup_reg_alloc<config.consumers == 1 ? 248 : 232>();
      consume(out_map, mirror_map, out, warpgroup);
    }
    // CTAs of a cluster arrive at each other's barriers to the end, so none may exit before. The
    // threads that had nothing to do wait for the producer and scheduling threads of their warps,
    // since the cluster's barrier takes converged warps.
    if constexpr (config.cluster > 1) {
      __syncwarp();
      cluster_sync();
    }
  }

 private:
  // The epilogue's arrays are prefetched this many k-tiles before it starts: earlier, other tiles
  // would evict them from L2.
  static constexpr int kPrefetchedKTiles = 8;

  static void sync() {
    if constexpr (config.cluster > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  void consume(const TensorMap& out_map, const TensorMap& mirror_map, Out* out, int consumer) {
    const int shared = config.cooperative ? consumer : 0;
    const int row = shared * config.consumer_out_m();
    const int warp_row = row + threadIdx.x / 32 % 4 * 16;
    Store store(subtiles_ + consumer * kSubtileBuffers * kSubtileBytes, 1 + consumer, out_map,
                mirror_map, out, shape_);
    Mainloop mainloop(pipeline_, mma_params_, shared * config.consumer_m(), warp_row);
    typename Pipeline::State state;
    Order order(order_, consumer);
    Scheduler scheduler(params_, cta_);
    const auto in_flight = [&](int k_tile, int k_tiles) {
      store.store_waiting(k_tile, k_tiles);
      if constexpr (Epilogue::kPrefetches) {
        if (k_tile == max_of(0, k_tiles - kPrefetchedKTiles)) prefetch(scheduler, mainloop);
      }
    };
    const auto all_issued = [&] {
      if (config.cooperative) return;
      // In a tile of no k-tiles no MMA has a warp's threads meet: each has waited for the turn.
      if (kPartialLines || Scheduler::kPartialK) __syncwarp();
      Order::arrive(order_, consumer);
    };
    for (; scheduler.next(); scheduler.release()) {
      if (!config.cooperative) {
        if (!order.takes_next(consumer)) {
          state.skip(scheduler.k_tiles());
          continue;
        }
      }
      if (!config.cooperative) order.wait(consumer);
      mainloop.run(state, scheduler, in_flight, all_issued);
      const WorkTile work = scheduler.work_tile();
      // The epilogue has the registers of results that have been stored.
      store.flush();
      // Ragged columns belong to a group, or to none.
      constexpr bool kRagged = Scheduler::kPartialN;
      const int ragged_end = work.n + scheduler.columns();
      const int& column_end = kRagged ? ragged_end : shape_.n;
      const bool is_group = !kRagged || scheduler.k_tiles() > 0;
      if constexpr (Epilogue::kStagedColumns > 0) {
        apply_staged(mainloop, state, work, consumer);
      } else {
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
          const auto at = mainloop.mma().coordinates(i, work, shape_, column_end, is_group);
          apply(mainloop.mma().result(), i, at);
        }
      }
      if constexpr (Epilogue::kStores) {
        const int (&batch)[kMaxTmaBatchDims] = work.out_batch;
        store.store(mainloop.mma().result(),
                    {work.m + row,
                     work.n,
                     {batch[0], batch[1], batch[2]},
                     Scheduler::kPartialM ? scheduler.rows() - row : scheduler.columns()});
      }
    }
    store.flush();
    store.wait_read();
  }

  // Applies the epilogue to the accumulators of a row block of the output.
  template <typename Accumulator, int kBlocks, int kCount, class Coordinates>
  void apply(Accumulator (&accumulators)[kBlocks][kCount], int i, const Coordinates& at) const {
    if constexpr (config.pair) {
      // Both halves are of the same elements, and have the layout of an MMA of half the columns.
      using Half = Accumulator(&)[kCount / 2];
      epilogue_(reinterpret_cast<Half>(accumulators[i][0]),
                reinterpret_cast<Half>(accumulators[i][kCount / 2]), at);
    } else if constexpr (config.lhs_pair) {
      epilogue_(accumulators[2 * i], accumulators[2 * i + 1], at);
    } else {
      epilogue_(accumulators[i], at);
    }
  }

  // Applies the epilogue to the columns of each stage of its operands.
  void apply_staged(Mainloop& mainloop, typename Pipeline::State& state, const WorkTile& work,
                    int consumer) const {
    using Accumulator = typename Mma::Accumulator;
    constexpr int kColumns = Epilogue::kStagedColumns;
#pragma unroll
    for (int column = 0; column < config.block_n; column += kColumns) {
      pipeline_.wait_full(state);
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        auto& accumulators =
            reinterpret_cast<Accumulator(&)[kColumns / 2]>(mainloop.mma().result()[i][column / 2]);
        const auto at = mainloop.mma().coordinates(i, work, shape_, shape_.n, true);
        epilogue_(accumulators, StagedCoordinates<Mma::Coordinates::Layout::kPairedRows>{
                                    at, column, pipeline_.stage(state.stage)});
      }
      // The reads come before the writes by TMA that follow the release.
      fence_async_proxy();
      sync_consumer(1 + consumer);
      pipeline_.release(state.stage);
      state.advance();
    }
  }

  // The arrays that the epilogue reads are in L2 when the mainloop is done.
  void prefetch(const Scheduler& scheduler, Mainloop& mainloop) const {
    const WorkTile work = scheduler.work_tile();
    const int column_end = Scheduler::kPartialN ? work.n + scheduler.columns() : shape_.n;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      const auto at = mainloop.mma().coordinates(i, work, shape_, column_end, true);
      epilogue_.template prefetch<16, config.out_n()>(at);
    }
  }

  const WgmmaShape& shape_;
  typename Scheduler::Params params_;
  const Epilogue& epilogue_;
  const typename Mma::Params& mma_params_;
  // Shared memory, in this order; the scheduler's part is behind the ordered barrier.
  uint32 stages_;
  uint32 subtiles_;
  uint32 scales_;
  uint32 barriers_;
  uint32 order_;
  Pipeline pipeline_;
  int cta_;
};

template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_matmul(const __grid_constant__ TensorMap lhs, const __grid_constant__ TensorMap rhs,
                 const __grid_constant__ TensorMap out_map, Out* out,
                 const __grid_constant__ WgmmaShape shape,
                 const __grid_constant__ Operands... operands) {
  using Scheduler = StaticPersistentScheduler<config>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {shape}, Epilogue{operands...})
      .run({lhs, rhs, rhs}, {lhs, rhs, rhs}, out_map, out_map, out);
}

// Two products of one lhs: `second_rhs` has the strides of `rhs`, and the epilogue is a function of
// the accumulators of both.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config, class Epilogue,
          typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_matmul_of_pair(const __grid_constant__ TensorMap lhs,
                         const __grid_constant__ TensorMap rhs,
                         const __grid_constant__ TensorMap out_map, Out* out,
                         const __grid_constant__ TensorMap second_rhs,
                         const __grid_constant__ WgmmaShape shape,
                         const __grid_constant__ Operands... operands) {
  static_assert(config.pair);
  using Scheduler = StaticPersistentScheduler<config>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {shape}, Epilogue{operands...})
      .run({lhs, rhs, rhs}, {lhs, second_rhs, second_rhs}, out_map, out_map, out);
}

// A product whose output is symmetric, and so is what the epilogue makes of it. `mirror_map` is the
// output in TMA tiles of mirrored subtiles.
template <typename Lhs, typename Rhs, typename Out, WgmmaConfig config,
          class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_symmetric_matmul(const __grid_constant__ TensorMap lhs,
                           const __grid_constant__ TensorMap rhs,
                           const __grid_constant__ TensorMap out_map, Out* out,
                           const __grid_constant__ TensorMap mirror_map,
                           const __grid_constant__ WgmmaShape shape,
                           const __grid_constant__ Operands... operands) {
  using Scheduler = StaticPersistentScheduler<config, SymmetricTiles<config>>;
  WgmmaMatmul<OperandTypes<Lhs>, OperandTypes<Rhs>, Out, config, Scheduler, Epilogue>(
      shape, {shape}, Epilogue{operands...})
      .run({lhs, rhs, rhs}, {lhs, rhs, rhs}, out_map, mirror_map, out);
}

// Split-float16 emulation of float32: operands that split_float32() took apart. If their parts are
// not good enough, which `use_float32` tells unless it is null, the output is left to another
// kernel.
template <WgmmaConfig config, class Epilogue = IdentityEpilogue, typename... Operands>
__global__ void __launch_bounds__(config.threads(), 1)
    wgmma_matmul_of_parts(const __grid_constant__ TensorMap lhs,
                          const __grid_constant__ TensorMap rhs,
                          const __grid_constant__ TensorMap out_map, float* out,
                          const int32* lhs_exponents, const int32* rhs_exponents,
                          const int32* use_float32, const __grid_constant__ WgmmaShape shape,
                          const __grid_constant__ PartStrides strides,
                          const __grid_constant__ Operands... operands) {
  static_assert(config.cluster == 1,
                "CTAs that return here would be missed by the cluster's barriers");
  wait_for_prerequisites();
  if (use_float32 != nullptr && *use_float32) return;
  using Operand = OperandTypes<float16>;
  using Scheduler = StaticPersistentScheduler<config>;
  using Scaled = ComposedEpilogue<ScaleByExponents, Epilogue>;
  WgmmaMatmul<Operand, Operand, float, config, Scheduler, Scaled>(
      shape, {shape}, Scaled{{lhs_exponents, rhs_exponents, strides}, Epilogue{operands...}})
      .run({lhs, rhs, rhs}, {lhs, rhs, rhs}, out_map, out_map, out);
}

}  // namespace tilekern

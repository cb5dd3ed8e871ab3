// The producer's side of the mainloop: one thread fills the pipeline by TMA.
//
// A producer provides
//
//   Producer(pipeline, shape, cta, epilogue, operands, second, mma_params)
//   static void prefetch(operands, second)   by one thread: prefetches the tensor maps
//   void run(scheduler, params)    by the producer thread: loads the k-tiles of all work tiles, and
//                                  requests work tiles as tile_scheduler.cuh says
//
// and fills each stage with what the MMA policy reads: the tiles of lhs's parts, and then of rhs's,
// and the policy's scales.
// Behind the k-tiles of a work tile come the stages of what the epilogue reads
// (staged_operands.cuh).
#pragma once

#include "gemm/sm90/config.cuh"
#include "gemm/sm90/operand.cuh"
#include "gemm/sm90/pipeline.cuh"

namespace tilekern {

// Tensor maps of a product's operands. `rhs_step` is rhs in TMA tiles of kTmaColumnStep columns, if
// tiles may be partial.
struct OperandMaps {
  const TensorMap& lhs;
  const TensorMap& rhs;
  const TensorMap& rhs_step;
};

template <class Lhs, class Rhs, WgmmaConfig config, class Pipeline, class Scheduler, class Epilogue,
          class Mma>
class TmaProducer {
  static_assert(kSame<typename Lhs::Storage, typename Lhs::Shared> &&
                    kSame<typename Rhs::Storage, typename Rhs::Shared>,
                "TMA copies bits");
  using LhsTile =
      OperandTile<typename Lhs::Shared, config.lhs_k_major, config.block_m, config.block_k>;
  using RhsTile =
      OperandTile<typename Rhs::Shared, config.rhs_k_major, config.block_n, config.block_k>;
  // What is loaded of one matrix of lhs at a time.
  using LhsPart = OperandTile<typename Lhs::Shared, config.lhs_k_major,
                              config.lhs_pair ? kPairedRowBlock : config.block_m, config.block_k>;
  // What each CTA of a cluster loads of a matrix of rhs, and multicasts to all of them.
  using RhsShare = OperandTile<typename Rhs::Shared, config.rhs_k_major,
                               config.out_n() / config.cluster, config.block_k>;
  static constexpr int kStageBytes = config.parts * (LhsTile::kBytes + RhsTile::kBytes);
  static constexpr int kColumnStep = Scheduler::kColumnStep;
  static_assert(RhsShare::kBytes % 1024 == 0);
  static_assert(!Scheduler::kPartialN ||
                (config.rhs_k_major && config.parts == 1 && config.block_n % kColumnStep == 0));
  static_assert(!config.pair || (config.parts == 1 && !Scheduler::kPartialN));
  static_assert(!config.lhs_pair || (config.parts == 1 && sizeof(typename Lhs::Shared) == 2));

 public:
  // `second` has the second matrix of a pair.
  TmaProducer(const Pipeline& pipeline, const WgmmaShape& shape, int cta, const Epilogue& epilogue,
              const OperandMaps& operands, const OperandMaps& second,
              const typename Mma::Params& mma_params)
      : pipeline_(pipeline),
        shape_(shape),
        cta_(cta),
        epilogue_(epilogue),
        operands_(operands),
        second_(second),
        mma_params_(mma_params) {}

  static void prefetch(const OperandMaps& operands, const OperandMaps& second) {
    prefetch_tensor_map(operands.lhs);
    prefetch_tensor_map(operands.rhs);
    if (Scheduler::kPartialN) prefetch_tensor_map(operands.rhs_step);
    if (config.lhs_pair) prefetch_tensor_map(second.lhs);
    if (config.pair) prefetch_tensor_map(second.rhs);
  }

  void run(const typename Scheduler::Params& params) const {
    typename Pipeline::State state;
    Scheduler scheduler(params, cta_);
    scheduler.request();
    while (scheduler.next()) {
      const WorkTile work = scheduler.work_tile();
      const int k_tiles = scheduler.k_tiles();
      const int columns = (scheduler.columns() + kColumnStep - 1) / kColumnStep * kColumnStep;
      // The request is early enough to be answered in time, and no earlier, so that the CTA that is
      // free first gets the tile.
      const int requesting = max_of(0, k_tiles - config.stages);
      if (k_tiles == 0) scheduler.request();
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        if (k_tile == requesting) scheduler.request();
        if constexpr (Epilogue::kStagedColumns > 0) prefetch_staged(work, k_tile, k_tiles);
        load(state, work, columns, k_tile);
        state.advance();
      }
      if constexpr (Epilogue::kStagedColumns > 0) load_staged(state, work);
    }
  }

 private:
  // The epilogue's operands are prefetched to L2 during so many k-tiles before their loads. All
  // CTAs prefetch at the same time, and DRAM serves the mainloops' operands meanwhile.
  static constexpr int kPrefetchingKTiles = 32;

  void prefetch_staged(const WorkTile& work, int k_tile, int k_tiles) const {
    constexpr int kInterval =
        max_of(1, kPrefetchingKTiles * Epilogue::kStagedColumns / config.block_n);
    const int from = k_tile - max_of(0, k_tiles - kPrefetchingKTiles);
    const int column = from / kInterval * Epilogue::kStagedColumns;
    if (from >= 0 && from % kInterval == 0 && column < config.block_n) {
      epilogue_.prefetch(work, column);
    }
  }

  void load_staged(typename Pipeline::State& state, const WorkTile& work) const {
    static_assert(Epilogue::staged_bytes() <= kStageBytes && !Scheduler::kPartialN);
#pragma unroll 1
    for (int column = 0; column < config.block_n; column += Epilogue::kStagedColumns) {
      const uint32 full = pipeline_.full(state.stage);
      pipeline_.wait_empty(state);
      mbarrier_arrive_expect_tx(full, Epilogue::staged_bytes());
      epilogue_.load(pipeline_.stage(state.stage), work, column, full);
      state.advance();
    }
  }

  void load(const typename Pipeline::State& state, const WorkTile& work, int columns,
            int k_tile) const {
    const uint32 full = pipeline_.full(state.stage);
    pipeline_.wait_empty(state);
    // In a cluster this CTA's barrier also counts what its peers multicast to it, which may come in
    // before it is expected here: the arrival is still pending, and completes the phase with the
    // bytes.
    int bytes = Scheduler::kPartialN ? LhsTile::kBytes + columns * kTileRowBytes : kStageBytes;
    if constexpr (Mma::kScaleBytes > 0) bytes += Mma::loaded_bytes(mma_params_, work);
    mbarrier_arrive_expect_tx(full, bytes);
    const int k = work.k + k_tile * config.block_k;
    uint32 to = pipeline_.stage(state.stage);
#pragma unroll
    for (int part = 0; part < config.parts; ++part) {
      // The loops over TMA tiles are not unrolled: the producer thread has few registers.
#pragma unroll 1
      for (int chunk = 0; chunk < LhsTile::kBytes / LhsPart::kChunkBytes; ++chunk) {
        const bool of_second = config.lhs_pair && chunk % 2 > 0;
        tma_load(to, of_second ? second_.lhs : operands_.lhs,
                 LhsPart::coordinates(config.lhs_pair ? chunk / 2 : chunk, work.m,
                                      k + part * shape_.part_step, work.lhs_batch),
                 full);
        to += LhsPart::kChunkBytes;
      }
    }
#pragma unroll
    for (int part = 0; part < config.parts; ++part) {
      if constexpr (Scheduler::kPartialN) {
        load_columns(to, work, columns, k, full);
      } else {
        load_rhs(to, operands_.rhs, work, k + part * shape_.part_step, full);
        if constexpr (config.pair) load_rhs(to + RhsTile::kBytes / 2, second_.rhs, work, k, full);
      }
      to += RhsTile::kBytes;
    }
    if constexpr (Mma::kScaleBytes > 0) {
      Mma::load_scales(pipeline_.scales(state.stage), mma_params_, work, k_tile, full);
    }
  }

  void load_rhs(uint32 to, const TensorMap& map, const WorkTile& work, int k, uint32 full) const {
    const int n = work.n + cta_ * (config.out_n() / config.cluster);
    to += cta_ * RhsShare::kBytes;
#pragma unroll 1
    for (int chunk = 0; chunk < RhsShare::kChunks; ++chunk) {
      load_to_cluster(to, map, RhsShare::coordinates(chunk, n, k, work.rhs_batch), full);
      to += RhsShare::kChunkBytes;
    }
  }

  // The CTA's share of a partial tile, in few TMA tiles, since each takes the producer thread some
  // time.
  void load_columns(uint32 to, const WorkTile& work, int columns, int k, uint32 full) const {
    constexpr int kLong = Scheduler::kTmaColumns, kShort = Scheduler::kTmaColumnStep;
    const int shorts = columns / kShort;
    int column = shorts * cta_ / config.cluster * kShort;
    const int end = shorts * (cta_ + 1) / config.cluster * kShort;
#pragma unroll 1
    for (; column + kLong <= end; column += kLong) {
      load_to_cluster(to + column * kTileRowBytes, operands_.rhs,
                      RhsTile::coordinates(0, work.n + column, k, work.rhs_batch), full);
    }
#pragma unroll 1
    for (; column < end; column += kShort) {
      load_to_cluster(to + column * kTileRowBytes, operands_.rhs_step,
                      RhsTile::coordinates(0, work.n + column, k, work.rhs_batch), full);
    }
  }

  static void load_to_cluster(uint32 to, const TensorMap& map, const TmaCoordinates& from,
                              uint32 full) {
    if constexpr (config.cluster > 1) {
      tma_load_multicast(to, map, from, full, (1 << config.cluster) - 1);
    } else {
      tma_load(to, map, from, full);
    }
  }

  const Pipeline& pipeline_;
  const WgmmaShape& shape_;
  int cta_;
  const Epilogue& epilogue_;
  const OperandMaps& operands_;
  const OperandMaps& second_;
  const typename Mma::Params& mma_params_;
};

}  // namespace tilekern

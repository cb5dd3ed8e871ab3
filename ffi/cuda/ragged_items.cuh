// Which tiles of a ragged product a block computes: only the device knows how many there are.
#pragma once

#include "mbarrier.cuh"
#include "ptx.cuh"
#include "ragged_groups.cuh"
#include "tile_order.cuh"
#include "wgmma_shape.cuh"

namespace tilekern {

// The ragged dimension, as the kernel has it: columns of the output, of which a tile takes as many
// as a group has for it, or the contracted one.
enum class Ragged { kN, kK };

// To run before the kernel: nobody has taken an item yet.
__global__ void clear_items_taken(int32* items_taken) { *items_taken = 0; }

// The copying thread takes one item after the other, and tells the multiplying warpgroups of them
// through a ring in shared memory. Each item has its own amount of work, so whoever is free takes
// the next one. But blocks that read the same operands do so best at the same time, so columns of
// the output go to blocks in turn until the last rounds, which even out what they differ by.
template <WgmmaConfig config, Ragged ragged, int line_step, int long_box_lines>
class RaggedItems {
  static constexpr int kSlots = 4;
  static constexpr int kSlotBytes = 32;
  static constexpr int kLastRounds = 8;
  static constexpr int kConsumerWarps = 4 * config.consumers;
  static constexpr int kNoMore = -1;
  static_assert(config.cluster == 1);

 public:
  static constexpr bool kPartialLines = ragged == Ragged::kN;
  static constexpr bool kPartialK = ragged == Ragged::kK;
  static constexpr int kLineStep = line_step;
  static constexpr int kLongBoxLines = long_box_lines;

  // Of shared memory: slots, a pair of barriers each, and the number of each span's first tile.
  struct Source {
    const WgmmaShape& shape;
    const GroupShape& groups;
    const int32* bounds;
    // By all blocks, of those that are not dealt out in turn.
    int32* items_taken;
    uint32 slots = 0;
    int32* first_tiles = nullptr;

    uint32 full(int slot) const { return slots + kSlots * kSlotBytes + slot * kBarrierBytes; }
    uint32 empty(int slot) const { return full(kSlots + slot); }

    void prepare(unsigned char* shared) {
      slots = shared_address(shared);
      first_tiles = reinterpret_cast<int32*>(shared + kSlots * (kSlotBytes + 2 * kBarrierBytes));
      if (threadIdx.x == 0) {
        for (int slot = 0; slot < kSlots; ++slot) {
          init_barrier(full(slot), 1);
          init_barrier(empty(slot), kConsumerWarps);
        }
      }
      if (kPartialLines) {
        number_tiles(groups, bounds, config.block_n, first_tiles);
      }
    }
  };

  class Producer {
   public:
    Producer(const Source& source, int) : source_(source) {
      const int grid = gridDim.x;
      in_turn_ = kPartialK ? 0 : max_of(0, items() / grid - kLastRounds) * grid;
      upcoming_ = static_cast<int>(blockIdx.x) - grid;
      look_ahead();
    }

    bool next() {
      wait(source_.empty(ring_.stage), ring_.parity ^ 1);
      item_ = upcoming_;
      const bool found = item_ < items();
      if (found) {
        find();
        if (k_tiles_ == 0) look_ahead();
      } else {
        k_tiles_ = kNoMore;
      }
      tell();
      ring_.advance();
      return found;
    }

    // Takes the next item, whose number is a while in coming. No earlier than need be, for who
    // takes it should be who can soonest begin it.
    void look_ahead() {
      upcoming_ += gridDim.x;
      if (upcoming_ >= in_turn_) upcoming_ = in_turn_ + atomicAdd(source_.items_taken, 1);
    }

    int k_tiles() const { return k_tiles_; }
    int lines() const { return share_; }
    const WorkItem& work() const { return work_; }

   private:
    int items() const {
      const WgmmaShape& shape = source_.shape;
      if constexpr (kPartialK) return shape.batches * shape.tiles_m * shape.tiles_n;
      return source_.first_tiles[source_.groups.spans()] * shape.tiles_m;
    }

    void find() {
      const WgmmaShape& shape = source_.shape;
      const GroupShape& groups = source_.groups;
      if constexpr (kPartialK) {
        const int tiles = shape.tiles_m * shape.tiles_n;
        const int stacked = item_ / tiles;
        const TileCoordinates tile =
            banded_tile(item_ % tiles, shape.tiles_m, shape.tiles_n, shape.band);
        const Span span =
            group_span(groups, source_.bounds, stacked / groups.groups, stacked % groups.groups);
        work_.m = tile.m * config.block_m;
        work_.n = tile.n * config.block_n;
        k_tiles_ = (span.rows() + config.block_k - 1) / config.block_k;
        // Tiles of k end where the group does, and the first one may begin before it.
        work_.k = span.end - k_tiles_ * config.block_k;
        share_ = span.begin - work_.k;
        set_batch(work_, shape, stacked);
      } else {
        const int index = span_of_tile(source_.first_tiles, groups.spans(), item_ / shape.tiles_m);
        const int first = source_.first_tiles[index];
        const int tiles = source_.first_tiles[index + 1] - first;
        const TileCoordinates tile =
            banded_tile(item_ - first * shape.tiles_m, shape.tiles_m, tiles, shape.band);
        const Span span = span_at(groups, source_.bounds, index);
        // The span's steps are dealt out to its tiles, so that none is left with few.
        const int steps = (span.rows() + kLineStep - 1) / kLineStep;
        const int before = tile.n * (steps / tiles) + min_of(tile.n, steps % tiles);
        const int own = steps / tiles + (tile.n < steps % tiles);
        work_.m = tile.m * config.block_m;
        work_.n = span.begin + before * kLineStep;
        share_ = min_of(own * kLineStep, span.end - work_.n);
        work_.k = 0;
        k_tiles_ = span.is_group() ? shape.k_tiles : 0;
        set_batch(work_, shape, span.batch * groups.groups + max_of(span.group, 0));
        // All groups share the output.
        work_.out_batch[kBoxBatchDims - 1] = 0;
      }
    }

    void tell() const {
      const uint32 slot = source_.slots + ring_.stage * kSlotBytes;
      const uint32 where[4] = {static_cast<uint32>(work_.m), static_cast<uint32>(work_.n),
                               static_cast<uint32>(share_), static_cast<uint32>(k_tiles_)};
      const uint32 batch[4] = {static_cast<uint32>(work_.out_batch[0]),
                               static_cast<uint32>(work_.out_batch[1]),
                               static_cast<uint32>(work_.out_batch[2]), 0};
      store_shared(slot, where);
      store_shared(slot + 16, batch);
      arrive(source_.full(ring_.stage));
    }

    const Source& source_;
    int item_ = 0;
    int upcoming_;
    // Items that are dealt out in turn.
    int in_turn_;
    RingPosition<kSlots> ring_;
    WorkItem work_ = {};
    // Lines of the tile, or the first of k that are another's.
    int share_ = 0;
    int k_tiles_ = 0;
  };

  class Consumer {
   public:
    Consumer(const Source& source, int) : source_(source) {}

    bool next() {
      wait(source_.full(ring_.stage), ring_.parity);
      load_shared(where_, slot());
      return k_tiles() != kNoMore;
    }

    int k_tiles() const { return static_cast<int>(where_[3]); }
    int lines() const { return static_cast<int>(where_[2]); }
    int foreign_k() const { return static_cast<int>(where_[2]); }

    // Without what only the copying thread needs.
    WorkItem work() const {
      uint32 batch[4];
      load_shared(batch, slot() + 16);
      WorkItem work = {};
      work.m = static_cast<int>(where_[0]);
      work.n = static_cast<int>(where_[1]);
#pragma unroll
      for (int dim = 0; dim < kBoxBatchDims; ++dim) {
        work.out_batch[dim] = static_cast<int>(batch[dim]);
      }
      return work;
    }

    void release() {
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(source_.empty(ring_.stage));
      ring_.advance();
    }

   private:
    uint32 slot() const { return source_.slots + ring_.stage * kSlotBytes; }

    const Source& source_;
    RingPosition<kSlots> ring_;
    uint32 where_[4];
  };
};

}  // namespace tilekern

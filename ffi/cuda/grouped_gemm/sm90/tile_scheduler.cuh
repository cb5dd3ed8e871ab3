// Which tiles of a ragged product a block computes: only the device knows how many there are.
#pragma once

#include "cluster.cuh"
#include "gemm/sm90/config.cuh"
#include "grouped_gemm/groups.cuh"
#include "mbarrier.cuh"
#include "ptx.cuh"
#include "rasterization.cuh"

namespace tilekern {

// The ragged dimension, as the kernel has it: columns of the output, of which a tile takes as many
// as a group has for it, or the contracted one.
enum class Ragged { kN, kK };

// To run before the kernel: nobody has taken an item yet.
__global__ void clear_items_taken(int32* items_taken) { *items_taken = 0; }

// Each item has its own amount of work, so a block takes its next one when it is about to need it.
// A thread of its own does that, for to find out what an item is takes as long as a few tiles of k.
// It is asked by the copying thread, and tells that and the multiplying warpgroups through a ring
// in shared memory.
//
// A cluster takes an item together, with tiles below each other: the thread is its first block's.
template <WgmmaConfig config, Ragged ragged, int line_step, int copy_step, int long_box_lines>
class RaggedItems {
  static constexpr int kSlots = 4;
  static constexpr int kSlotBytes = 64;
  static constexpr int kReaders = config.cluster * 4 * config.consumers;
  static constexpr int kNoMore = -1;
  static constexpr int kClusterM = config.cluster * config.block_m;
  static_assert(line_step % copy_step == 0 && long_box_lines % copy_step == 0);

  struct alignas(16) Item {
    WorkItem work;
    // Lines of the tile, or the first of k that are another's.
    int share;
    // None, if the tile is to be cleared.
    int k_tiles;
  };
  static_assert(sizeof(Item) == kSlotBytes);

 public:
  static constexpr bool kPartialLines = ragged == Ragged::kN;
  static constexpr bool kPartialK = ragged == Ragged::kK;
  static constexpr bool kScheduled = true;
  static constexpr int kLineStep = line_step;
  static constexpr int kCopyStep = copy_step;
  static constexpr int kLongBoxLines = long_box_lines;

  // Of shared memory: slots, a pair of barriers each, one for the copying thread to ask by, and
  // the number of each span's first tile.
  struct Source {
    const WgmmaShape& shape;
    const GroupShape& groups;
    const int32* bounds;
    // By all blocks.
    int32* items_taken;
    Item* slots = nullptr;
    uint32 barriers = 0;
    int32* first_tiles = nullptr;

    uint32 full(int slot) const { return barriers + slot * kBarrierBytes; }
    uint32 empty(int slot) const { return full(kSlots + slot); }
    uint32 asked() const { return full(2 * kSlots); }

    void prepare(unsigned char* shared) {
      slots = reinterpret_cast<Item*>(shared);
      shared += kSlots * sizeof(Item);
      barriers = shared_address(shared);
      first_tiles = reinterpret_cast<int32*>(shared + (2 * kSlots + 1) * kBarrierBytes);
      if (threadIdx.x == 0) {
        for (int slot = 0; slot < kSlots; ++slot) {
          init_barrier(full(slot), 1);
          init_barrier(empty(slot), kReaders);
        }
        init_barrier(asked(), config.cluster);
      }
      if (kPartialLines) {
        number_tiles(groups, bounds, config.block_n, first_tiles);
      }
    }
  };

  RaggedItems(const Source& source, int block) : source_(source), block_(block) {}

  // By the copying thread: for the next item, before it waits for that. A barrier counts the bytes
  // of what is sent.
  void ask() const {
    if (config.cluster > 1 && block_ > 0) {
      arrive_expecting(source_.full((ring_.stage + 1) % kSlots), kSlotBytes);
    }
    arrive_at_first(source_.asked());
  }

  bool next() {
    ring_.advance();
    wait(source_.full(ring_.stage), ring_.parity);
    return k_tiles() != kNoMore;
  }

  int k_tiles() const { return item().k_tiles; }
  int lines() const { return item().share; }
  int foreign_k() const { return item().share; }
  WorkItem work() const { return item().work; }

  // By all threads that multiply: after the last look at an item.
  void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_at_first(source_.empty(ring_.stage));
  }

  // By the thread that finds out what the items are, until there are no more.
  static void schedule(const Source& source) {
    RingPosition<kSlots> ring;
    uint32 parity = 0;
    for (bool found = true; found; ring.advance()) {
      wait(source.asked(), parity);
      parity ^= 1;
      wait(source.empty(ring.stage), ring.parity ^ 1);
      const int item = atomicAdd(source.items_taken, 1);
      found = item < items(source);
      Item& slot = source.slots[ring.stage];
      if (found) {
        slot = find(source, item);
      } else {
        slot.k_tiles = kNoMore;
      }
#pragma unroll
      for (int block = 1; block < config.cluster; ++block) send_item(source, ring.stage, block);
      arrive(source.full(ring.stage));
    }
  }

 private:
  // What the first block has been told. For what is merely stored, others would need a fence before
  // each look.
  static void send_item(const Source& source, int slot, int block) {
    Item item = source.slots[slot];
    item.work.m += block * config.block_m;
    constexpr int kParts = kSlotBytes / 16;
    const auto& words = reinterpret_cast<const uint32(&)[kParts][4]>(item);
    const uint32 address = shared_address(source.slots + slot);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      send(address + 16 * part, source.full(slot), block, words[part]);
    }
  }

  static void arrive_at_first(uint32 barrier) {
    if constexpr (config.cluster > 1) {
      arrive_remote(barrier, 0);
    } else {
      arrive(barrier);
    }
  }

  const Item& item() const { return source_.slots[ring_.stage]; }

  static int items(const Source& source) {
    const WgmmaShape& shape = source.shape;
    if constexpr (kPartialK) return shape.batches * shape.tiles_m * shape.tiles_n;
    return source.first_tiles[source.groups.spans()] * shape.tiles_m;
  }

  static Item find(const Source& source, int number) {
    const WgmmaShape& shape = source.shape;
    const GroupShape& groups = source.groups;
    Item item;
    WorkItem& work = item.work;
    if constexpr (kPartialK) {
      const int tiles = shape.tiles_m * shape.tiles_n;
      const int stacked = number / tiles;
      const TileCoordinates tile =
          banded_tile(number % tiles, shape.tiles_m, shape.tiles_n, shape.band);
      const Span span =
          group_span(groups, source.bounds, stacked / groups.groups, stacked % groups.groups);
      item.k_tiles = (span.rows() + config.block_k - 1) / config.block_k;
      work.m = tile.m * kClusterM;
      work.n = tile.n * config.block_n;
      // Tiles of k end where the group does, and the first one may begin before it.
      work.k = span.end - item.k_tiles * config.block_k;
      item.share = span.begin - work.k;
      set_batch(work, shape, stacked);
    } else {
      const int index = span_of_tile(source.first_tiles, groups.spans(), number / shape.tiles_m);
      const int first = source.first_tiles[index];
      const int tiles = source.first_tiles[index + 1] - first;
      const TileCoordinates tile =
          banded_tile(number - first * shape.tiles_m, shape.tiles_m, tiles, shape.band);
      const Span span = span_at(groups, source.bounds, index);
      // The span's steps are dealt out to its tiles, so that none is left with few.
      const int steps = (span.rows() + kLineStep - 1) / kLineStep;
      const int before = tile.n * (steps / tiles) + min_of(tile.n, steps % tiles);
      const int own = steps / tiles + (tile.n < steps % tiles);
      item.k_tiles = span.is_group() ? shape.k_tiles : 0;
      work.m = tile.m * kClusterM;
      work.n = span.begin + before * kLineStep;
      work.k = 0;
      item.share = min_of(own * kLineStep, span.end - work.n);
      set_batch(work, shape, span.batch * groups.groups + max_of(span.group, 0));
      // All groups share the output.
      work.out_batch[kBoxBatchDims - 1] = 0;
    }
    return item;
  }

  const Source& source_;
  int block_;
  // Before the first.
  RingPosition<kSlots> ring_ = {kSlots - 1, 1};
};

}  // namespace tilekern

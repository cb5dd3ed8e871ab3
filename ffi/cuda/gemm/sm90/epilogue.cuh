// Stores a warpgroup's sums: slab by slab through shared memory, by the copy engine where the
// output's strides allow. That takes some 2500 cycles for a tile of 128x256, so results that fit in
// the registers wait there, and are stored while the next tile's products run.
#pragma once

#include "gemm/sm90/config.cuh"
#include "ptx.cuh"
#include "tma.cuh"

namespace tilekern {

// Rows of 128 bytes along the output's unit stride, swizzled like the copy engine's.
inline constexpr int kSlabBytes = 8192;
inline constexpr int kSlabRowBytes = 128;
inline constexpr int kSlabs = 2;

// Where a warpgroup's rows of a tile lie in the output.
struct OutputOrigin {
  int m;
  int n;
  int batch[kBoxBatchDims];
  // How many columns of a tile that may be partial are to be stored.
  int lines;
};

// kPairedRows tells that sums for rows g and 8+g of a warp's product are rows 2g and 2g+1 of its
// part of the output; kPartialLines, that some of a tile's columns may not be its own.
template <typename Out, WgmmaConfig config, bool kPairedRows, bool kPartialLines>
class WgmmaEpilogue {
  static constexpr int kSize = sizeof(Out);
  static constexpr bool kMajorM = config.out_m_major;
  // A box of the output, as `plans/gemm/sm90/launch.py` has it; a slab has 64 rows.
  static constexpr int kRowElements = kSlabRowBytes / kSize;
  static constexpr int kColumns = kMajorM ? min_of(config.block_n, kRowElements) : kRowElements;
  static constexpr int kBoxes = kMajorM ? 64 / kRowElements : 1;
  static constexpr int kBoxBytes = kColumns * kSlabRowBytes;
  // Of a slab, lines along the output's unit stride.
  static constexpr int kLines = kMajorM ? kColumns : 64;
  static_assert(kMajorM || !kPartialLines);
  static_assert(config.block_n % kColumns == 0 && kColumns % 16 == 0);
  // Two-byte outputs go by 8x8 matrices, unless pairs of rows are adjacent in memory anyway.
  static constexpr bool kMatrices = kSize == 2 && !(kMajorM && kPairedRows);

  static constexpr int kRowBlocks = config.consumer_m() / 64;
  static constexpr int kSlabsPerRowBlock = config.block_n / kColumns;
  static constexpr int kTileSlabs = kRowBlocks * kSlabsPerRowBlock;
  // Whether results wait. Consumers that take turns have each other to multiply meanwhile.
  static constexpr bool kDeferred =
      kMatrices && !kPairedRows && config.out_boxes && config.cooperative;
  static constexpr int kResultWords = kDeferred ? kRowBlocks * config.block_n / 4 : 1;
  static_assert(kResultWords <= 64, "registers");
  static constexpr int kSlabWords = kResultWords / kTileSlabs;
  // Tiles of k from one store to the next, where there are many: writes in a row delay the loads of
  // all blocks.
  static constexpr int kStoreInterval = 4;
  static constexpr int kManyTiles = 6 * kStoreInterval;
  // Of promoted sums a partial slab, which threads copy, is stored when no products run: the
  // assembler would serialize them for want of registers.
  static constexpr bool kWholeOnly = config.promote;

 public:
  // `barrier` is the warpgroup's named barrier.
  WgmmaEpilogue(uint32 slabs, int barrier, const TensorMap& map, Out* out, const WgmmaShape& shape)
      : map_(map), out_(out), shape_(shape), slabs_(slabs), barrier_(barrier) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16;
    const int g = lane / 4, t = lane % 4;
    leader_ = threadIdx.x % 128 == 0;
    if constexpr (kMatrices) {
      // Lanes 8i to 8i+7 give the rows of matrix i: halves of two octets.
      const int half = lane / 8 % 2, octet = lane / 16, line = lane % 8;
      lane_offset_ = kMajorM ? offset(first_row + 8 * half, 8 * octet + line)
                             : offset(first_row + row_of(line, half), 8 * octet);
    } else {
      lane_offset_ = offset(first_row + row_of(g, 0), 2 * t);
    }
  }

  template <typename Sum, int kCount>
  void store(const Sum (&sums)[kRowBlocks][kCount], const OutputOrigin& origin) {
    finish();
    origin_ = origin;
    next_ = 0;
    if constexpr (kDeferred) {
#pragma unroll
      for (int i = 0; i < kResultWords; ++i) {
        const Sum* pair = &sums[0][0] + 2 * i;
        results_[i] = packed(pair[0], pair[1]).words[0];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTileSlabs; ++i) {
        store_slab<false>([&](uint32 slab) {
          const Sum* first = &sums[0][0] + i * kColumns / 2;
#pragma unroll
          for (int octet = 0; octet < kColumns / 8; octet += 2) {
            const Sum* pair = first + 4 * octet;
            if constexpr (kMatrices) {
              stage_matrices(slab + at_octet(octet), pair);
            } else {
              stage_octet(slab + at_octet(octet), pair);
              stage_octet(slab + at_octet(octet + 1), pair + 4);
            }
          }
        });
      }
    }
  }

  // While the products of a tile of k run: stores a slab, if one waits and it is time.
  void store_next(int tile, int k_tiles) {
    if constexpr (kDeferred) {
      const bool time = k_tiles < kManyTiles || tile % kStoreInterval == kStoreInterval - 1;
      if constexpr (kWholeOnly) {
        if (next_ < kTileSlabs && lines_from(first_column(next_)) >= kLines) store_waiting<true>();
      } else if (time && next_ < kTileSlabs) {
        store_waiting<false>();
      }
    }
  }

  // Stores all that waits.
  void finish() {
    if constexpr (kDeferred) {
#pragma unroll 1
      while (next_ < kTileSlabs) store_waiting<false>();
    }
  }

  // Before the block ends.
  void wait() const {
    if (config.out_boxes && leader_) wait_stores_read<0>();
  }

 private:
  void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(barrier_) : "memory"); }

  static constexpr int offset(int row, int column) {
    if constexpr (kMajorM) {
      const int byte = row * kSize;
      return byte / kSlabRowBytes * kBoxBytes + column * kSlabRowBytes +
             (byte % kSlabRowBytes ^ column % 8 * 16);
    } else {
      return row * kSlabRowBytes + (column * kSize ^ row % 8 * 16);
    }
  }

  static constexpr int row_of(int g, int half) { return kPairedRows ? 2 * g + half : 8 * half + g; }

  // The lane's offsets elsewhere, on bits of the swizzled part that are 0 or known in it.
  uint32 at_octet(int octet) const {
    return kMajorM ? lane_offset_ + octet * 8 * kSlabRowBytes : lane_offset_ ^ octet * 8 * kSize;
  }
  static uint32 next_line(uint32 address) { return (address ^ 16) + kSlabRowBytes; }

  static int first_column(int number) { return number % kSlabsPerRowBlock * kColumns; }
  int lines_from(int column) const { return kPartialLines ? origin_.lines - column : kLines; }

  // The next slab, which `stage` writes to shared memory.
  template <bool kWhole, typename Stage>
  void store_slab(const Stage& stage) {
    const int row = next_ / kSlabsPerRowBlock * 64, first = first_column(next_);
    const int lines = lines_from(first);
    ++next_;
    if (kPartialLines && lines <= 0) return;
    const uint32 slab = slabs_ + slab_ * kSlabBytes;
    slab_ ^= 1;
    if (config.out_boxes && leader_) wait_stores_read<kSlabs - 1>();
    sync();
    stage(slab);
    if (kWhole || (config.out_boxes && lines >= kLines)) {
      fence_async_proxy();
      sync();
      if (leader_) send_slab(slab, row, first);
    } else {
      sync();
      copy_slab(slab, row, first, lines);
    }
    // Of nothing, if other threads have copied the slab: slabs take turns all the same.
    if (config.out_boxes && leader_) commit_stores();
  }

  template <bool kWhole>
  void store_waiting() {
    const int number = next_;
    store_slab<kWhole>([&](uint32 slab) {
#pragma unroll
      for (int i = 0; i < kTileSlabs; ++i) {
        if (number == i) {
#pragma unroll
          for (int pair = 0; pair < kSlabWords / 4; ++pair) {
            stage_words(slab + at_octet(2 * pair), results_ + i * kSlabWords + 4 * pair);
          }
        }
      }
    });
  }

  // Two octets of columns at once, of two-byte outputs.
  template <typename Sum>
  static void stage_matrices(uint32 address, const Sum* sums) {
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = packed(sums[2 * i], sums[2 * i + 1]).words[0];
    stage_words(address, words);
  }
  static void stage_words(uint32 address, const uint32* four) {
    const uint32 words[4] = {four[0], four[1], four[2], four[3]};
    if constexpr (kMajorM) {
      store_matrices_transposed(address, words);
    } else {
      store_matrices(address, words);
    }
  }

  template <typename Sum>
  static void stage_octet(uint32 address, const Sum* sums) {
    if constexpr (!kMajorM) {
      stage_pair(address, sums[0], sums[1]);
      stage_pair(kPairedRows ? next_line(address) : address + 8 * kSlabRowBytes, sums[2], sums[3]);
    } else if constexpr (kPairedRows) {
      stage_pair(address, sums[0], sums[2]);
      stage_pair(next_line(address), sums[1], sums[3]);
    } else {
      store_shared(address, sums[0]);
      store_shared(next_line(address), sums[1]);
      store_shared(address ^ 8 * kSize, sums[2]);
      store_shared(next_line(address ^ 8 * kSize), sums[3]);
    }
  }

  template <typename Sum>
  static void stage_pair(uint32 address, Sum first, Sum second) {
    if constexpr (kSame<Sum, Out>) {
      store_shared(address, first, second);
    } else {
      store_shared(address, packed(first, second).words);
    }
  }

  struct Packed {
    uint32 words[kSize / 2];
  };
  template <typename Sum>
  static Packed packed(Sum first, Sum second) {
    Packed pair;
    pack_pair(pair.words, static_cast<Out*>(nullptr), first, second);
    return pair;
  }

  void send_slab(uint32 slab, int row, int first) const {
    const int (&batch)[kBoxBatchDims] = origin_.batch;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int m = origin_.m + row + box * kRowElements, n = origin_.n + first;
      store_box(map_, {{kMajorM ? m : n, kMajorM ? n : m, batch[2], batch[1], batch[0]}},
                slab + box * kBoxBytes);
    }
  }

  void copy_slab(uint32 slab, int first_row, int first, int lines) const {
    // Elements that are adjacent in the output, as many as are copied at a time.
    constexpr int kRun = config.out_boxes ? 16 / kSize : 1;
    constexpr int kRuns = (kMajorM ? 64 : kColumns) / kRun;
    Out* target = out_;
#pragma unroll
    for (int dim = 0; dim < kBoxBatchDims; ++dim) {
      target += origin_.batch[dim] * shape_.out_batch_strides[dim];
    }
    // Beside sums and results, a thread has registers for one run at a time.
    constexpr int kUnrolled = kDeferred && !kWholeOnly ? 1 : 4;
#pragma unroll kUnrolled
    for (int i = threadIdx.x % 128; i < kLines * kRuns; i += 128) {
      const int line = i / kRuns, within = i % kRuns * kRun;
      const int row = kMajorM ? within : line, column = kMajorM ? line : within;
      const int m = origin_.m + first_row + row, n = origin_.n + first + column;
      if (line < lines && m < shape_.m && n < shape_.n) {
        const int64 at = kMajorM ? n * shape_.out_stride + m : m * shape_.out_stride + n;
        copy_run<kRun>(target + at, slab + offset(row, column));
      }
    }
  }

  template <int kRun>
  static void copy_run(Out* target, uint32 address) {
    if constexpr (kRun == 1) {
      *target = load_shared_as<Out>(address);
    } else {
      uint32 words[4];
      load_shared(words, address);
      *reinterpret_cast<uint4*>(target) = {words[0], words[1], words[2], words[3]};
    }
  }

  const TensorMap& map_;
  Out* out_;
  const WgmmaShape& shape_;
  uint32 slabs_;
  // The one to use next of the two.
  uint32 slab_ = 0;
  // Of the tile that is stored: where it is, its results if they wait, and the next slab's number.
  OutputOrigin origin_;
  uint32 results_[kResultWords];
  int next_ = kTileSlabs;
  int barrier_;
  uint32 lane_offset_;
  bool leader_;
};

}  // namespace tilekern

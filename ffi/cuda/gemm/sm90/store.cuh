// Stores a consumer's results: subtile by subtile through shared memory, by TMA where the output's
// strides are multiples of 16 bytes, and otherwise by threads, element by element. TMA clips what
// lies beyond the output. That takes some 2500 cycles for a tile of 128x256, so results that fit in
// registers wait there, and are stored while the next tile's MMAs are in flight.
#pragma once

#include "gemm/sm90/config.cuh"
#include "gemm/sm90/epilogue.cuh"
#include "gemm/sm90/pipeline.cuh"
#include "ptx.cuh"
#include "tma.cuh"

namespace tilekern {

// An epilogue subtile has rows along the output's unit stride, with TMA's swizzle: of 128 bytes, or
// of 64 where a tile's columns are no multiple of that. Each consumer has a ring of buffers for
// them.
inline constexpr int kSubtileBytes = 8192;
inline constexpr int kSubtileRowBytes = 128;
inline constexpr int kSubtileBuffers = 2;

// Where a consumer's rows of a work tile lie in the output.
struct OutputOrigin {
  int m;
  int n;
  int batch[kMaxTmaBatchDims];
  // How many columns, or rows, of a tile that may be partial are stored.
  int lines;
};

// `Layout` is the accumulators' (WgmmaAccumulatorLayout). kPartial says that some of a tile's
// lines may not be its own: its columns if the output's unit stride is along m, its rows
// otherwise. kMirrors says that the output is symmetric. Then blocks of
// 64x64 below the diagonal are stored twice, the second time transposed, and those above it are
// not. kMayWait says that results have registers beside the next tile's accumulators.
template <typename Out, WgmmaConfig config, class Layout, bool kPartial, bool kMirrors,
          bool kMayWait>
class TileStore {
  static constexpr bool kPairedRows = Layout::kPairedRows;
  static constexpr int kSize = sizeof(Out);
  static constexpr bool kMajorM = config.out_m_major;
  // A TMA tile of the output, as `plans/gemm/sm90/tiling.py` has it; a subtile has 64 rows of M.
  static constexpr int kRowElements = kSubtileRowBytes / kSize;
  static constexpr int kColumns = gcd(config.out_n(), kRowElements);
  // Bytes of a row along N, and how many rows have the same chunks of 16 bytes swizzled.
  static constexpr int kRowBytes = kColumns * kSize;
  static constexpr int kSwizzledRows = kSubtileRowBytes / kRowBytes;
  static_assert(kMajorM || kRowBytes == kSubtileRowBytes || (kRowBytes == 64 && !kPairedRows));
  template <bool kAlongM>
  static constexpr int kTmaTiles = kAlongM ? 64 / kRowElements : 1;
  static constexpr int kTmaTileBytes = kColumns * kSubtileRowBytes;
  // Rows of a subtile along the output's unit stride.
  static constexpr int kStoredRows = kMajorM ? kColumns : 64;
  static constexpr int kMirrorBlock = 64;
  static_assert(!kMirrors || (config.tma_store && !kMajorM && !kPairedRows && !kPartial &&
                              kMirrorBlock % kColumns == 0));
  static_assert(kSubtileBuffers == 2, "buffers alternate");
  static_assert(config.out_n() % kColumns == 0 && kColumns % 16 == 0);
  // Two-byte results are stored by stmatrix, unless pairs of rows are adjacent in memory anyway.
  static constexpr bool kMatrices = kSize == 2 && !(kMajorM && kPairedRows);

  static constexpr int kRowBlocks = config.consumer_out_m() / 64;
  static constexpr int kSubtilesPerRowBlock = config.out_n() / kColumns;
  static constexpr int kTileSubtiles = kRowBlocks * kSubtilesPerRowBlock;
  // Mirrored subtiles follow the others.
  static constexpr int kEnd = kMirrors ? 2 * kTileSubtiles : kTileSubtiles;
  // Whether results wait in registers. Ping-pong consumers have each other to multiply meanwhile.
  static constexpr bool kDeferred =
      kMayWait && kMatrices && !kPairedRows && config.tma_store && config.cooperative;
  static constexpr int kResultWords = kDeferred ? kRowBlocks * config.out_n() / 4 : 1;
  static_assert(kResultWords <= 64, "registers");
  static constexpr int kSubtileWords = kResultWords / kTileSubtiles;
  static constexpr int kRowBlockWords = kResultWords / kRowBlocks;
  // From one store to the next there are so many k-tiles, if a work tile has many: stores in quick
  // succession delay the loads of all CTAs.
  static constexpr int kStoreInterval = 4;
  static constexpr int kManyTiles = 6 * kStoreInterval;
  // Beside promoted accumulators, a partial subtile, which threads copy, is stored when no MMAs are
  // in flight: ptxas would serialise them for want of registers.
  static constexpr bool kWholeOnly = config.promote;

 public:
  // `barrier` is the consumer's named barrier. `mirror_map` is that of mirrored tiles.
  TileStore(uint32 buffers, int barrier, const TensorMap& map, const TensorMap& mirror_map,
            Out* out, const WgmmaShape& shape)
      : map_(map),
        mirror_map_(mirror_map),
        out_(out),
        shape_(shape),
        buffers_(buffers),
        barrier_(barrier),
        lane_offset_(lane_offset<kMajorM>()) {
    leader_ = threadIdx.x % 128 == 0;
  }

  // Stores a work tile's results, or has them wait. Nothing may be waiting: flush() is called
  // before. The results of a pair are the first half of a row block's accumulators, or the
  // accumulators of every other row block.
  template <typename Accumulator, int kBlocks, int kCount>
  void store(const Accumulator (&accumulators)[kBlocks][kCount], const OutputOrigin& origin) {
    origin_ = origin;
    next_ = 0;
    if constexpr (kDeferred) {
#pragma unroll
      for (int i = 0; i < kResultWords; ++i) {
        const Accumulator* block = accumulators[i / kRowBlockWords * (kBlocks / kRowBlocks)];
        const Accumulator* pair = block + i % kRowBlockWords * 2;
        results_[i] = packed(pair[0], pair[1]).words[0];
      }
    } else {
      store_all<kMajorM>(accumulators);
      if constexpr (kMirrors) store_all<true>(accumulators);
    }
  }

  // Stores a subtile, if one waits and it is time; called while MMAs of a k-tile are in flight.
  void store_waiting(int k_tile, int k_tiles) {
    if constexpr (kDeferred) {
      const bool time = k_tiles < kManyTiles || k_tile % kStoreInterval == kStoreInterval - 1;
      if constexpr (kWholeOnly) {
        if (next_ < kEnd && stored_lines(next_) >= kStoredRows) store_next<true>();
      } else if (time && next_ < kEnd) {
        store_next<false>();
      }
    }
  }

  // Stores all that waits.
  void flush() {
    if constexpr (kDeferred) {
#pragma unroll 1
      while (next_ < kEnd) store_next<false>();
    }
  }

  // Waits until TMA has read the buffers, before the CTA ends.
  void wait_read() const {
    if (config.tma_store && leader_) tma_store_wait_read<0>();
  }

 private:
  void sync() const { sync_consumer(barrier_); }

  template <bool kAlongM, typename Accumulator, int kBlocks, int kCount>
  void store_all(const Accumulator (&accumulators)[kBlocks][kCount]) {
#pragma unroll
    for (int i = 0; i < kTileSubtiles; ++i) {
      store_subtile<false, kAlongM>([&](uint32 buffer) {
        const Accumulator* first = accumulators[i / kSubtilesPerRowBlock * (kBlocks / kRowBlocks)] +
                                   i % kSubtilesPerRowBlock * kColumns / 2;
#pragma unroll
        for (int block = 0; block < kColumns / 8; block += 2) {
          const Accumulator* pair = first + 4 * block;
          if constexpr (kMatrices) {
            stage_matrices<kAlongM>(buffer + at_block<kAlongM>(block), pair);
          } else {
            stage_block<kAlongM>(buffer + at_block<kAlongM>(block), pair);
            stage_block<kAlongM>(buffer + at_block<kAlongM>(block + 1), pair + 4);
          }
        }
      });
    }
  }

  // Where the lane stages its part of a subtile, which lies along M or along N.
  template <bool kAlongM>
  static uint32 lane_offset() {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16;
    const int g = lane / 4, t = lane % 4;
    if constexpr (kMatrices) {
      // Lanes 8i to 8i+7 give the addresses of matrix i: rows of two blocks of 8 columns by 16
      // rows.
      const int half = lane / 8 % 2, block = lane / 16, line = lane % 8;
      return kAlongM ? offset<kAlongM>(first_row + 8 * half, 8 * block + line)
                     : offset<kAlongM>(first_row + Layout::row_of(line, half), 8 * block);
    } else {
      return offset<kAlongM>(first_row + Layout::row_of(g, 0), 2 * t);
    }
  }

  template <bool kAlongM>
  static constexpr int offset(int row, int column) {
    if constexpr (kAlongM) {
      const int byte = row * kSize;
      return byte / kSubtileRowBytes * kTmaTileBytes + column * kSubtileRowBytes +
             (byte % kSubtileRowBytes ^ column % 8 * 16);
    } else {
      constexpr int kChunks = kRowBytes / 16;
      return row * kRowBytes + (column * kSize ^ row / kSwizzledRows % kChunks * 16);
    }
  }

  // The lane's offset moved by blocks of 8 columns, or by a row: the XOR changes bits of the
  // swizzled part that are 0 or known in the lane's offset.
  template <bool kAlongM>
  uint32 at_block(int block) const {
    const uint32 first = kAlongM == kMajorM ? lane_offset_ : lane_offset<kAlongM>();
    return kAlongM ? first + block * 8 * kSubtileRowBytes : first ^ block * 8 * kSize;
  }
  static uint32 next_row(uint32 address) { return (address ^ 16) + kSubtileRowBytes; }

  static int first_row(int number) { return number / kSubtilesPerRowBlock * 64; }
  static int first_column(int number) { return number % kSubtilesPerRowBlock * kColumns; }
  // How many of a subtile's lines are stored, if they exist.
  int stored_lines(int number) const {
    if (!kPartial) return kStoredRows;
    return origin_.lines - (kMajorM ? first_column(number) : first_row(number));
  }

  // Whether a subtile of a symmetric output is stored, or its mirror image.
  template <bool kMirror>
  bool is_stored(int row, int column) const {
    const int below = (origin_.m + row) / kMirrorBlock - (origin_.n + column) / kMirrorBlock;
    return kMirror ? below > 0 : below >= 0;
  }

  // Stores the next subtile, which `stage` writes to a buffer in shared memory.
  template <bool kWhole, bool kAlongM, typename Stage>
  void store_subtile(const Stage& stage) {
    const int number = kMirrors ? next_ % kTileSubtiles : next_;
    const int row = first_row(number), first = first_column(number);
    const int rows = stored_lines(number);
    ++next_;
    if (kPartial && rows <= 0) return;
    if (kMirrors && !is_stored<kAlongM>(row, first)) return;
    const uint32 buffer = buffers_ + buffer_ * kSubtileBytes;
    buffer_ ^= 1;
    if (config.tma_store && leader_) tma_store_wait_read<kSubtileBuffers - 1>();
    sync();
    stage(buffer);
    if (kWhole || (config.tma_store && rows >= kStoredRows)) {
      fence_async_proxy();
      sync();
      if (leader_) tma_store_subtile<kAlongM>(buffer, row, first);
    } else {
      sync();
      copy_subtile(buffer, row, first, rows);
    }
    // A subtile that threads have copied commits an empty group: buffers are reused in order, and
    // the wait above counts groups.
    if (config.tma_store && leader_) tma_store_commit();
  }

  template <bool kWhole>
  void store_next() {
    if constexpr (kMirrors) {
      if (next_ >= kTileSubtiles) {
        store_next_waiting<kWhole, true>(next_ - kTileSubtiles);
        return;
      }
    }
    store_next_waiting<kWhole, kMajorM>(next_);
  }

  template <bool kWhole, bool kAlongM>
  void store_next_waiting(int number) {
    store_subtile<kWhole, kAlongM>([&](uint32 buffer) {
#pragma unroll
      for (int i = 0; i < kTileSubtiles; ++i) {
        if (number == i) {
#pragma unroll
          for (int pair = 0; pair < kSubtileWords / 4; ++pair) {
            stage_words<kAlongM>(buffer + at_block<kAlongM>(2 * pair),
                                 results_ + i * kSubtileWords + 4 * pair);
          }
        }
      }
    });
  }

  // Writes two blocks of 8 columns of two-byte results at once.
  template <bool kAlongM, typename Accumulator>
  static void stage_matrices(uint32 address, const Accumulator* accumulators) {
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = packed(accumulators[2 * i], accumulators[2 * i + 1]).words[0];
    stage_words<kAlongM>(address, words);
  }
  template <bool kAlongM>
  static void stage_words(uint32 address, const uint32* four) {
    const uint32 words[4] = {four[0], four[1], four[2], four[3]};
    if constexpr (kAlongM) {
      stmatrix_trans(address, words);
    } else {
      stmatrix(address, words);
    }
  }

  template <bool kAlongM, typename Accumulator>
  static void stage_block(uint32 address, const Accumulator* accumulators) {
    if constexpr (!kAlongM) {
      stage_pair(address, accumulators[0], accumulators[1]);
      stage_pair(kPairedRows ? next_row(address) : address + 8 * kRowBytes, accumulators[2],
                 accumulators[3]);
    } else if constexpr (kPairedRows) {
      stage_pair(address, accumulators[0], accumulators[2]);
      stage_pair(next_row(address), accumulators[1], accumulators[3]);
    } else {
      store_shared(address, accumulators[0]);
      store_shared(next_row(address), accumulators[1]);
      store_shared(address ^ 8 * kSize, accumulators[2]);
      store_shared(next_row(address ^ 8 * kSize), accumulators[3]);
    }
  }

  template <typename Accumulator>
  static void stage_pair(uint32 address, Accumulator first, Accumulator second) {
    if constexpr (kSame<Accumulator, Out>) {
      store_shared(address, first, second);
    } else {
      store_shared(address, packed(first, second).words);
    }
  }

  struct Packed {
    uint32 words[kSize / 2];
  };
  template <typename Accumulator>
  static Packed packed(Accumulator first, Accumulator second) {
    Packed pair;
    pack_pair(pair.words, static_cast<Out*>(nullptr), first, second);
    return pair;
  }

  template <bool kAlongM>
  void tma_store_subtile(uint32 buffer, int row, int first) const {
    const int (&batch)[kMaxTmaBatchDims] = origin_.batch;
#pragma unroll
    for (int tile = 0; tile < kTmaTiles<kAlongM>; ++tile) {
      const int m = origin_.m + row + tile * kRowElements, n = origin_.n + first;
      tma_store(kAlongM == kMajorM ? map_ : mirror_map_,
                {{kAlongM ? m : n, kAlongM ? n : m, batch[2], batch[1], batch[0]}},
                buffer + tile * kTmaTileBytes);
    }
  }

  void copy_subtile(uint32 buffer, int first_row, int first, int rows) const {
    // Elements that are adjacent in the output are copied so many at a time.
    constexpr int kRun = config.tma_store ? 16 / kSize : 1;
    constexpr int kRuns = (kMajorM ? 64 : kColumns) / kRun;
    Out* target = out_;
#pragma unroll
    for (int dim = 0; dim < kMaxTmaBatchDims; ++dim) {
      target += origin_.batch[dim] * shape_.out_batch_strides[dim];
    }
    // Beside accumulators and results, a thread has registers for one run at a time.
    constexpr int kUnrolled = kDeferred && !kWholeOnly ? 1 : 4;
#pragma unroll kUnrolled
    for (int i = threadIdx.x % 128; i < kStoredRows * kRuns; i += 128) {
      const int line = i / kRuns, within = i % kRuns * kRun;
      const int row = kMajorM ? within : line, column = kMajorM ? line : within;
      const int m = origin_.m + first_row + row, n = origin_.n + first + column;
      if (line < rows && m < shape_.m && n < shape_.n) {
        const int64 at = kMajorM ? n * shape_.out_stride + m : m * shape_.out_stride + n;
        copy_run<kRun>(target + at, buffer + offset<kMajorM>(row, column));
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
  const TensorMap& mirror_map_;
  Out* out_;
  const WgmmaShape& shape_;
  uint32 buffers_;
  // Which of the two buffers is next.
  uint32 buffer_ = 0;
  // The tile that is stored: where it lies, its results if they wait, and its next subtile's
  // number.
  OutputOrigin origin_;
  uint32 results_[kResultWords];
  int next_ = kEnd;
  int barrier_;
  uint32 lane_offset_;
  bool leader_;
};

}  // namespace tilekern

// Transposes of a few long rows or of many short ones, for example of 3 by n or n by 3 items. Long
// rows are aligned to 16 bytes.
#pragma once

#include "transpose/shape.cuh"

namespace tilekern {

// Compile-time choices; `NarrowTranspose` in `plans/transpose/narrow.py` makes them.
struct NarrowConfig {
  int item_bytes;
  // Items in the short dimension, which form a record; there is one record for each index of the
  // long dimension.
  int narrow;
  // Groups of records per thread.
  int groups;
  // Whether the source has the records, rather than the result.
  bool split;

  // A group is the smallest number of records that fills whole 32-bit words of each long row.
  constexpr int group() const { return max_of(1, 4 / item_bytes); }
  constexpr int row_words() const { return max_of(1, item_bytes / 4); }
  constexpr int words() const { return narrow * row_words(); }
};

inline constexpr int kNarrowThreads = 256;

// `NarrowTranspose` packs the same fields. Strides are in bytes.
struct NarrowShape {
  OuterDims outer;
  int64 length;
  // The distance between long rows.
  int64 row_stride;
  Divisor tiles;
};

extern __shared__ __align__(128) unsigned char transpose_narrow_shared[];

// Returns the bytes at four positions of an array of kWords words, by one or three permute_bytes():
// the positions are constants once loops are unrolled.
template <int kWords>
inline uint32 pick_bytes(const uint32 (&words)[kWords], int a, int b, int c, int d) {
  if (a % 4 == 0 && b == a + 1 && c == a + 2 && d == a + 3) return words[a / 4];
  if (b == a + 1 && d == c + 1 && a % 2 == 0 && c % 2 == 0) {
    return permute_bytes(words[a / 4], words[c / 4],
                         (a % 4) | (a % 4 + 1) << 4 | (c % 4 + 4) << 8 | (c % 4 + 5) << 12);
  }
  return permute_bytes(permute_bytes(words[a / 4], words[b / 4], a % 4 | (b % 4 + 4) << 4),
                       permute_bytes(words[c / 4], words[d / 4], c % 4 | (d % 4 + 4) << 4), 0x5410);
}

// Threads of a warp access adjacent words of long rows in global memory. Records pass through
// shared memory, and between it and global memory in vectors of 16 bytes.
template <NarrowConfig config>
class NarrowTransposer {
  static constexpr int kItemBytes = config.item_bytes;
  static constexpr int kWords = config.words();
  static constexpr int kRowWords = config.row_words();
  static constexpr int kRowBytes = 4 * kRowWords;
  static constexpr int kTileGroups = config.groups * kNarrowThreads;
  // Words of records per shared-memory access.
  static constexpr int kWide = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1;

 public:
  NarrowTransposer(const char* source, char* result, const NarrowShape& shape) : shape_(shape) {
    const Quotient at = divide(blockIdx.x, shape.tiles);
    const OuterOffsets offsets = outer_offsets(shape.outer, at.quotient);
    const int64 first = static_cast<int64>(at.remainder) * kTileGroups;
    // A row has a whole number of 16-byte vectors, and therefore of groups.
    groups_ = static_cast<int>(min_of<int64>(kTileGroups, shape.length / config.group() - first));
    const int64 records = first * kWords * 4, rows = first * kRowBytes;
    source_ = source + offsets.source + (config.split ? records : rows);
    result_ = result + offsets.result + (config.split ? rows : records);
  }

  void run() const {
    if constexpr (config.split) {
      split();
    } else {
      interleave();
    }
  }

 private:
  using Group = uint32[kWords];

  // Padding of 16 bytes after every 128 spreads the records over the banks.
  static int padded(int byte) { return byte + byte / 128 * 16; }
  int chunks() const { return groups_ * kWords / 4; }

  void split() const {
    const uint32 shared = shared_address(transpose_narrow_shared);
#pragma unroll 4
    for (int i = threadIdx.x; i < chunks(); i += kNarrowThreads) {
      cp_async<16>(shared + padded(16 * i), source_ + 16 * i, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int group = threadIdx.x; group < groups_; group += kNarrowThreads) {
      Group records;
#pragma unroll
      for (int i = 0; i < kWords; i += kWide) {
        uint32 some[kWide];
        load_shared(some, shared + padded(4 * (group * kWords + i)));
#pragma unroll
        for (int j = 0; j < kWide; ++j) records[i + j] = some[j];
      }
#pragma unroll
      for (int row = 0; row < config.narrow; ++row) {
        uint32 words[kRowWords];
        row_of(words, records, row);
        store_row(result_ + row * shape_.row_stride + group * kRowBytes, words);
      }
    }
  }

  void interleave() const {
    const uint32 shared = shared_address(transpose_narrow_shared);
    Group rows[config.groups];
#pragma unroll
    for (int i = 0; i < config.groups; ++i) {
      const int group = threadIdx.x + i * kNarrowThreads;
      if (group < groups_) load_rows(rows[i], source_ + group * kRowBytes);
    }
#pragma unroll
    for (int i = 0; i < config.groups; ++i) {
      const int group = threadIdx.x + i * kNarrowThreads;
      if (group >= groups_) continue;
#pragma unroll
      for (int word = 0; word < kWords; word += kWide) {
        uint32 some[kWide];
#pragma unroll
        for (int j = 0; j < kWide; ++j) some[j] = record_word(rows[i], word + j);
        store_shared(shared + padded(4 * (group * kWords + word)), some);
      }
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < chunks(); i += kNarrowThreads) {
      *reinterpret_cast<uint4*>(result_ + 16 * i) =
          *reinterpret_cast<const uint4*>(transpose_narrow_shared + padded(16 * i));
    }
  }

  // Returns the words of a group's records in one of the long rows.
  static void row_of(uint32 (&words)[kRowWords], const Group& records, int row) {
#pragma unroll
    for (int i = 0; i < kRowWords; ++i) {
      const auto place = [&](int byte) {
        return (byte / kItemBytes * config.narrow + row) * kItemBytes + byte % kItemBytes;
      };
      words[i] =
          pick_bytes(records, place(4 * i), place(4 * i + 1), place(4 * i + 2), place(4 * i + 3));
    }
  }

  // Returns a word of a group's records from the words of the long rows, the inverse.
  static uint32 record_word(const Group& rows, int word) {
    const auto place = [&](int byte) {
      const int item = byte / kItemBytes;
      return item % config.narrow * kRowBytes + item / config.narrow * kItemBytes +
             byte % kItemBytes;
    };
    return pick_bytes(rows, place(4 * word), place(4 * word + 1), place(4 * word + 2),
                      place(4 * word + 3));
  }

  void load_rows(Group& rows, const char* source) const {
#pragma unroll
    for (int row = 0; row < config.narrow; ++row) {
      using Vector = Item<kRowBytes>;
      const Vector vector = *reinterpret_cast<const Vector*>(source + row * shape_.row_stride);
#pragma unroll
      for (int i = 0; i < kRowWords; ++i) {
        rows[row * kRowWords + i] = reinterpret_cast<const uint32(&)[kRowWords]>(vector)[i];
      }
    }
  }

  static void store_row(char* result, const uint32 (&words)[kRowWords]) {
    Item<kRowBytes> vector;
#pragma unroll
    for (int i = 0; i < kRowWords; ++i) {
      reinterpret_cast<uint32(&)[kRowWords]>(vector)[i] = words[i];
    }
    *reinterpret_cast<Item<kRowBytes>*>(result) = vector;
  }

  const NarrowShape& shape_;
  const char* source_;
  char* result_;
  int groups_;
};

template <NarrowConfig config>
__global__ void __launch_bounds__(kNarrowThreads)
    transpose_narrow(const char* __restrict__ source, char* __restrict__ result,
                     const __grid_constant__ NarrowShape shape) {
  NarrowTransposer<config>(source, result, shape).run();
}

}  // namespace tilekern

// A lane's part of an operand: from a tile in shared memory, at any alignment, to registers.
#pragma once

#include "gemm/small/rows.cuh"

namespace tilekern {

// The lane reads kCount consecutive elements along k of kLines lines, which are rows of lhs or
// columns of rhs.
template <typename T, SmallOperandConfig config, SmallArrayShape array, int kLines, int kCount>
class SmallFragments {
  static constexpr int kSize = sizeof(T);
  static constexpr int kLoadBytes = config.load_bytes;
  // What the shift of a row has more than that of the row before.
  static constexpr int kStride = array.stride % kVectorBytes;
  // Whether elements across k are packed to words along it.
  static constexpr bool kPacked = !config.k_major && kSize < 4;
  // Whether words across k are shifted out of others, which takes fewer loads than four bytes.
  static constexpr bool kShifted = kPacked && kLoadBytes == 1;
  static constexpr int kMostLines = !kPacked ? 1 : kShifted ? 4 : kLoadBytes / kSize;
  static_assert(kCount * kSize % 4 == 0);
  static_assert(array.group_rows == 0 || array.group_rows == kCount);

 public:
  static constexpr int kWords = kCount * kSize / 4;
  // Elements of a line, in order.
  using Registers = uint32[kLines][kWords];

  // How many lines one load across k has that has this line. The last lines may be too few for the
  // widest load, and two bytes at any alignment are loaded one by one.
  static constexpr int lines_of_load(int line) {
    if (line < kLines / kMostLines * kMostLines) return kMostLines;
    return !kShifted && line < kLines / 2 * 2 ? 2 : 1;
  }

  // The number of a line of the lanes of a group, of which there are eight. Lines of one load are
  // adjacent.
  static int line(int i, int group) {
    const int lines = lines_of_load(i), first = i / lines * lines;
    return 8 * first + group * lines + i - first;
  }

  // `first` is the tile's first element in memory, and `k` the lane's first in any step. Line `i`
  // is number `line(i)` of `lines`; results of those beyond are not stored.
  template <typename Line>
  SmallFragments(const char* first, int lines, int k, Line line) {
    const int phase = shift_of<array>(first);
    // The rows of a step take a multiple of 16 bytes, so shifts are the same in every step.
    const auto shift = [=](int row) {
      return config.uniform ? phase : (phase + row * kStride) & (kVectorBytes - 1);
    };
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int row = min_of(line(i), lines - 1);
      lines_[i] = config.k_major ? row_start<array>(row) + shift(row) : line(i) * kSize;
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) rows_[e] = e * array.pitch + shift(k + e);
  }

  // Loads elements k to k + kCount - 1 of each line of the tile. Loads may go beyond the tile.
  void load(Registers& registers, uint32 tile, int k) const {
    if constexpr (config.k_major) {
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const uint32 address = tile + lines_[i] + k * kSize;
        if constexpr (kLoadBytes >= 4) {
          load_aligned(registers[i], address);
        } else {
          load_shifted(registers[i], address);
        }
      }
    } else {
      constexpr int kPadding = array.group_rows > 0 ? kGroupPadding / kCount : 0;
      const uint32 first = tile + k * (array.pitch + kPadding);
#pragma unroll
      for (int i = 0; i < kLines; ++i) load_across(registers, first, i);
    }
  }

  // Clears what is beyond the first `count` elements that were loaded.
  static void clear(Registers& registers, int count) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32 kept = mask(count * kSize - 4 * w);
#pragma unroll
      for (int i = 0; i < kLines; ++i) registers[i][w] &= kept;
    }
  }

 private:
  // The bits of a word's first `bytes` bytes.
  static uint32 mask(int bytes) {
    if constexpr (kSize >= 4) return bytes > 0 ? ~0u : 0;
    return bytes >= 4 ? ~0u : bytes > 0 ? (1u << (8 * bytes)) - 1 : 0;
  }

  static void load_aligned(uint32 (&words)[kWords], uint32 address) {
    constexpr int kPerLoad = min_of(kLoadBytes / 4, kWords);
#pragma unroll
    for (int first = 0; first < kWords; first += kPerLoad) {
      uint32 loaded[kPerLoad];
      load_shared(loaded, address + 4 * first);
#pragma unroll
      for (int i = 0; i < kPerLoad; ++i) words[first + i] = loaded[i];
    }
  }

  // Loads words at any address, as the aligned words around them.
  static void load_shifted(uint32 (&words)[kWords], uint32 address) {
    uint32 around[kWords + 1];
#pragma unroll
    for (int w = 0; w <= kWords; ++w) {
      around[w] = load_shared_as<uint32>((address & ~3u) + 4 * w);
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = funnel_shift_right(around[w], around[w + 1], 8 * address);
    }
  }

  // Loads the lines of the load that begins with line `i`, if one does, from rows that begin at
  // `first`, a multiple of 4.
  void load_across(Registers& registers, uint32 first, int i) const {
    const int lines = lines_of_load(i);
    if (i % lines != 0) return;
    if constexpr (kPacked) {
      uint32 loaded[kCount];
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const uint32 offset = rows_[e] + lines_[i], bytes = lines * kSize;
        if (bytes == 1) {
          loaded[e] = load_shared_as<uint8>(first + offset);
        } else if (bytes == 2) {
          loaded[e] = load_shared_as<uint16>(first + offset);
        } else if constexpr (kShifted) {
          const uint32 word = first + (offset & ~3u);
          loaded[e] = funnel_shift_right(load_shared_as<uint32>(word),
                                         load_shared_as<uint32>(word + 4), 8 * offset);
        } else {
          loaded[e] = load_shared_as<uint32>(first + offset);
        }
      }
#pragma unroll
      for (int j = 0; j < lines; ++j) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) registers[i + j][w] = packed(loaded, j, w);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        uint32 element[kSize / 4];
        load_shared(element, first + rows_[e] + lines_[i]);
#pragma unroll
        for (int w = 0; w < kSize / 4; ++w) registers[i][e * (kSize / 4) + w] = element[w];
      }
    }
  }

  // Word `w` along k of line `j` of loads across k. Lines have their intermediate words in common.
  static uint32 packed(const uint32 (&loaded)[kCount], int j, int w) {
    const uint32 of_halves = j % 2 == 0 ? 0x5410 : 0x7632;
    if constexpr (kSize == 2) {
      return permute_bytes(loaded[2 * w], loaded[2 * w + 1], of_halves);
    } else {
      const uint32 of_bytes = j < 2 ? 0x5140 : 0x7362;
      return permute_bytes(permute_bytes(loaded[4 * w], loaded[4 * w + 1], of_bytes),
                           permute_bytes(loaded[4 * w + 2], loaded[4 * w + 3], of_bytes),
                           of_halves);
    }
  }

  // Where lines begin, or in rows across k the distances of the lines and of the rows of a step.
  int lines_[kLines];
  int rows_[kCount];
};

}  // namespace tilekern

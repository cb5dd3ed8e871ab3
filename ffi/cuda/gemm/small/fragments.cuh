// A lane's part of an operand: from a tile in shared memory, at any alignment, to registers.
#pragma once

#include "gemm/small/rows.cuh"

namespace tilekern {

// The lane reads kCount consecutive elements along k of kLines lines, which are rows of lhs or
// columns of rhs.
// If kWhole, no element that is loaded is beyond the end of k.
template <typename T, SmallOperandConfig config, SmallArrayShape array, int kLines, int kCount,
          bool kWhole>
class SmallFragments {
  static constexpr int kSize = sizeof(T);
  using Element = Select<kSize == 1, uint8, uint16>;
  // Bytes along k that are one load; of less than 4, words are shifted out of others.
  static constexpr int kLoadBytes = config.load_bytes;
  // What the shift of a row has more than that of the row before.
  static constexpr int kStride = array.stride % kVectorBytes;
  static_assert(kCount * kSize % 4 == 0);

 public:
  static constexpr int kWords = kCount * kSize / 4;
  // Elements of a line, in order.
  using Registers = uint32[kLines][kWords];

  // `first` is the tile's first element in memory. Line `i` is number `line(i)` of `lines`; what is
  // beyond the last repeats it, and its results are not stored.
  template <typename Line>
  SmallFragments(const char* first, int lines, Line line) : phase_(shift_of<array>(first)) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int index = min_of(line(i), lines - 1);
      lines_[i] = config.k_major ? row(index) : index * kSize;
    }
  }

  // Loads elements k to k + kCount - 1 of each line of the tile, which has `count` elements of k;
  // those beyond become zeros. Loads may go beyond the tile by the bytes of a
  // step, and 4.
  void load(Registers& registers, uint32 tile, int k, int count) const {
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
      uint32 rows[kCount];
#pragma unroll
      for (int e = 0; e < kCount; ++e)
        rows[e] = tile + row(kWhole ? k + e : min_of(k + e, count - 1));
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        gather(registers[i], [&](int e) { return rows[e] + lines_[i]; });
      }
    }
    if constexpr (kWhole) return;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32 kept = mask((count - k) * kSize - 4 * w);
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

  // Where a row starts in the tile.
  int row(int index) const {
    const int shift = config.uniform ? phase_ : (phase_ + index * kStride) & (kVectorBytes - 1);
    return index * array.pitch + shift;
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

  // Loads elements of which each has its own address.
  template <typename Address>
  static void gather(uint32 (&words)[kWords], Address address) {
    if constexpr (kSize >= 4) {
      constexpr int kPerElement = kSize / 4;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        uint32 element[kPerElement];
        load_shared(element, address(e));
#pragma unroll
        for (int i = 0; i < kPerElement; ++i) words[e * kPerElement + i] = element[i];
      }
    } else {
      constexpr int kParts = 4 / kSize;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32 parts[kParts];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          parts[i] = load_shared_as<Element>(address(w * kParts + i));
        }
        if constexpr (kSize == 2) {
          words[w] = permute_bytes(parts[0], parts[1], 0x5410);
        } else {
          words[w] = permute_bytes(permute_bytes(parts[0], parts[1], 0x0040),
                                   permute_bytes(parts[2], parts[3], 0x0040), 0x5410);
        }
      }
    }
  }

  int phase_;
  int lines_[kLines];
};

}  // namespace tilekern

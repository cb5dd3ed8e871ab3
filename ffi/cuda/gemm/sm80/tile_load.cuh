// Copies tiles of a strided matrix from global to shared memory.
#pragma once

#include "gemm/sm80/shared_tile.cuh"
#include "ptx.cuh"

namespace tilekern {

// One thread's part of the copies of successive tiles, in chunks of kChunkBytes: the same chunk of
// every kRowStep-th row. Elements beyond the matrix become zeros.
//
// A kLoadBytes of 4 or more divides every row's address and length, so that a chunk is either
// inside the matrix or outside, and cp.async copies it. With 1, addresses and lengths are
// arbitrary, and chunks are shifted into place in registers.
template <class Tile, int kThreads, int kLoadBytes>
class TileLoader {
  static constexpr bool kAsync = kLoadBytes >= 4;
  static constexpr int kChunkBytes = kAsync ? kLoadBytes : 16;
  static constexpr int kChunksPerRow = Tile::kRowBytes / kChunkBytes;
  static constexpr int kRowStep = kThreads / kChunksPerRow;
  static constexpr int kChunks = Tile::kRows / kRowStep;
  static_assert(kThreads % kChunksPerRow == 0 && Tile::kRows % kRowStep == 0);

 public:
  static constexpr int kRowBytes = Tile::kRowBytes;

  // `source` is the first tile's first element, and `row_bytes` the distance of rows.
  TileLoader(const void* source, int64 row_bytes, int thread)
      : row_(thread / kChunksPerRow),
        byte_(thread % kChunksPerRow * kChunkBytes),
        step_bytes_(row_bytes * kRowStep),
        source_(static_cast<const char*>(source) + row_bytes * row_ + byte_) {}

  // Advances by one tile, along the rows or to the rows below.
  template <bool kAlongRows>
  void advance() {
    source_ += kAlongRows ? Tile::kRowBytes : step_bytes_ * kChunks;
  }

  // Copies the kPart-th of kParts parts of the tile to shared memory at `tile`. `rows` rows of the
  // tile and `bytes` bytes of each are inside the matrix. Copies through registers load with the
  // first part and store with the last, so that work in between hides the latency.
  template <int kPart, int kParts>
  void load(uint32 tile, int rows, int bytes) {
    if constexpr (kAsync) {
      constexpr int kFirst = kChunks * kPart / kParts;
      constexpr int kEnd = kChunks * (kPart + 1) / kParts;
      // Further unrolling would keep the addresses of many narrow copies in registers.
      constexpr int kUnroll = kChunkBytes == 16 ? max_of(kEnd - kFirst, 1) : 4;
      const bool inside = byte_ < bytes;
#pragma unroll kUnroll
      for (int i = kFirst; i < kEnd; ++i) {
        cp_async<kChunkBytes>(tile + offset(i), source_ + step_bytes_ * i,
                              inside && row_ + kRowStep * i < rows);
      }
    } else {
      if constexpr (kPart == 0) fetch(rows, bytes - byte_);
      if constexpr (kPart == kParts - 1) place(tile, bytes - byte_);
    }
  }

 private:
  int offset(int i) const {
    if constexpr (kRowStep % Tile::kPeriod == 0) {
      return Tile::offset(row_, byte_) + i * (kRowStep * Tile::kRowBytes);
    } else {
      return Tile::offset(row_ + i * kRowStep, byte_);
    }
  }

  // Loads those of the five aligned words around each chunk that hold a byte of the matrix.
  // min(valid, 16) bytes of the chunk are in the matrix, none if `valid` is not positive.
  void fetch(int rows, int valid) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int misalignment = misaligned_bytes(i);
      const auto* aligned =
          reinterpret_cast<const uint32*>(source_ + step_bytes_ * i - misalignment);
      const bool inside = row_ + kRowStep * i < rows && valid > 0;
      const int end = inside ? misalignment + min_of(valid, 16) : 0;
#pragma unroll
      for (int w = 0; w < 5; ++w) words_[i][w] = 4 * w < end ? load_global(aligned + w) : 0;
    }
  }

  // Shifts the chunks out of their words, and stores them.
  void place(uint32 tile, int valid) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int misalignment = misaligned_bytes(i);
      uint32 chunk[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32 word = funnel_shift_right(words_[i][w], words_[i][w + 1], 8 * misalignment);
        const int kept = valid - 4 * w;
        chunk[w] = kept >= 4 ? word : kept <= 0 ? 0 : word & ((1u << (8 * kept)) - 1);
      }
      store_shared(tile + offset(i), chunk);
    }
  }

  int misaligned_bytes(int i) const {
    return static_cast<int>(reinterpret_cast<unsigned long long>(source_ + step_bytes_ * i) & 3);
  }

  int row_;
  int byte_;
  int64 step_bytes_;
  const char* source_;
  uint32 words_[kAsync ? 1 : kChunks][5];
};

}  // namespace tilekern

// Tiles of a bias of scores that are staged in shared memory.
#pragma once

#include "attention/sm90/tiles.cuh"

namespace tilekern {

// A tile whose rows are queries and whose columns are keys. It is empty without a bias.
template <AttentionConfig config>
struct BiasTile {
  using Tile = SequenceTile<config.queries, config.biased ? config.keys : kChunkFeatures>;
  static constexpr int kBytes = config.biased ? Tile::kBytes : 0;

  static void load(uint32 to, const TensorMap& map, const AttentionShape& shape, int query, int key,
                   int head, int batch, uint32 barrier) {
    Tile::load(to, map, query, head * shape.bias_heads, batch * shape.bias_batches, barrier, key);
  }

  static uint32 address(uint32 tile, int query, int key) {
    return tile + key / kChunkFeatures * Tile::kChunkBytes + query * kRowBytes +
           (key % kChunkFeatures * 2 ^ query % 8 * 16);
  }
};

// The elements of a bias that belong to a thread's accumulators, of 16 rows from `row` on for each
// warp; zeros if there is no bias. Rows are queries, or keys if it is transposed.
template <typename T, AttentionConfig config, bool kTransposed>
class BiasFragment {
 public:
  BiasFragment(uint32 tile, int row) : tile_(tile), row_(row) {}

  // `factor` times the sum of accumulator j's bias and its product with the scale.
  float biased(float product, int j, float scale, float factor) {
    if constexpr (!config.biased) return product * (scale * factor);
    return (product * scale + at(j)) * factor;
  }

 private:
  // The element of accumulator j. A multiple of 8 precedes the seven after it.
  float at(int j) {
    if (j % 8 == 0) {
      const int lane = threadIdx.x % 32;
      const int row = row_ + lane / 8 % 2 * 8, column = j * 2 + lane / 16 * 8;
      if constexpr (kTransposed) {
        ldmatrix_trans(words_, BiasTile<config>::address(tile_, column + lane % 8, row));
      } else {
        ldmatrix(words_, BiasTile<config>::address(tile_, row + lane % 8, column));
      }
    }
    const uint32 word = words_[j / 2 % 4];
    return to_float(T{static_cast<uint16>(j % 2 == 0 ? word : word >> 16)});
  }

  uint32 tile_;
  int row_;
  uint32 words_[4];
};

}  // namespace tilekern

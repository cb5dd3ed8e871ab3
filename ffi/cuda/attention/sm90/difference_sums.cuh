// Sums over a consumer's 64 queries of derivatives by a number of each difference of query and key.
//
// The derivatives of a tile of 64 keys are in shared memory. A pair of threads adds those of two
// differences, 64 apart, one of its even rows and the other of its odd rows. The next tile of keys
// has the rest of the lower difference, so each sum is written once, in the order of the keys.
#pragma once

#include "attention/sm90/tiles.cuh"

namespace tilekern {

class DifferenceSums {
  static constexpr int kRows = 64;
  // Pairs of threads read two rows without bank conflicts.
  static constexpr int kRowFloats = 80;

 public:
  static constexpr int kBytes = kRows * kRowFloats * static_cast<int>(sizeof(float));

  // The sums of `keys` keys up to a whole number of tiles, and of 64 queries: that of the lowest
  // difference is the first one.
  static int count(int keys) { return (keys + kRows - 1) / kRows * kRows + kRows; }

  DifferenceSums(uint32 tile, int consumer, float* sums, int keys)
      : tile_(tile), consumer_(consumer), sums_(sums), count_(count(keys)) {
    for (int i = threadIdx.x % 128; i < count_; i += 128) sums_[i] = 0;
    sync_consumer(1 + consumer_);
  }

  // Sets the derivative of accumulator j, of queries by keys.
  void set(int j, float derivative) const {
    const int row = place_.row_of(j);
    store_shared(address(row, place_.column_of(j) - row), {__float_as_uint(derivative)});
  }

  // Adds the tile's derivatives, all of which are set. Tiles are in the order of their keys.
  void add(int first_key) {
    sync_consumer(1 + consumer_);
    // Differences pair - 63, of rows up to `pair`, and pair + 1.
    float lower = 0, upper = 0;
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
      const int row = i + threadIdx.x % 2;
      uint32 word[1];
      load_shared(word, address(row, kRows - 1 - pair()));
      const float derivative = __uint_as_float(word[0]);
      lower += row <= pair() ? derivative : 0;
      upper += row <= pair() ? 0 : derivative;
    }
    lower += __shfl_xor_sync(~0u, lower, 1);
    upper += __shfl_xor_sync(~0u, upper, 1);
    if (first_key != next_key_) {
      store(next_key_, carried_);
      carried_ = 0;
    }
    store(first_key, carried_ + upper);
    carried_ = lower;
    next_key_ = first_key + kRows;
    // The tile may be set again.
    sync_consumer(1 + consumer_);
  }

  // Stores what the last tile left.
  void finish() const { store(next_key_, carried_); }

 private:
  static int pair() { return threadIdx.x % 128 / 2; }

  // Elements of a row begin at its own column, so those of a difference are in one column.
  uint32 address(int row, int difference) const {
    return tile_ + (row * kRowFloats + (difference & kRows - 1)) * sizeof(float);
  }

  // Stores the sum of the upper difference of the tile at a key.
  void store(int first_key, float sum) const {
    if (threadIdx.x % 2 == 0) sums_[pair() - first_key + count_ - kRows] = sum;
  }

  uint32 tile_;
  int consumer_;
  float* sums_;
  int count_;
  AccumulatorPlace place_;
  int next_key_ = 0;
  float carried_ = 0;
};

}  // namespace tilekern

// Reductions of a product's rows in an epilogue (`plans/gemm/epilogue.py` writes the epilogue).
//
// Each thread reduces its accumulators of a row, and the lanes that share the row combine theirs. A
// tile of the output then has one partial result for each of its rows, which another kernel
// (passes/reduce_row_tiles.cuh) combines with those of the other tiles of the row. The order is
// fixed, so results are reproducible.
//
// The coordinates of the accumulators provide, beside what epilogue.cuh lists:
//
//   kRowSlots         rows that a thread's accumulators are in
//   row_slot(int i)   the row that accumulator i is in, below kRowSlots; it has a period of 16 at
//                     most
//   slot_row(int s)   that row in the matrix
//   kRowLanes         lanes that have accumulators of the same row: adjacent ones, a power of 2
//   tile_column()     the first column of the output's tile
//
// A reduction is a class with the state of one row:
//
//   Partial                          what is kept of a tile's row
//   kNeutral                         a value that changes nothing
//   add<Coordinates, slot>(values)   takes in the values of accumulators that are in a slot
//   merge(other)                     takes in another state
//   shuffled(mask)                   the state of the lane whose number differs in `mask`
//   partial(), Reduction(partial)    the state as it is kept
//   value()                          the result
#pragma once

#include "ptx.cuh"
#include "types.cuh"

namespace tilekern {

// Values that reductions take in at a time.
inline constexpr int kReducedValues = 16;

inline constexpr float kNegativeInfinity = __builtin_bit_cast(float, 0xff800000u);

// Calls f(value) with the values of the accumulators that are in a slot.
template <class Coordinates, int kSlot, int kCount, class F>
inline void for_each_of_slot(const float (&values)[kCount], const F& f) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (Coordinates::row_slot(i) == kSlot) f(values[i]);
  }
}

struct SumOfRow {
  using Partial = float;
  static constexpr float kNeutral = 0.0f;

  float sum = 0.0f;

  SumOfRow() = default;
  explicit SumOfRow(Partial partial) : sum(partial) {}

  template <class Coordinates, int kSlot, int kCount>
  void add(const float (&values)[kCount]) {
    for_each_of_slot<Coordinates, kSlot>(values, [&](float value) { sum += value; });
  }
  void merge(const SumOfRow& other) { sum += other.sum; }
  SumOfRow shuffled(int mask) const { return SumOfRow(__shfl_xor_sync(~0u, sum, mask)); }
  Partial partial() const { return sum; }
  float value() const { return sum; }
};

struct MaxOfRow {
  using Partial = float;
  static constexpr float kNeutral = kNegativeInfinity;

  float top = kNeutral;

  MaxOfRow() = default;
  explicit MaxOfRow(Partial partial) : top(partial) {}

  template <class Coordinates, int kSlot, int kCount>
  void add(const float (&values)[kCount]) {
    for_each_of_slot<Coordinates, kSlot>(values,
                                         [&](float value) { top = max_or_nan(top, value); });
  }
  void merge(const MaxOfRow& other) { top = max_or_nan(top, other.top); }
  MaxOfRow shuffled(int mask) const { return MaxOfRow(__shfl_xor_sync(~0u, top, mask)); }
  Partial partial() const { return top; }
  float value() const { return top; }
};

// The logarithm of a sum of exponentials, relative to a running maximum (Milakov and Gimelshein,
// arXiv:1805.02867). The maximum is kept finite, so that no difference of infinities occurs: a row
// of negative infinities has the sum 0, and an infinite value makes the sum infinite.
struct LogSumExpOfRow {
  using Partial = float2;
  static constexpr float kNeutral = kNegativeInfinity;
  static constexpr float kLargest = 3.402823466e38f;

  float top = -kLargest;
  float sum = 0.0f;

  LogSumExpOfRow() = default;
  explicit LogSumExpOfRow(Partial partial) : top(partial.x), sum(partial.y) {}

  template <class Coordinates, int kSlot, int kCount>
  void add(const float (&values)[kCount]) {
    float largest = top;
    for_each_of_slot<Coordinates, kSlot>(values,
                                         [&](float value) { largest = fmaxf(largest, value); });
    raise(largest);
    for_each_of_slot<Coordinates, kSlot>(values, [&](float value) { sum += exp(value - top); });
  }
  void merge(const LogSumExpOfRow& other) {
    raise(other.top);
    sum += other.sum * exp(other.top - top);
  }
  LogSumExpOfRow shuffled(int mask) const {
    return LogSumExpOfRow({__shfl_xor_sync(~0u, top, mask), __shfl_xor_sync(~0u, sum, mask)});
  }
  Partial partial() const { return {top, sum}; }
  float value() const { return top + logf(sum); }

 private:
  void raise(float largest) {
    const float raised = fminf(fmaxf(top, largest), kLargest);
    sum *= exp(top - raised);
    top = raised;
  }
  static float exp(float x) {
    constexpr float kLog2E = 1.4426950408889634f;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kLog2E));
    return result;
  }
};

// Takes in kReducedValues values of a thread, which belong to the rows of its slots.
template <class Coordinates, int kSlot = 0, class Reduction, int kSlots, int kCount>
inline void add_values(Reduction (&rows)[kSlots], const float (&values)[kCount]) {
  static_assert(kSlots == Coordinates::kRowSlots);
  rows[kSlot].template add<Coordinates, kSlot>(values);
  if constexpr (kSlot + 1 < kSlots) add_values<Coordinates, kSlot + 1>(rows, values);
}

// Stores the partial results of a warp's rows. `partials` is `[batch][tile][row]`.
template <class Reduction, int kSlots, class Coordinates>
inline void store_partials(typename Reduction::Partial* partials, int64 tile,
                           Reduction (&rows)[kSlots], const Coordinates& at) {
  static_assert(Coordinates::kConverged);
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int mask = 1; mask < Coordinates::kRowLanes; mask *= 2) {
      rows[slot].merge(rows[slot].shuffled(mask));
    }
    const int row = at.slot_row(slot);
    if (threadIdx.x % Coordinates::kRowLanes == 0 && row < at.rows()) {
      partials[tile * at.rows() + row] = rows[slot].partial();
    }
  }
}

}  // namespace tilekern

// Fragments of lhs from integers of 4 or 8 bits or floats of 8 bits, which are exact in 16-bit
// floats.
//
// An MMA step contracts 16 elements, of which lane t of a quad has those of positions 2t, 2t + 1,
// 2t + 8 and 2t + 9. Which elements along k these are is free, if rhs has the same order. So lane t
// takes word t of each 16 bytes of a row of weights. A pair of positions has the integers that lie
// in the halves of the word, shifted by a multiple of kBits: their distance along k is 4 of 4 bits
// and 2 of 8 bits. `fragment_order.cuh` orders rhs.
#pragma once

#include "convert.cuh"
#include "ptx.cuh"
#include "types.cuh"

namespace tilekern {

// The types of weights: integers of so many bits, or 8-bit floats.
template <int kBitsOf>
struct WeightInteger {};

template <typename Weight>
inline constexpr int kWeightBits = 8 * sizeof(Weight);
template <int kBitsOf>
inline constexpr int kWeightBits<WeightInteger<kBitsOf>> = kBitsOf;

inline uint32 subtract_pair(bfloat16, uint32 left, uint32 right) {
  uint32 result;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(left), "r"(right));
  return result;
}
inline uint32 subtract_pair(float16, uint32 left, uint32 right) {
  uint32 result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(left), "r"(right));
  return result;
}

// The conversion of pairs of integers to pairs of T, less a zero point.
//
// The bits of an integer are the lowest ones of the mantissa of kOffset, whose unit is 1. With its
// sign inverted, an integer adds itself and kBias to that. A zero point has an integer, within
// limits, whose difference is exact, and a rest, which is 0 if it is such an integer.
template <typename T, int kBits, bool kZeros>
struct WeightFloats {
  static constexpr bool kIsBf16 = kSame<T, bfloat16>;
  // The mantissa of bfloat16 has room for 7 bits.
  static constexpr bool kSignApart = kIsBf16 && kBits == 8;
  static constexpr int kOffset = kSignApart ? 0 : kIsBf16 ? 128 : 1024;
  static constexpr int kBias = kSignApart ? 0 : 1 << (kBits - 1);
  static constexpr int kMaxZero = 1 << (kBits - 1);
  static constexpr uint32 kOnes = 0x00010001u;
  static constexpr uint32 kOffsetBits = kOnes * (kIsBf16 ? 0x4300 : 0x6400);
  static constexpr uint32 kSigns = kOnes << (kBits - 1);
  static constexpr uint32 kMask = kOnes * ((1 << (kBits - kSignApart)) - 1);

  // What is subtracted of both halves of a word.
  uint32 integer, rest;

  explicit WeightFloats(float zero) {
    const float own = fminf(fmaxf(rintf(zero), -kMaxZero), kMaxZero);
    integer = from_float<T>(kOffset + kBias + own).bits * kOnes;
    rest = from_float<T>(zero - own).bits * kOnes;
  }
  // A bias is added to the lowest bits of the mantissa.
  WeightFloats() : integer(kOffsetBits | kOnes * kBias), rest(0) {}

  // Converts two integers, which are in the lowest bits of the halves of a word. `mask` is kMask.
  uint32 convert(uint32 integers, uint32 mask) const {
    uint32 values;
    if constexpr (kSignApart) {
      const uint32 low = (integers & mask) | kOffsetBits;
      // kSigns, which ptxas would move as well.
      const uint32 sign = (integers & (mask + kOnes)) | kOffsetBits;
      // The sign's bit doubles the offset, and so subtracts it again.
      values = subtract_pair(T(), low, sign);
      if constexpr (kZeros) values = subtract_pair(T(), values, integer);
    } else {
      values = subtract_pair(T(), (integers & mask) ^ (kOffsetBits | kSigns), integer);
    }
    return kZeros ? subtract_pair(T(), values, rest) : values;
  }
};

// Pairs of float16 as pairs of T, which has their values.
inline uint32 from_float16_pair(float16, uint32 pair) { return pair; }
inline uint32 from_float16_pair(bfloat16, uint32 pair) {
  float16 low, high;
  low.bits = static_cast<uint16>(pair);
  high.bits = static_cast<uint16>(pair >> 16);
  uint32 words[1];
  pack_pair(words, static_cast<bfloat16*>(nullptr), to_float(low), to_float(high));
  return words[0];
}

// The conversion of the weights of a word to pairs of T, those of the lowest bits of its halves
// first.
template <typename T, typename Weight, bool kZeros>
struct WeightPairs {
  static_assert(!kZeros, "8-bit floats have no zero points");
  static constexpr uint32 kMask = 0;

  WeightPairs() = default;

  void operator()(uint32 (&pairs)[2], uint32 word, uint32) const {
    widen(pairs, static_cast<Weight*>(nullptr), permute_bytes(word, 0, 0x3120));
#pragma unroll
    for (int i = 0; i < 2; ++i) pairs[i] = from_float16_pair(T(), pairs[i]);
  }
};
template <typename T, int kBits, bool kZeros>
struct WeightPairs<T, WeightInteger<kBits>, kZeros> : WeightFloats<T, kBits, kZeros> {
  using WeightFloats<T, kBits, kZeros>::WeightFloats;

  void operator()(uint32 (&pairs)[16 / kBits], uint32 word, uint32 mask) const {
#pragma unroll
    for (int i = 0; i < 16 / kBits; ++i) pairs[i] = this->convert(word >> kBits * i, mask);
  }
};

// Loads fragments from a tile in rows of 128 bytes with TMA's 128-byte swizzle.
template <typename T, typename Weight, bool kZeros>
class WeightFragments {
  static constexpr int kUnitBytes = 16;
  static constexpr int kBits = kWeightBits<Weight>;

 public:
  using Floats = WeightPairs<T, Weight, kZeros>;
  // MMA steps, of 16 elements of k, that 16 bytes have.
  static constexpr int kUnitSteps = 8 / kBits;

  // `first_row` is the warp's first row in the tile, and `rows` is any number that is not negative.
  WeightFragments(int first_row, int lane, int rows)
      : offset_((first_row + lane / 4) * 128 + lane / 4 * kUnitBytes + lane % 4 * 4),
        // Not a constant, which ptxas would move to a register before each use.
        mask_(rows < 0 ? 0 : Floats::kMask) {}

  // Loads the integers of kSteps steps from step `first_step` on, of rows row and 8 + row.
  template <int kSteps>
  void load(uint32 (&integers)[kSteps / kUnitSteps][2], uint32 tile, int first_step) const {
#pragma unroll
    for (int unit = 0; unit < kSteps / kUnitSteps; ++unit) {
      const uint32 at = (tile + offset_) ^ (first_step / kUnitSteps + unit) * kUnitBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        integers[unit][half] = load_shared_as<uint32>(at + half * 8 * 128);
      }
    }
  }

  // Converts them to fragments. Both rows have their zero points.
  template <int kSteps>
  void convert(uint32 (&words)[kSteps][4], const uint32 (&integers)[kSteps / kUnitSteps][2],
               const Floats (&floats)[2]) const {
#pragma unroll
    for (int unit = 0; unit < kSteps / kUnitSteps; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 pairs[2 * kUnitSteps];
        floats[half](pairs, integers[unit][half], mask_);
#pragma unroll
        for (int i = 0; i < 2 * kUnitSteps; ++i) {
          words[unit * kUnitSteps + i / 2][2 * (i % 2) + half] = pairs[i];
        }
      }
    }
  }

 private:
  uint32 offset_;
  uint32 mask_;
};

}  // namespace tilekern

// The functions of ffi/cuda/ptx.cuh and mma.cuh that emulated kernels call, on a CPU.
// Accesses are checked: to shared memory against its size, of copies against their alignment and
// the array that they read.
#pragma once

#include "cuda.h"

namespace tilekern {

// A 32-bit address of shared memory is an offset in this array.
alignas(16) inline char shared_bytes[1 << 18];
inline std::size_t shared_size;

struct Array {
  const char* first;
  const char* end;
};
inline Array arrays[2];

inline char* shared_at(uint32 address, std::size_t bytes) {
  if (address % bytes != 0 || address + bytes > shared_size) std::abort();
  return shared_bytes + address;
}

inline void cp_async_partly(uint32 destination, const void* source, int bytes) {
  const char* first = static_cast<const char*>(source);
  bool inside = false;
  for (const Array& array : arrays) inside |= array.first <= first && first + bytes <= array.end;
  const bool aligned = reinterpret_cast<std::uintptr_t>(source) % 16 == 0;
  if (!inside || !aligned || bytes < 0 || bytes > 16) std::abort();
  char* target = shared_at(destination, 16);
  std::memset(target, 0, 16);
  std::memcpy(target, source, bytes);
}

template <typename T>
T load_shared_as(uint32 address) {
  T value;
  std::memcpy(&value, shared_at(address, sizeof value), sizeof value);
  return value;
}
template <int kWords>
void load_shared(uint32 (&words)[kWords], uint32 address) {
  std::memcpy(words, shared_at(address, sizeof words), sizeof words);
}
template <int kWords>
void store_shared(uint32 address, const uint32 (&words)[kWords]) {
  std::memcpy(shared_at(address, sizeof words), words, sizeof words);
}
inline void store_shared(uint32 address, uint16 value) {
  std::memcpy(shared_at(address, 2), &value, 2);
}

inline uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
  const std::uint64_t both = std::uint64_t{high} << 32 | low;
  uint32 bytes = 0;
  for (int i = 0; i < 4; ++i) {
    bytes |= static_cast<uint32>(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  }
  return bytes;
}
inline uint32 funnel_shift_right(uint32 low, uint32 high, uint32 shift) {
  return static_cast<uint32>((std::uint64_t{high} << 32 | low) >> (shift & 31));
}
inline uint32 round_to_tf32(uint32 bits) { return bits; }

inline void widen(uint32 (&halves)[2], float8_e5m2*, uint32 bytes) {
  halves[0] = permute_bytes(0, bytes, 0x5040);
  halves[1] = permute_bytes(0, bytes, 0x7060);
}
inline void widen(uint32 (&halves)[2], float8_e4m3fn*, uint32 bytes) {
  for (int i = 0; i < 4; ++i) {
    const uint32 byte = bytes >> (8 * i) & 255;
    // The exponents of float16 have a bit more, and a bias that is 8 larger.
    const auto bits = static_cast<uint16>((byte & 128) << 8 | (byte & 127) << 7);
    const auto value = static_cast<_Float16>(std::bit_cast<_Float16>(bits) * 256);
    reinterpret_cast<uint16*>(halves)[i] = std::bit_cast<uint16>(value);
  }
}

inline void pack_pair(uint32 (&words)[1], bfloat16*, float first, float second) {
  const auto rounded = [](float value) {
    const auto bits = std::bit_cast<uint32>(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  words[0] = rounded(second) << 16 | rounded(first);
}
inline void pack_pair(uint32 (&words)[1], float16*, float first, float second) {
  const _Float16 pair[] = {static_cast<_Float16>(first), static_cast<_Float16>(second)};
  std::memcpy(words, pair, sizeof pair);
}
template <typename T>
void pack_pair(uint32 (&words)[sizeof(T) / 2], T*, T first, T second) {
  const T pair[] = {first, second};
  std::memcpy(words, pair, sizeof pair);
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline void launch_dependents() {}
inline void wait_for_prerequisites() {}

// What gemm/passes/split_float32.cuh has.
inline constexpr int kHalves = 2;
inline constexpr uint32 kInfinity = 0x7f800000;
inline float power_of_two(int exponent) { return std::ldexp(1.0f, exponent); }
inline int floor_log2(uint32 bits) { return std::ilogb(std::bit_cast<float>(bits)); }
inline void take_half(uint32 (&words)[2], float (&rest)[4]) {
  _Float16 halves[4];
  for (int i = 0; i < 4; ++i) rest[i] -= halves[i] = static_cast<_Float16>(rest[i]);
  std::memcpy(words, halves, sizeof halves);
}
template <int kWords>
void store_global(void* address, const uint32 (&words)[kWords]) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof words != 0) std::abort();
  std::memcpy(address, words, sizeof words);
}

inline double number(bfloat16 value) { return std::bit_cast<float>(uint32{value.bits} << 16); }
inline double number(float16 value) { return std::bit_cast<_Float16>(value.bits); }
template <typename T>
double number(T value) {
  return value;
}

// A warp's MMA of 16 rows and 8 columns, whose operands lie as mma.cuh says.
template <typename T, typename>
struct Mma {
  using Accumulator =
      std::conditional_t<sizeof(T) == 8, double, std::conditional_t<sizeof(T) == 1, int32, float>>;
  using Register = std::conditional_t<sizeof(T) == 8, double, uint32>;

  static void run(Accumulator (&sums)[4], const Register (&low)[2], const Register (&high)[2],
                  const Register (&rhs)[2]) {
    const Register own[] = {low[0], low[1], high[0], high[1], rhs[0], rhs[1]};
    Register all[6][32];
    for (int i = 0; i < 6; ++i) {
      emulation::with_values_of_warp(own[i], [&](auto of) {
        for (int lane = 0; lane < 32; ++lane) all[i][lane] = of(lane);
        return 0;
      });
    }
    constexpr int kElements = sizeof(Register) / sizeof(T);
    const int g = emulation::lane() / 4, t = emulation::lane() % 4;
    for (int i = 0; i < 4; ++i) {
      double sum = sums[i];
      for (int of = 0; of < 4; ++of) {
        for (int half = 0; half < 2; ++half) {
          T left[kElements], right[kElements];
          std::memcpy(left, &all[i / 2 * 2 + half][4 * g + of], sizeof left);
          std::memcpy(right, &all[4 + half][4 * (2 * t + i % 2) + of], sizeof right);
          for (int e = 0; e < kElements; ++e) sum += number(left[e]) * number(right[e]);
        }
      }
      sums[i] = static_cast<Accumulator>(sum);
    }
  }
};

}  // namespace tilekern

// The PTX instructions of the kernels, as functions of the operands of their `asm` statements:
// emulation::Ptx<"text">::run(operands ...), outputs before inputs.
#pragma once

#include <array>
#include <tuple>

#include "cuda.h"

namespace emulation {

using std::uint32_t, std::uint64_t, std::int32_t;

template <std::size_t kSize>
struct Text {
  char chars[kSize];
  constexpr Text(const char (&text)[kSize]) { std::copy_n(text, kSize, chars); }
  constexpr bool has(const char* part) const {
    for (std::size_t i = 0; i < kSize; ++i) {
      std::size_t j = 0;
      while (part[j] != 0 && i + j < kSize && chars[i + j] == part[j]) ++j;
      if (part[j] == 0) return true;
    }
    return false;
  }
};

// -- Numbers

inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline float from_bf16(uint32_t bits) { return as_float(bits << 16); }
inline float from_f16(uint32_t bits) {
  return std::bit_cast<_Float16>(static_cast<std::uint16_t>(bits));
}
inline uint32_t to_bf16(float value) {
  const uint32_t bits = as_bits(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_f16(float value) {
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
}
inline uint32_t to_tf32(uint32_t bits) {
  if ((bits & 0x7f800000) == 0x7f800000) return bits;
  return (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}
inline float from_e5m2(uint32_t byte) { return from_f16(byte << 8); }
inline float from_e4m3(uint32_t byte) {
  if ((byte & 127) == 127) return NAN;
  // The exponents of float16 have a bit more, and a bias that is 8 larger.
  return from_f16((byte & 128) << 8 | (byte & 127) << 7) * 256;
}

// The nearest 8-bit float with so many bits of mantissa and this least exponent, at most `largest`.
inline uint32_t to_float8(float value, int mantissa, int least, float largest) {
  if (value != value) return 127;
  const double magnitude = std::min(std::abs(value), largest);
  const int exponent = magnitude == 0 ? least : std::max(std::ilogb(magnitude), least);
  const auto steps =
      static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
  return static_cast<uint32_t>(std::signbit(value)) << 7 |
         ((static_cast<uint32_t>(exponent - least) << mantissa) + steps);
}

// Types of operands of MMAs.
enum class Type { kF64, kTf32, kBf16, kF16, kE4m3, kE5m2, kS8 };

// The first of the types that an instruction spells from here on, such as "bf16.bf16".
inline Type type_of(const char* text) {
  constexpr std::pair<const char*, Type> kTypes[] = {
      {"f64", Type::kF64},   {"tf32", Type::kTf32}, {"bf16", Type::kBf16}, {"f16", Type::kF16},
      {"e4m3", Type::kE4m3}, {"e5m2", Type::kE5m2}, {"s8", Type::kS8},
  };
  for (const auto& [name, type] : kTypes) {
    if (std::strncmp(text, name, std::strlen(name)) == 0) return type;
  }
  fail("unknown type of an MMA");
}
inline int bytes_of(Type type) {
  switch (type) {
    case Type::kF64:
      return 8;
    case Type::kTf32:
      return 4;
    case Type::kBf16:
    case Type::kF16:
      return 2;
    default:
      return 1;
  }
}
template <typename T>
T read(const void* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}
inline double element(Type type, const void* data) {
  switch (type) {
    case Type::kF64:
      return read<double>(data);
    // The tensor cores do not read the low bits.
    case Type::kTf32:
      return as_float(read<uint32_t>(data) & ~0x1fffu);
    case Type::kBf16:
      return from_bf16(read<std::uint16_t>(data));
    case Type::kF16:
      return from_f16(read<std::uint16_t>(data));
    case Type::kE4m3:
      return from_e4m3(read<unsigned char>(data));
    case Type::kE5m2:
      return from_e5m2(read<unsigned char>(data));
    default:
      return read<signed char>(data);
  }
}

template <typename T>
void add(T& sum, double value) {
  if constexpr (std::is_same_v<T, int32_t>) {
    sum = static_cast<int32_t>(static_cast<uint32_t>(sum) +
                               static_cast<uint32_t>(static_cast<int64_t>(value)));
  } else {
    sum = static_cast<T>(sum + value);
  }
}

// -- mbarriers: 8 bytes of shared memory

struct Mbarrier {
  int32_t bytes;
  std::int16_t pending;
  std::uint16_t arrivals : 15, phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

inline Mbarrier& mbarrier(uint32_t address) {
  return *reinterpret_cast<Mbarrier*>(shared_at(address, sizeof(Mbarrier)));
}
inline void update(uint32_t address, int arrivals, int bytes) {
  Mbarrier& barrier = mbarrier(address);
  progress = true;
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0) fail("more arrivals at an mbarrier than it counts");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.arrivals;
    barrier.phase ^= 1;
  }
}
// A copy that an mbarrier counts.
inline void copy_async(uint32_t barrier, int bytes, Action copy) {
  auto whole = [=] {
    copy();
    update(barrier, 0, -bytes);
  };
  if (late_writes) {
    arriving[barrier].push_back(whole);
    progress = true;
  } else {
    whole();
  }
}
inline bool test_wait(uint32_t address, uint32_t parity) {
  if (mbarrier(address).phase != parity) return true;
  if (auto actions = std::exchange(arriving[address], {}); !actions.empty()) {
    for (const Action& action : actions) action();
  }
  return mbarrier(address).phase != parity;
}

// -- TMA

// What a tensor map holds here; tests/emulated_plans.py packs it.
struct TensorMap {
  char* base;
  int64_t strides[5];
  uint32_t sizes[5];
  std::uint16_t box[5];
  std::uint8_t element_bytes, swizzle, rank, is_tf32, fills_nan;
};
static_assert(sizeof(TensorMap) <= 128);

template <typename Use>
void for_each_element(const TensorMap& map, const std::array<int32_t, 5>& origin, uint32_t shared,
                      Use use) {
  const int bytes = map.element_bytes;
  std::size_t row = 0;
  int at[5] = {};
  const uint32_t row_bytes = map.box[0] * bytes;
  if (shared % (map.swizzle == 0 ? 128 : 8 * map.swizzle) != 0) fail("misaligned tile of TMA");
  for (;;) {
    char* first = map.base;
    bool inside = true;
    for (int dim = 1; dim < 5; ++dim) {
      const int64_t position = int64_t{origin[dim]} + at[dim];
      if (dim >= map.rank) {
        if (position != 0) fail("a coordinate of a dimension that a tensor map lacks");
        continue;
      }
      inside = inside && position >= 0 && position < map.sizes[dim];
      first += position * map.strides[dim];
    }
    for (uint32_t i = 0; i < map.box[0]; ++i) {
      const int64_t position = int64_t{origin[0]} + i;
      uint32_t offset = static_cast<uint32_t>(row * row_bytes + i * bytes);
      uint32_t address = shared + offset;
      // 16 bytes are moved by the bits of their row of 128 bytes.
      if (map.swizzle != 0) address ^= (address >> 7 & (map.swizzle / 16 - 1)) << 4;
      const bool within = inside && position >= 0 && position < map.sizes[0];
      use(shared_at(address, bytes), within ? first + position * bytes : nullptr, bytes);
    }
    ++row;
    int dim = 1;
    for (; dim < map.rank; ++dim) {
      if (++at[dim] < map.box[dim]) break;
      at[dim] = 0;
    }
    if (dim >= map.rank) return;
  }
}
inline int box_bytes(const TensorMap& map) {
  int bytes = map.element_bytes;
  for (int dim = 0; dim < map.rank; ++dim) bytes *= map.box[dim];
  return bytes;
}
inline void load_tile(uint32_t shared, const TensorMap& map, const std::array<int32_t, 5>& origin) {
  for_each_element(map, origin, shared, [&](char* to, const char* from, int bytes) {
    if (from == nullptr) {
      std::memset(to, map.fills_nan ? 0xff : 0, bytes);
    } else if (map.is_tf32) {
      uint32_t bits;
      std::memcpy(&bits, from, 4);
      bits = to_tf32(bits);
      std::memcpy(to, &bits, 4);
    } else {
      std::memcpy(to, from, bytes);
    }
  });
}
inline void store_tile(uint32_t shared, const TensorMap& map,
                       const std::array<int32_t, 5>& origin) {
  for_each_element(map, origin, shared, [&](char* from, char* to, int bytes) {
    if (to != nullptr) std::memcpy(to, from, bytes);
  });
}

// -- MMAs

// A warp's MMA of 16 rows and 8 columns, whose operands lie as mma.cuh says. A register holds 4
// bytes of an operand, or a float64.
template <typename Sum, typename Register>
void mma_16x8(Type type, Sum* (&sums)[4], const Register (&lhs)[2][2], const Register (&rhs)[2]) {
  const Register own[] = {lhs[0][0], lhs[0][1], lhs[1][0], lhs[1][1], rhs[0], rhs[1]};
  Register all[6][32];
  for (int i = 0; i < 6; ++i) {
    with_values_of_warp(own[i], [&](auto of) {
      for (int lane = 0; lane < 32; ++lane) all[i][lane] = of(lane);
      return 0;
    });
  }
  const int elements = sizeof(Register) / bytes_of(type), g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    double sum = 0;
    for (int half = 0; half < 2; ++half) {
      for (int of = 0; of < 4; ++of) {
        const char* left = reinterpret_cast<char*>(&all[i / 2 * 2 + half][4 * g + of]);
        const char* right = reinterpret_cast<char*>(&all[4 + half][4 * (2 * t + i % 2) + of]);
        for (int e = 0; e < elements; ++e) {
          sum +=
              element(type, left + e * bytes_of(type)) * element(type, right + e * bytes_of(type));
        }
      }
    }
    add(*sums[i], sum);
  }
}

// What a matrix descriptor says: rows of 128 bytes with a swizzle of 128 bytes.
struct Matrix {
  uint32_t address, chunk_bytes, group_bytes;

  explicit Matrix(uint64_t descriptor)
      : address(cta().base() + (descriptor & 0x3fff) * 16),
        chunk_bytes((descriptor >> 16 & 0x3fff) * 16),
        group_bytes((descriptor >> 32 & 0x3fff) * 16) {
    if (descriptor >> 62 != 1) fail("a descriptor without the swizzle of 128 bytes");
  }

  // The k-major element of a row, `byte` bytes along k; or the element `byte` bytes along M or N
  // of a row of k.
  const char* k_major(int row, int byte, int bytes) const {
    return at(address + row / 8 * group_bytes + row % 8 * 128 + byte, bytes);
  }
  const char* mn_major(int byte, int k, int bytes) const {
    return at(address + byte / 128 * chunk_bytes + k / 8 * group_bytes + k % 8 * 128 + byte % 128,
              bytes);
  }

 private:
  static const char* at(uint32_t linear, int bytes) {
    return shared_at(linear ^ (linear >> 7 & 7) << 4, bytes);
  }
};

// The types of wgmma's operands, spelt as in "k16.f32.bf16.bf16", and which are not k-major.
struct WgmmaTypes {
  Type lhs, rhs;
  bool lhs_mn_major, rhs_mn_major;

  WgmmaTypes(const char* spelling, const char* flags) {
    const char* last = std::strrchr(spelling, '.') + 1;
    rhs = type_of(last);
    for (last -= 2; last[-1] != '.';) --last;
    lhs = type_of(last);
    // ", 1, 1, 0, 1" where lhs is in shared memory, and ", 1, 1, 1" otherwise.
    const int length = static_cast<int>(std::strlen(flags));
    lhs_mn_major = length == 12 && flags[8] == '1';
    rhs_mn_major = length >= 9 && flags[length - 1] == '1';
  }
};

// The rows and columns of this thread's accumulators of a warpgroup's MMA over 32 bytes of k.
// `lhs(row, k)` is an element of its warp's 16 rows, of which the thread has `lane / 4` and 8 more.
template <typename Sum, typename Lhs>
void wgmma(Sum* sums, int count, const WgmmaTypes& types, const Lhs& lhs, const Matrix& rhs,
           bool accumulate) {
  const int bytes = bytes_of(types.rhs), steps = 32 / bytes, g = lane() / 4, t = lane() % 4;
  double left[2][32];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < steps; ++k) left[half][k] = element(types.lhs, lhs(g + 8 * half, k));
  }
  for (int i = 0; i < count; i += 4) {
    for (int of = 0; of < 2; ++of) {
      const int column = 2 * i + 2 * t + of;
      double totals[2] = {};
      for (int k = 0; k < steps; ++k) {
        const char* at = types.rhs_mn_major ? rhs.mn_major(column * bytes, k, bytes)
                                            : rhs.k_major(column, k * bytes, bytes);
        const double right = element(types.rhs, at);
        totals[0] += left[0][k] * right;
        totals[1] += left[1][k] * right;
      }
      for (int half = 0; half < 2; ++half) {
        Sum& sum = sums[i + 2 * half + of];
        if (!accumulate) sum = 0;
        add(sum, totals[half]);
      }
    }
  }
}

// MMAs are those of a warpgroup: when all of its threads have committed them, they retire for all.
inline void wait_for_mmas(int pending) {
  const long needed = running->mmas.committed() - pending;
  Thread* const first = cta().threads.data() + running->index / 128 * 128;
  while (std::any_of(first, first + 128,
                     [&](const Thread& other) { return other.mmas.committed() < needed; })) {
    yield();
  }
  Thread* const own = running;
  for (running = first; running != first + 128; ++running) running->mmas.run_first(needed);
  running = own;
}

// -- Memory

template <typename... Outputs>
void load_words(const char* from, Outputs&... outputs) {
  ((std::memcpy(&outputs, from, sizeof outputs), from += sizeof outputs), ...);
}
template <typename... Inputs>
void store_words(char* to, const Inputs&... inputs) {
  ((std::memcpy(to, &inputs, sizeof inputs), to += sizeof inputs), ...);
}
template <typename Address>
char* global_at(Address address, std::size_t bytes) {
  std::uintptr_t number;
  if constexpr (std::is_pointer_v<Address>) {
    number = reinterpret_cast<std::uintptr_t>(address);
  } else {
    number = address;
  }
  if (number % bytes != 0) fail("misaligned access");
  return reinterpret_cast<char*>(number);
}

// Copies to shared memory, with zeros after the first `read` bytes.
template <typename Source>
void copy_to_shared(uint32_t to, Source from, int bytes, int read) {
  if (read < 0 || read > bytes) fail("a copy of an impossible size");
  const char* source = global_at(from, bytes);
  running->copies.add(
      [=] {
        char* target = shared_at(to, bytes);
        std::memset(target, 0, bytes);
        std::memcpy(target, source, read);
      },
      late_writes);
}

// Rows of four 8x8 matrices of 16-bit elements, whose addresses lanes give.
inline void with_matrix_rows(uint32_t address, const auto& use) {
  with_values_of_warp(address, [&](auto of) {
    use([&](int matrix, int row) { return shared_at(of(8 * matrix + row), 16); });
    return 0;
  });
}

// -- The table

template <Text kText>
struct Ptx {
  static constexpr bool has(const char* part) { return kText.has(part); }

  template <typename... Operands>
  static void run(Operands&&... operands) {
    const auto all = std::forward_as_tuple(operands...);
    const auto operand = [&]<int kIndex>(std::integral_constant<int, kIndex>) -> auto& {
      return std::get<kIndex>(all);
    };
#define OP(i) operand(std::integral_constant<int, i>())
    if constexpr (kText.chars[0] == 0 || has("wgmma.fence") || has("fence.") || has("setmaxnreg") ||
                  has("griddepcontrol") || has("prefetch")) {
    } else if constexpr (has("bar.sync")) {
      constexpr bool kCounted = sizeof...(operands) == 2;
      int threads = 128;
      if constexpr (kCounted) {
        threads = OP(1);
      } else {
        static_assert(has("128"));
      }
      Barrier& barrier = cta().named[OP(0)];
      if (barrier.arrived > 0 && barrier.threads != threads) fail("two counts of a named barrier");
      barrier.threads = threads;
      wait(barrier);
    } else if constexpr (has("barrier.cluster.arrive")) {
      static Barrier barrier;
      barrier.threads = static_cast<int>(ctas.size()) * block.size();
      wait(barrier);
    } else if constexpr (has("cluster_ctarank")) {
      OP(0) = cta().rank;
    } else if constexpr (has("mbarrier.init")) {
      const auto arrivals = static_cast<std::uint16_t>(OP(1));
      mbarrier(OP(0)) = {0, static_cast<std::int16_t>(arrivals), arrivals, 0};
    } else if constexpr (has("mbarrier.arrive.expect_tx")) {
      // The bytes are expected before the arrival, which may complete the phase.
      mbarrier(OP(0)).bytes += OP(1);
      update(OP(0), 1, 0);
    } else if constexpr (has("mbarrier.arrive.shared::cluster")) {
      update(in_cta(OP(0), OP(1)), 1, 0);
    } else if constexpr (has("mbarrier.arrive")) {
      update(OP(0), 1, 0);
    } else if constexpr (has("mbarrier.try_wait")) {
      if (held != 0) let_others();
      while (!test_wait(OP(0), OP(1))) yield();
    } else if constexpr (has("st.async")) {
      const uint32_t words[] = {OP(3), OP(4), OP(5), OP(6)};
      const uint32_t to = in_cta(OP(0), OP(2));
      copy_async(in_cta(OP(1), OP(2)), 16,
                 [=] { std::memcpy(shared_at(to, 16), words, sizeof words); });
    } else if constexpr (has("cp.async.bulk.tensor.5d.shared")) {
      const auto map = *reinterpret_cast<const TensorMap*>(OP(1));
      const std::array<int32_t, 5> origin = {OP(2), OP(3), OP(4), OP(5), OP(6)};
      const uint32_t to = OP(0), barrier = OP(7);
      if constexpr (has("multicast")) {
        for (unsigned rank = 0; rank < ctas.size(); ++rank) {
          if (OP(8) >> rank & 1) {
            copy_async(in_cta(barrier, rank), box_bytes(map),
                       [=] { load_tile(in_cta(to, rank), map, origin); });
          }
        }
      } else {
        copy_async(barrier, box_bytes(map), [=] { load_tile(to, map, origin); });
      }
    } else if constexpr (has("cp.async.bulk.shared::cluster.global")) {
      const char* from = global_at(OP(1), 16);
      const uint32_t to = OP(0), bytes = OP(2);
      if (to % 16 != 0 || bytes % 16 != 0) fail("misaligned bulk copy");
      copy_async(OP(3), bytes, [=] {
        for (uint32_t i = 0; i < bytes; i += 16) std::memcpy(shared_at(to + i, 16), from + i, 16);
      });
    } else if constexpr (has("cp.async.bulk.tensor.5d.global")) {
      const auto map = *reinterpret_cast<const TensorMap*>(OP(0));
      const std::array<int32_t, 5> origin = {OP(1), OP(2), OP(3), OP(4), OP(5)};
      const uint32_t from = OP(6);
      running->bulk_stores.add([=] { store_tile(from, map, origin); }, late_reads);
    } else if constexpr (has("cp.async.bulk.commit_group")) {
      running->bulk_stores.commit();
    } else if constexpr (has("cp.async.bulk.wait_group")) {
      running->bulk_stores.wait(OP(0));
    } else if constexpr (has("cp.async.commit_group")) {
      running->copies.commit();
    } else if constexpr (has("cp.async.wait_group")) {
      running->copies.wait(OP(0));
    } else if constexpr (has("cp.async") && has(", 16, outside")) {
      copy_to_shared(OP(0), OP(1), 16, OP(2) != 0 ? 0 : 16);
    } else if constexpr (has("cp.async") && has("%2, outside")) {
      copy_to_shared(OP(0), OP(1), OP(2), OP(3) != 0 ? 0 : OP(2));
    } else if constexpr (has("cp.async") && has(", 16, %2")) {
      copy_to_shared(OP(0), OP(1), 16, OP(2));
    } else if constexpr (has("wgmma.commit_group")) {
      // The instruction is aligned: the lanes of a warp execute it together.
      wait(cta().warps[warp()]);
      running->mmas.commit();
    } else if constexpr (has("wgmma.wait_group")) {
      wait_for_mmas(OP(0));
    } else if constexpr (has("wgmma.mma_async")) {
      run_wgmma(operands...);
    } else if constexpr (has("mma.sync.aligned.m16n8")) {
      using Register = std::decay_t<decltype(OP(4))>;
      constexpr Type kType = has("f64")    ? Type::kF64
                             : has("tf32") ? Type::kTf32
                             : has("bf16") ? Type::kBf16
                             : has("f16")  ? Type::kF16
                             : has("e4m3") ? Type::kE4m3
                             : has("e5m2") ? Type::kE5m2
                                           : Type::kS8;
      std::decay_t<decltype(OP(0))>* sums[] = {&OP(0), &OP(1), &OP(2), &OP(3)};
      if constexpr (has("f64")) {
        mma_16x8<double, double>(kType, sums, {{OP(4), OP(6)}, {OP(5), OP(7)}}, {OP(8), OP(9)});
      } else if constexpr (has("e4m3.e5m2") || has("e5m2.e4m3")) {
        mixed_mma(sums, OP(4), OP(5), OP(6), OP(7), OP(8), OP(9));
      } else {
        mma_16x8<std::decay_t<decltype(OP(0))>, Register>(
            kType, sums, {{OP(4), OP(6)}, {OP(5), OP(7)}}, {OP(8), OP(9)});
      }
    } else if constexpr (has("mma.sync.aligned.m8n8k4.row.col.f64")) {
      double lhs[32], rhs[32];
      for (const auto& [all, own] : {std::pair{lhs, OP(2)}, std::pair{rhs, OP(3)}}) {
        with_values_of_warp(own, [&](auto of) {
          for (int lane = 0; lane < 32; ++lane) all[lane] = of(lane);
          return 0;
        });
      }
      const int row = lane() / 4, column = lane() % 4 * 2;
      for (int k = 0; k < 4; ++k) {
        OP(0) += lhs[4 * row + k] * rhs[4 * column + k];
        OP(1) += lhs[4 * row + k] * rhs[4 * column + 4 + k];
      }
    } else if constexpr (has("ldmatrix")) {
      uint32_t* words[] = {&OP(0), &OP(1), &OP(2), &OP(3)};
      with_matrix_rows(OP(4), [&](auto row_of) {
        for (int i = 0; i < 4; ++i) {
          const int g = lane() / 4, t = lane() % 4;
          if constexpr (has("trans")) {
            for (int half = 0; half < 2; ++half) {
              std::memcpy(reinterpret_cast<char*>(words[i]) + 2 * half,
                          row_of(i, 2 * t + half) + 2 * g, 2);
            }
          } else {
            std::memcpy(words[i], row_of(i, g) + 4 * t, 4);
          }
        }
      });
    } else if constexpr (has("stmatrix")) {
      const uint32_t words[] = {OP(1), OP(2), OP(3), OP(4)};
      with_matrix_rows(OP(0), [&](auto row_of) {
        for (int i = 0; i < 4; ++i) {
          const int g = lane() / 4, t = lane() % 4;
          if constexpr (has("trans")) {
            for (int half = 0; half < 2; ++half) {
              std::memcpy(row_of(i, 2 * t + half) + 2 * g,
                          reinterpret_cast<const char*>(&words[i]) + 2 * half, 2);
            }
          } else {
            std::memcpy(row_of(i, g) + 4 * t, &words[i], 4);
          }
        }
      });
    } else if constexpr (has("@inside ld.global")) {
      load_inside(operands...);
    } else if constexpr (has("ld.shared.u8")) {
      OP(0) = read<unsigned char>(shared_at(OP(1), 1));
    } else if constexpr (has("ld.global") && has("u8")) {
      OP(0) = read<unsigned char>(global_at(OP(1), 1));
    } else if constexpr (has("ld.global") && has("u16")) {
      OP(0) = read<std::uint16_t>(global_at(OP(1), 2));
    } else if constexpr (has("ld.shared") || has("ld.global")) {
      load(operands...);
    } else if constexpr (has("ld.relaxed.gpu.global")) {
      // A thread that reads what others write may wait for it.
      yield();
      load(operands...);
    } else if constexpr (has("st.relaxed.gpu.global")) {
      progress = true;
      store(operands...);
    } else if constexpr (has("st.shared") || has("st.global")) {
      store(operands...);
    } else if constexpr (has("prmt.b32")) {
      const uint64_t both = uint64_t{OP(2)} << 32 | OP(1);
      uint32_t bytes = 0;
      for (int i = 0; i < 4; ++i) {
        bytes |= static_cast<uint32_t>(both >> (8 * (OP(3) >> (4 * i) & 7)) & 255) << (8 * i);
      }
      OP(0) = bytes;
    } else if constexpr (has("vote.sync.ballot.b32 %0, is_one")) {
      const bool is_one = OP(1) & OP(2);
      const uint32_t ones = __ballot_sync(~0u, is_one);
      OP(0) = is_one ? ones : ~ones;
    } else if constexpr (has("lop3.b32 %0, %1, %2, %3, 0x80;")) {
      OP(0) = OP(1) & OP(2) & OP(3);
    } else if constexpr (has("shf.r.wrap")) {
      OP(0) = static_cast<uint32_t>((uint64_t{OP(2)} << 32 | OP(1)) >> (OP(3) & 31));
    } else if constexpr (has("tf32.f32")) {
      OP(0) = to_tf32(as_bits(OP(1)));
    } else if constexpr (has("cvt.rn.bf16x2.f32")) {
      OP(0) = to_bf16(OP(1)) << 16 | to_bf16(OP(2));
    } else if constexpr (has("cvt.rn.f16x2.f32")) {
      OP(0) = to_f16(OP(1)) << 16 | to_f16(OP(2));
    } else if constexpr (has("sub.rn.bf16x2")) {
      OP(0) = to_bf16(from_bf16(OP(1) >> 16) - from_bf16(OP(2) >> 16)) << 16 |
              to_bf16(from_bf16(OP(1) & 0xffff) - from_bf16(OP(2) & 0xffff));
    } else if constexpr (has("sub.rn.f16x2")) {
      OP(0) = to_f16(from_f16(OP(1) >> 16) - from_f16(OP(2) >> 16)) << 16 |
              to_f16(from_f16(OP(1) & 0xffff) - from_f16(OP(2) & 0xffff));
    } else if constexpr (has("cvt.rn.f16x2.e4m3x2") || has("cvt.rn.f16x2.e5m2x2")) {
      uint32_t* words[] = {&OP(0), &OP(1)};
      for (int i = 0; i < 4; ++i) {
        const uint32_t byte = OP(2) >> (8 * i) & 255;
        const uint32_t half = to_f16(has("e4m3") ? from_e4m3(byte) : from_e5m2(byte));
        *words[i / 2] = i % 2 == 0 ? half : *words[i / 2] | half << 16;
      }
    } else if constexpr (has("cvt.rn.satfinite.e4m3x2.f32") || has("cvt.rn.satfinite.e5m2x2.f32")) {
      const float values[] = {OP(1), OP(2), OP(3), OP(4)};
      OP(0) = 0;
      for (int i = 0; i < 4; ++i) {
        OP(0) |=
            (has("e4m3") ? to_float8(values[i], 3, -6, 448) : to_float8(values[i], 2, -14, 57344))
            << 8 * i;
      }
    } else if constexpr (has("cvt.rn.f16.f32")) {
      OP(0) = static_cast<std::uint16_t>(to_f16(OP(1)));
    } else if constexpr (has("cvt.f32.f16 %0, low")) {
      OP(0) = from_f16(OP(2) & 0xffff);
      OP(1) = from_f16(OP(2) >> 16);
    } else if constexpr (has("cvt.f32.f16")) {
      OP(0) = from_f16(OP(1));
    } else if constexpr (has("max.NaN")) {
      OP(0) = OP(1) != OP(1) || OP(2) != OP(2) ? NAN : std::fmax(OP(1), OP(2));
    } else if constexpr (has("min.NaN")) {
      OP(0) = OP(1) != OP(1) || OP(2) != OP(2) ? NAN : std::fmin(OP(1), OP(2));
    } else if constexpr (has("div.full")) {
      OP(0) = OP(1) / OP(2);
    } else if constexpr (has("ex2.approx")) {
      OP(0) = std::exp2(OP(1));
    } else if constexpr (has("tanh.approx")) {
      // Rounded to 11 bits, with the largest relative error of a GPU's.
      const auto bits = std::bit_cast<uint32_t>(std::tanh(OP(1)));
      OP(0) = std::bit_cast<float>((bits + (1u << 12)) & ~((1u << 13) - 1));
    } else if constexpr (has("rcp.approx")) {
      OP(0) = 1 / OP(1);
    } else {
      fail(kText.chars);
    }
#undef OP
  }

 private:
  // accumulators, lhs or its four registers, rhs, accumulate, types, flags
  template <typename Sum, std::size_t kCount>
  static void run_wgmma(Sum (&sums)[kCount], uint64_t lhs, uint64_t rhs, int accumulate,
                        const char* spelling, const char* flags) {
    const int first_row = warp() % 4 * 16;
    running->mmas.add(
        [=, &sums] {
          const WgmmaTypes types(spelling, flags);
          const int bytes = bytes_of(types.lhs);
          const Matrix left(lhs);
          wgmma(
              sums, kCount, types,
              [&](int row, int k) {
                return types.lhs_mn_major ? left.mn_major((first_row + row) * bytes, k, bytes)
                                          : left.k_major(first_row + row, k * bytes, bytes);
              },
              Matrix(rhs), accumulate != 0);
        },
        late_reads);
  }
  template <typename Sum, std::size_t kCount>
  static void run_wgmma(Sum (&sums)[kCount], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                        uint64_t rhs, int accumulate, const char* spelling, const char* flags) {
    // Rows `lane / 4` and 8 more, over 32 bytes of k, which the four lanes of a row have.
    std::array<std::array<uint32_t, 8>, 2> rows;
    const uint32_t own[] = {a0, a1, a2, a3};
    const int row = lane() / 4;
    for (int i = 0; i < 4; ++i) {
      with_values_of_warp(own[i], [&](auto of) {
        for (int t = 0; t < 4; ++t) rows[i % 2][i / 2 * 4 + t] = of(4 * row + t);
        return 0;
      });
    }
    running->mmas.add(
        [=, &sums] {
          const WgmmaTypes types(spelling, flags);
          const int bytes = bytes_of(types.lhs);
          wgmma(
              sums, kCount, types,
              [&](int r, int k) {
                return reinterpret_cast<const char*>(rows[r >= 8].data()) + k * bytes;
              },
              Matrix(rhs), accumulate != 0);
        },
        late_reads);
  }

  template <typename... R>
  static void mixed_mma(float* (&sums)[4], R... registers) {
    // Both operands as float16, which represents all 8-bit floats.
    const uint32_t words[] = {registers...};
    const bool lhs_e4m3 = has("e4m3.e5m2");
    for (int part = 0; part < 2; ++part) {
      uint32_t halves[6];
      for (int i = 0; i < 6; ++i) {
        const bool e4m3 = (i < 4) == lhs_e4m3;
        uint32_t word = 0;
        for (int e = 0; e < 2; ++e) {
          const uint32_t byte = words[i] >> (8 * (2 * part + e)) & 255;
          word |= to_f16(e4m3 ? from_e4m3(byte) : from_e5m2(byte)) << (16 * e);
        }
        halves[i] = word;
      }
      mma_16x8<float, uint32_t>(Type::kF16, sums, {{halves[0], halves[2]}, {halves[1], halves[3]}},
                                {halves[4], halves[5]});
    }
  }

  // outputs ..., address
  template <typename First, typename... Rest>
  static void load(First& first, Rest&&... rest) {
    auto all = std::forward_as_tuple(first, rest...);
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      constexpr std::size_t kBytes = sizeof(First) * sizeof...(i);
      const auto address = std::get<sizeof...(i)>(all);
      const char* from;
      if constexpr (has("ld.shared")) {
        from = shared_at(address, kBytes);
      } else {
        from = global_at(address, kBytes);
      }
      load_words(from, std::get<i>(all)...);
    }(std::make_index_sequence<sizeof...(rest)>());
  }
  // outputs ..., address, whether inside
  template <typename First, typename... Rest>
  static void load_inside(First& first, Rest&&... rest) {
    auto all = std::forward_as_tuple(first, rest...);
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      ((std::get<i>(all) = 0), ...);
      if (std::get<sizeof...(i) + 1>(all) == 0) return;
      load_words(global_at(std::get<sizeof...(i)>(all), sizeof(First) * sizeof...(i)),
                 std::get<i>(all)...);
    }(std::make_index_sequence<sizeof...(rest) - 1>());
  }
  // address, inputs ...
  template <typename Address, typename... Inputs>
  static void store(Address address, const Inputs&... inputs) {
    if constexpr (has("st.shared")) {
      store_words(shared_at(address, (sizeof inputs + ...)), inputs...);
    } else {
      store_words(global_at(address, (sizeof inputs + ...)), inputs...);
    }
  }
};

// -- Launches

template <typename T>
T parameter(const char*& bytes) {
  std::array<char, sizeof(T)> copy;
  std::memcpy(copy.data(), bytes, sizeof(T));
  bytes += sizeof(T);
  return std::bit_cast<T>(copy);
}

// Launches a kernel whose parameters are these bytes, one after the other.
template <typename... Parameters>
void launch_with(void (*function)(Parameters...), Dim3 grid, Dim3 block, Dim3 cluster,
                 std::uint32_t shared_bytes, const char* bytes) {
  // In braces, arguments are evaluated in their order.
  const std::tuple<Parameters...> arguments{parameter<Parameters>(bytes)...};
  launch(grid, block, cluster, shared_bytes, [&] { std::apply(function, arguments); });
}

}  // namespace emulation

// Rows of strided arrays, and their distribution among the threads of memory-bound kernels.
#pragma once

#include "ptx.cuh"
#include "types.cuh"

namespace tilekern {

inline constexpr int kMaxRowDims = kMaxBatchDims + 1;

// Enumerated rows of an array; `StridedRows` in `plans/strided_rows.py` packs the same fields.
struct StridedRows {
  // The dimensions that enumerate them, outermost first; unused ones come first with size 1.
  int64 strides[kMaxRowDims];
  uint32 sizes[kMaxRowDims];
  uint32 count;
};

inline int64 row_offset(const StridedRows& rows, uint32 row) {
  int64 offset = 0;
#pragma unroll
  for (int dim = kMaxRowDims - 1; dim > 0; --dim) {
    offset += row % rows.sizes[dim] * rows.strides[dim];
    row /= rows.sizes[dim];
    // The plan merges dimensions, so one is usually enough.
    if (row == 0) return offset;
  }
  return offset + row * rows.strides[0];
}

// A CTA processes a segment of each of several rows, with 2^log2_lanes threads side by side on
// each, so that long and short rows keep all threads busy.
struct RowTiling {
  uint32 segments;
  uint32 log2_lanes;
};

struct RowPosition {
  uint32 row;
  uint32 segment;
  uint32 lane;
  uint32 lanes;
};

template <int kThreads>
inline RowPosition row_position(const RowTiling& tiling) {
  const uint32 lanes = 1u << tiling.log2_lanes;
  const uint32 first = blockIdx.x / tiling.segments * (kThreads >> tiling.log2_lanes);
  return {first + (threadIdx.x >> tiling.log2_lanes), blockIdx.x % tiling.segments,
          threadIdx.x & (lanes - 1), lanes};
}

// Loads kWords 32-bit words that the kernel only reads, or returns zeros unless `inside`. It is not
// volatile, so that the compiler can keep many loads in flight.
template <int kWords>
inline void load_read_only(uint32 (&words)[kWords], const void* address, bool inside) {
  static_assert(kWords == 2 || kWords == 4);
  const int predicate = inside;
  if constexpr (kWords == 2) {
    asm("{\n"
        "  .reg .pred inside;\n"
        "  setp.ne.s32 inside, %3, 0;\n"
        "  mov.b32 %0, 0;\n"
        "  mov.b32 %1, 0;\n"
        "  @inside ld.global.nc.v2.u32 {%0, %1}, [%2];\n"
        "}"
        : "=&r"(words[0]), "=&r"(words[1])
        : "l"(address), "r"(predicate));
  } else {
    asm("{\n"
        "  .reg .pred inside;\n"
        "  setp.ne.s32 inside, %5, 0;\n"
        "  mov.b32 %0, 0;\n"
        "  mov.b32 %1, 0;\n"
        "  mov.b32 %2, 0;\n"
        "  mov.b32 %3, 0;\n"
        "  @inside ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
        : "l"(address), "r"(predicate));
  }
}

// Stores kWords 32-bit words in one instruction; the compiler does not always merge adjacent
// stores.
template <int kWords>
inline void store_global(void* address, const uint32 (&words)[kWords]) {
  static_assert(kWords == 2 || kWords == 4);
  if constexpr (kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

// Loads kBytes bytes (8 or 16) at any multiple of kItemBytes, as two aligned vectors that are
// shifted in registers. Neighbouring windows read each vector twice, the second time from L1.
template <int kBytes, int kItemBytes>
class Window {
 public:
  static constexpr int kWords = kBytes / 4;

  // Reads the vectors that hold at least one byte before `end`. Bytes after `end` are unspecified,
  // or zeros if `source` is at or beyond it. A vector that ends before `begin` is not read.
  void fetch(const char* source, const char* end, const char* begin = nullptr) {
    misalignment_ = static_cast<int>(reinterpret_cast<unsigned long long>(source) % kBytes);
    const char* aligned = source - misalignment_;
    load_read_only(low_, aligned, source < end && aligned + kBytes > begin);
    load_read_only(high_, aligned + kBytes, misalignment_ != 0 && aligned + kBytes < end);
  }

  void cut(uint32 (&words)[kWords]) const {
    uint32 shifted[2 * kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      shifted[i] = low_[i];
      shifted[kWords + i] = high_[i];
    }
    // The shift is first by 2 words, then by 1, and then by bytes.
#pragma unroll
    for (int step = kWords / 2; step > 0; step /= 2) {
      const bool shift = (misalignment_ & (4 * step)) != 0;
#pragma unroll
      for (int i = 0; i + step < 2 * kWords; ++i) {
        shifted[i] = shift ? shifted[i + step] : shifted[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = kItemBytes >= 4
                     ? shifted[i]
                     : funnel_shift_right(shifted[i], shifted[i + 1], 8 * misalignment_);
    }
  }

 private:
  int misalignment_;
  uint32 low_[kWords];
  uint32 high_[kWords];
};

// Clears all but the first `valid` bytes.
template <int kWords>
inline void keep_bytes(uint32 (&words)[kWords], int64 valid) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int64 kept = valid - 4 * i;
    if (kept < 4) words[i] = kept <= 0 ? 0 : words[i] & ((1u << (8 * kept)) - 1);
  }
}

}  // namespace tilekern

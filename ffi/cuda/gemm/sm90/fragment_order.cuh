// Orders rows of x along k as fragments of weights are ordered (`weight_fragments.cuh`).
//
// A span is what the weights of 16 bytes are multiplied with: element `16 / kBits * q + i` of a
// span, of q from 0 to 7, comes to place `8 * i + q`.
#pragma once

#include "ptx.cuh"
#include "strided_rows.cuh"
#include "vector_loads.cuh"

namespace tilekern {

inline constexpr int kFragmentOrderThreads = 128;

// Run-time sizes; `plans/gemm/sm90/weight_only_launches.py` packs the same fields in the same
// order.
struct FragmentOrderShape {
  // Spans of all rows of the result, and of a row of x and of the result. Those behind x are zeros.
  int64 all_spans;
  int32 spans;
  int32 padded_spans;
};

// One thread has a span. The next launch begins beside this one, and waits for it by itself.
template <int kBits>
__global__ void __launch_bounds__(kFragmentOrderThreads)
    order_as_fragments(const uint32* x, uint32* ordered,
                       const __grid_constant__ FragmentOrderShape shape) {
  launch_dependents();
  const int64 at = static_cast<int64>(blockIdx.x) * kFragmentOrderThreads + threadIdx.x;
  if (at >= shape.all_spans) return;
  // Words of two elements: those of a span, and those of eight elements.
  constexpr int kWords = 64 / kBits, kRun = 4;
  const int span = static_cast<int>(at % shape.padded_spans);
  uint32 words[kWords] = {};
  if (span < shape.spans) {
    const uint32* from = x + (at / shape.padded_spans * shape.spans + span) * kWords;
#pragma unroll
    for (int i = 0; i < kWords; i += kRun) {
      const Bits<16> loaded = load_once<16>(from + i);
#pragma unroll
      for (int j = 0; j < kRun; ++j) words[i + j] = loaded.words[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 16 / kBits; ++i) {
    uint32 run[kRun];
#pragma unroll
    for (int pair = 0; pair < kRun; ++pair) {
      const int first = 2 * pair * (8 / kBits) + i / 2;
      run[pair] = permute_bytes(words[first], words[first + 8 / kBits], i % 2 ? 0x7632 : 0x5410);
    }
    store_global(ordered + at * kWords + i * kRun, run);
  }
}

}  // namespace tilekern

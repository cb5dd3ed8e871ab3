// The k-th largest element of what a CTA holds in registers, as unsigned numbers.
#pragma once

#include "block_scan.cuh"

namespace tilekern {

// Where the k-th largest element of a tile is: among the `count` elements with
// bits >> shift == prefix, of which `wanted` are among the k largest.
template <typename Bits>
struct Threshold {
  Bits prefix;
  int shift;
  uint32 wanted;
  uint32 count;
};

// Finds it by the digits of the elements, most significant first. The threads hold all elements,
// and zeros, which count as elements. The shift is 0 with kAllDigits; without it, the search may
// end at a digit where all of the count are wanted. All threads of the CTA call it.
template <int kBits, int kThreads, bool kAllDigits, typename Bits, int kItems>
inline Threshold<Bits> find_threshold(const Bits (&own)[kItems], uint32 k) {
  // Few threads clear and add up few counts.
  constexpr int kMaxWidth = kThreads < 256 ? 8 : 11;
  constexpr int kDigits = (kBits + kMaxWidth - 1) / kMaxWidth;
  constexpr int kWidth = (kBits + kDigits - 1) / kDigits;
  constexpr uint32 kBins = 1u << kWidth;
  constexpr uint32 kOwnBins = max_of<uint32>(1, kBins / kThreads);
  __shared__ uint32 counts[kBins];
  __shared__ uint32 chosen, chosen_count, chosen_wanted;
  const uint32 thread = threadIdx.x;
  Threshold<Bits> at{0, kBits, k, 0};
  do {
    const int width = min_of(kWidth, at.shift);
    at.shift -= width;
    for (uint32 bin = thread; bin < kBins; bin += kThreads) counts[bin] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const Bits top = own[i] >> at.shift;
      if (top >> width == at.prefix) {
        atomicAdd(&counts[static_cast<uint32>(top) & ((1u << width) - 1)], 1u);
      }
    }
    __syncthreads();
    // A thread's bins, the largest digit first.
    const uint32 last = kBins - 1 - thread * kOwnBins;
    const bool has_bins = thread * kOwnBins < kBins;
    uint32 sum = 0;
    for (uint32 i = 0; has_bins && i < kOwnBins; ++i) sum += counts[last - i];
    uint32 before = sum_before<kThreads>(sum);
    if (before < at.wanted && at.wanted <= before + sum) {
      uint32 bin = last;
      while (before + counts[bin] < at.wanted) before += counts[bin--];
      chosen = bin;
      chosen_count = counts[bin];
      chosen_wanted = at.wanted - before;
    }
    __syncthreads();
    at.prefix = at.prefix << width | chosen;
    at.wanted = chosen_wanted;
    at.count = chosen_count;
  } while (at.shift > 0 && (kAllDigits || at.count != at.wanted));
  return at;
}

}  // namespace tilekern

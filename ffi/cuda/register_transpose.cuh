// Transposes of small matrices in registers, in memory's packing.
#pragma once

#include "ptx.cuh"

namespace tilekern {

// Transposes kSteps runs of kMn items along MN, each at one k, to kMn runs of 16 bytes along k.
template <int kItemBytes, int kMn, int kSteps>
inline void transpose(uint32 (&along_k)[kMn][4],
                      const uint32 (&along_mn)[kSteps][kMn * kItemBytes / 4]) {
#pragma unroll
  for (int mn = 0; mn < kMn; ++mn) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if constexpr (kItemBytes == 8) {
        along_k[mn][word] = along_mn[word / 2][2 * mn + word % 2];
      } else if constexpr (kItemBytes == 4) {
        along_k[mn][word] = along_mn[word][mn];
      } else if constexpr (kItemBytes == 2) {
        along_k[mn][word] =
            permute_bytes(along_mn[2 * word][mn / 2], along_mn[2 * word + 1][mn / 2],
                          mn % 2 == 0 ? 0x5410 : 0x7632);
      } else {
        // Each half combines the same byte of two words, and a third permutation joins the halves.
        const uint32 pair = 0x40 + 0x11 * (mn % 4);
        uint32 halves[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int step = 4 * word + 2 * half;
          halves[half] = permute_bytes(along_mn[step][mn / 4], along_mn[step + 1][mn / 4], pair);
        }
        along_k[mn][word] = permute_bytes(halves[0], halves[1], 0x5410);
      }
    }
  }
}

}  // namespace tilekern

// Transposes of small blocks in registers, packed as memory has them.
#pragma once

#include "ptx.cuh"

namespace tilekern {

// kSteps runs of kLines items, each along lines at one k, as kLines runs of 16 bytes along k.
template <int kItemBytes, int kLines, int kSteps>
inline void transpose(uint32 (&along_k)[kLines][4],
                      const uint32 (&along_lines)[kSteps][kLines * kItemBytes / 4]) {
#pragma unroll
  for (int line = 0; line < kLines; ++line) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if constexpr (kItemBytes == 8) {
        along_k[line][word] = along_lines[word / 2][2 * line + word % 2];
      } else if constexpr (kItemBytes == 4) {
        along_k[line][word] = along_lines[word][line];
      } else if constexpr (kItemBytes == 2) {
        along_k[line][word] =
            permute_bytes(along_lines[2 * word][line / 2], along_lines[2 * word + 1][line / 2],
                          line % 2 == 0 ? 0x5410 : 0x7632);
      } else {
        // The same byte of two words, twice, and both together.
        const uint32 pair = 0x40 + 0x11 * (line % 4);
        uint32 halves[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int step = 4 * word + 2 * half;
          halves[half] =
              permute_bytes(along_lines[step][line / 4], along_lines[step + 1][line / 4], pair);
        }
        along_k[line][word] = permute_bytes(halves[0], halves[1], 0x5410);
      }
    }
  }
}

}  // namespace tilekern

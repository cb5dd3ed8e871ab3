// The passes of Winograd's form of Strassen's algorithm that do not split: operands' sums of blocks
// in float32, for where split-float16 emulation is not accurate, and the result's blocks from the
// products.
#pragma once

#include "gemm/passes/split_float32.cuh"

namespace tilekern {

inline constexpr int kWinogradThreads = 256;

// The blocks of a matrix, whose rows of k may lie anywhere; `sums_launch` packs the same fields.
struct BlockLayout {
  // Distances in bytes.
  int64 mn_stride;
  int64 k_stride;
  uint32 mn;
  uint32 k;
  // The length of a row of the sums.
  uint32 k_padded;
};

// Writes float32 sums[sum][mn][k_padded] if `use_float32` is set.
__global__ void __launch_bounds__(kWinogradThreads)
    sum_blocks_if(const int32* use_float32, const char* source, float* sums,
                  const __grid_constant__ BlockLayout layout,
                  const __grid_constant__ BlockSums blocks) {
  if (!*use_float32) return;
  const int64 count = static_cast<int64>(blocks.count) * layout.mn * layout.k_padded;
  const int64 step = static_cast<int64>(gridDim.x) * kWinogradThreads;
  for (int64 i = static_cast<int64>(blockIdx.x) * kWinogradThreads + threadIdx.x; i < count;
       i += step) {
    const int64 row = i / layout.k_padded;
    const int64 k = i % layout.k_padded;
    const uint32 sum = static_cast<uint32>(row / layout.mn);
    const char* element = source + row % layout.mn * layout.mn_stride + k * layout.k_stride;
    float total = 0;
    for (int block = 0; block < 4; ++block) {
      const float sign = block_sign(blocks, sum, block);
      if (sign == 0 || k >= layout.k) continue;
      total = fmaf(sign, *reinterpret_cast<const float*>(element + blocks.offsets[block]), total);
    }
    sums[i] = total;
  }
}

// A thread combines this many elements, which are one vector.
inline constexpr int kCombined = 4;

// Writes out[2][rows][2][columns] from products[7][rows][columns]; columns are a multiple of 4.
__global__ void __launch_bounds__(kWinogradThreads)
    combine_products(const float* products, float* out, uint32 rows, uint32 columns) {
  const int64 block = static_cast<int64>(rows) * columns;
  const int64 step = static_cast<int64>(gridDim.x) * kWinogradThreads * kCombined;
  for (int64 i = (static_cast<int64>(blockIdx.x) * kWinogradThreads + threadIdx.x) * kCombined;
       i < block; i += step) {
    uint32 words[7][4];
#pragma unroll
    for (int product = 0; product < 7; ++product) {
      load_read_only(words[product], products + product * block + i, true);
    }
    uint32 blocks[4][4];
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      float p[7];
#pragma unroll
      for (int product = 0; product < 7; ++product) {
        p[product] = __uint_as_float(words[product][lane]);
      }
      const float u2 = p[0] + p[5];
      const float u3 = u2 + p[6];
      blocks[0][lane] = __float_as_uint(p[0] + p[1]);
      blocks[1][lane] = __float_as_uint(u2 + p[4] + p[2]);
      blocks[2][lane] = __float_as_uint(u3 - p[3]);
      blocks[3][lane] = __float_as_uint(u3 + p[4]);
    }
    const int64 row = i / columns;
    float* first = out + row * 2 * columns + i % columns;
    store_global(first, blocks[0]);
    store_global(first + columns, blocks[1]);
    store_global(first + 2 * block, blocks[2]);
    store_global(first + 2 * block + columns, blocks[3]);
  }
}

}  // namespace tilekern

// A thread computes 8x8 elements whatever the type, a warp 32x64 and a block 128x128. Tiles come by
// cp.async into three buffers, so that no registers hold them on the way, and the operands of the
// next step of k are read from shared memory while this one's are multiplied.
//
// A step of k takes 64 multiply-adds of a thread, and four loads of 16 bytes for float32 or eight
// for float64: two or four of b, and of a, whose rows the compiler reads for several steps at once,
// as many. Lanes that differ in bit 0 share a row of a, and lanes that differ in bit 1 share
// columns of b: where neighbours load the same address, shared memory serves two parts of a warp at
// once.
//
// Expect: 80 % or more of what multiply-adds without tensor cores can do. Those of float64 take
// every second issue slot and leave the others for loads; for float32 they share all slots, 64 of
// 68.
#include <tilekern/ptx.cuh>

using namespace tilekern;

constexpr int kThreads = 256, kStages = 3, kTile = 128, kDepth = 16, kEach = 8;

template <typename T>
struct alignas(16) Chunk {
  T at[16 / sizeof(T)];
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    warp_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
  constexpr int kChunk = 16 / sizeof(T), kChunks = kEach / kChunk;
  // Rows of a are padded so that the four rows that a warp reads at a time lie in other banks.
  constexpr int kPitch = kDepth + kChunk, kStage = kTile * (kPitch + kDepth);
  extern __shared__ int4 shared[];
  T* const stages = reinterpret_cast<T*>(shared);

  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  // What this thread copies of a k-tile: a chunk of every kARows-th row of a, of every kBRows-th of
  // b.
  constexpr int kARows = kThreads * kChunk / kDepth, kBRows = kThreads * kChunk / kTile;
  const int a_row = threadIdx.x * kChunk / kDepth, a_column = threadIdx.x * kChunk % kDepth;
  const int b_row = threadIdx.x * kChunk / kTile, b_column = threadIdx.x * kChunk % kTile;
  const T* const from_a = a + static_cast<long long>(first_row + a_row) * k + a_column;
  const T* const from_b = b + static_cast<long long>(b_row) * n + first_column + b_column;
  const auto bring = [&](int stage, int first) {
    T* const a_tile = stages + stage * kStage;
    T* const b_tile = a_tile + kTile * kPitch;
#pragma unroll
    for (int row = 0; row < kTile; row += kARows) {
      cp_async<16>(shared_address(a_tile + (a_row + row) * kPitch + a_column),
                   from_a + static_cast<long long>(row) * k + first,
                   first_row + a_row + row < m && first + a_column < k);
    }
#pragma unroll
    for (int row = 0; row < kDepth; row += kBRows) {
      cp_async<16>(shared_address(b_tile + (b_row + row) * kTile + b_column),
                   from_b + static_cast<long long>(first + row) * n,
                   first + b_row + row < k && first_column + b_column < n);
    }
  };

  // Warps are 4 by 2, and the lanes of a warp 4 by 8: bits 1 and 4 of a lane number its row.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int y = warp / 2 * 32 + (lane / 2 % 2 + lane / 16 * 2);
  const int x = warp % 2 * 64 + (lane % 2 + lane / 4 % 4 * 2) * kChunk;
  T of_a[2][kEach];
  Chunk<T> of_b[2][kChunks];
  const auto read = [&](int slot, const T* a_tile, int i) {
    const T* const b_tile = a_tile + kTile * kPitch;
#pragma unroll
    for (int e = 0; e < kEach; ++e) of_a[slot][e] = a_tile[(y + 4 * e) * kPitch + i];
#pragma unroll
    for (int f = 0; f < kChunks; ++f) {
      of_b[slot][f] = *reinterpret_cast<const Chunk<T>*>(b_tile + i * kTile + x + 8 * kChunk * f);
    }
  };

  T sums[kEach][kEach] = {};
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    bring(stage, stage * kDepth);
    cp_async_commit();
  }
  int stage = 0;
  for (int first = 0; first < k; first += kDepth) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    bring((stage + kStages - 1) % kStages, first + (kStages - 1) * kDepth);
    cp_async_commit();
    const T* const a_tile = stages + stage * kStage;
    read(0, a_tile, 0);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i + 1 < kDepth) read((i + 1) % 2, a_tile, i + 1);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
#pragma unroll
        for (int f = 0; f < kEach; ++f) {
          sums[e][f] += of_a[i % 2][e] * of_b[i % 2][f / kChunk].at[f % kChunk];
        }
      }
    }
    stage = (stage + 1) % kStages;
  }
  cp_async_wait<0>();

#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int row = first_row + y + 4 * e;
#pragma unroll
    for (int f = 0; f < kChunks; ++f) {
      const int column = first_column + x + 8 * kChunk * f;
      if (row >= m || column >= n) continue;
      Chunk<T> chunk;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) chunk.at[i] = sums[e][kChunk * f + i];
      *reinterpret_cast<Chunk<T>*>(c + static_cast<long long>(row) * n + column) = chunk;
    }
  }
}

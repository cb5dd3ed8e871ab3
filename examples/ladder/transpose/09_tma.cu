// The tensor memory accelerator (TMA) moves the tiles: one thread requests a tile of 32x32, the
// threads transpose it from one place in shared memory to another, and one thread requests the
// store. TMA computes the addresses, clips tiles at the edges and swizzles: it places the 16-byte
// chunk p of a row at p ^ (row % 8), so that the chunks of one column lie in different banks.
//
// Expect: the memory's bandwidth with a few hundred instructions a tile. 64 threads take 4x4 each,
// along diagonals, so that eight neighbours touch eight different chunks both ways.
#include <tilekern/mbarrier.cuh>
#include <tilekern/ptx.cuh>
#include <tilekern/tma.cuh>

using namespace tilekern;

constexpr int kTile = 32;

__global__ void __launch_bounds__(64) tma(const float*, float*, const __grid_constant__ TensorMap x,
                                          const __grid_constant__ TensorMap y) {
  // The swizzle is of the address, and repeats every 1024 bytes.
  __shared__ alignas(1024) float4 from[kTile][kTile / 4];
  __shared__ alignas(1024) float4 to[kTile][kTile / 4];
  __shared__ alignas(8) uint64 barrier;
  const uint32 full = shared_address(&barrier);
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_barrier_init();
    mbarrier_arrive_expect_tx(full, sizeof(from));
    tma_load(shared_address(from), x, {first_column, first_row, 0, 0, 0}, full);
  }
  __syncthreads();  // The barrier must have been made before it is waited for.
  mbarrier_wait(full, 0);

  const int i = threadIdx.x % 8, j = (threadIdx.x % 8 + threadIdx.x / 8) % 8;
  // Row r of the tile has its chunk p at p ^ (r % 8).
  const auto chunk = [](float4(&tile)[kTile][kTile / 4], int r, int p) -> float4& {
    return tile[r][p ^ r % 8];
  };
  const float4 a = chunk(from, 4 * i, j), b = chunk(from, 4 * i + 1, j);
  const float4 c = chunk(from, 4 * i + 2, j), d = chunk(from, 4 * i + 3, j);
  chunk(to, 4 * j, i) = make_float4(a.x, b.x, c.x, d.x);
  chunk(to, 4 * j + 1, i) = make_float4(a.y, b.y, c.y, d.y);
  chunk(to, 4 * j + 2, i) = make_float4(a.z, b.z, c.z, d.z);
  chunk(to, 4 * j + 3, i) = make_float4(a.w, b.w, c.w, d.w);

  fence_async_proxy();  // What threads have written becomes visible to TMA.
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(y, {first_row, first_column, 0, 0, 0}, shared_address(to));
    tma_store_commit();
    tma_store_wait_read<0>();  // Shared memory must last until TMA has read it.
  }
}

// The copy engine (TMA) moves the tiles: one thread asks for a box of 32x32, the threads transpose
// it from one place in shared memory to another, and one thread asks for the box to be stored. The
// engine works out the addresses, clips the boxes at the edges and swizzles: it puts the 16-byte
// piece p of a row to p ^ (row % 8), so that pieces of one column lie in different banks.
//
// Expect: memory bandwidth with a few hundred instructions for a tile. 64 threads take 4x4 each,
// along diagonals, so that eight neighbours touch eight different pieces both ways.
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
    init_barrier(full, 1);
    publish_barriers();
    arrive_expecting(full, sizeof(from));
    load_box(shared_address(from), x, {first_column, first_row, 0, 0, 0}, full);
  }
  __syncthreads();  // The barrier must have been made before it is waited for.
  wait(full, 0);

  const int i = threadIdx.x % 8, j = (threadIdx.x % 8 + threadIdx.x / 8) % 8;
  // Row r of the tile has its piece p at p ^ (r % 8).
  const auto piece = [](float4(&tile)[kTile][kTile / 4], int r, int p) -> float4& {
    return tile[r][p ^ r % 8];
  };
  const float4 a = piece(from, 4 * i, j), b = piece(from, 4 * i + 1, j);
  const float4 c = piece(from, 4 * i + 2, j), d = piece(from, 4 * i + 3, j);
  piece(to, 4 * j, i) = make_float4(a.x, b.x, c.x, d.x);
  piece(to, 4 * j + 1, i) = make_float4(a.y, b.y, c.y, d.y);
  piece(to, 4 * j + 2, i) = make_float4(a.z, b.z, c.z, d.z);
  piece(to, 4 * j + 3, i) = make_float4(a.w, b.w, c.w, d.w);

  fence_async_proxy();  // What threads have written becomes visible to the engine.
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(y, {first_row, first_column, 0, 0, 0}, shared_address(to));
    commit_stores();
    wait_stores_read<0>();  // Shared memory must last until the engine has read it.
  }
}

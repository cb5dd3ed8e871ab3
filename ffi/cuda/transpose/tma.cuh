// Transposes by TMA (sm_90 and later), for arrays whose rows are aligned to 16 bytes, and items of
// 1 or 2 bytes.
#pragma once

#include "mbarrier.cuh"
#include "register_transpose.cuh"
#include "tma.cuh"
#include "transpose/shape.cuh"

namespace tilekern {

// Compile-time choices; `BoxTranspose` in `plans/transpose/tma.py` makes them. A cell is a square
// of 128 bytes of a row by as many rows as 128 bytes hold items, and a tile is 128 rows of a column
// of cells.
struct BoxConfig {
  // 1 or 2.
  int item_bytes;

  // Items on an edge of a cell, and of the block of 16-byte rows that a thread transposes.
  constexpr int cell() const { return 128 / item_bytes; }
  constexpr int block() const { return 16 / item_bytes; }
  constexpr int cells() const { return item_bytes; }
  constexpr int threads() const { return 64 * cells(); }
};

inline constexpr int kBoxRows = 128;
inline constexpr int kBoxBytes = kBoxRows * 128;
// Stages of input tiles, and buffers of output tiles.
inline constexpr int kBoxStages = 4;
inline constexpr int kBoxOutputs = 2;

// `BoxTranspose` packs the same fields. The tensor maps have rows and columns (swapped for the
// source) and three outer dimensions.
struct BoxShape {
  TileGrid grid;
  uint32 tiles;
  Divisor outer[3];
};

extern __shared__ __align__(1024) unsigned char transpose_boxes_shared[];

// A persistent CTA iterates over tiles. While it transposes one, TMA loads the next ones and stores
// the preceding one.
template <BoxConfig config>
class BoxTransposer {
  static constexpr int kBlock = config.block();
  // Bytes of a cell, which is one TMA tile of the result.
  static constexpr int kCellBytes = config.cell() * 128;
  static constexpr int kBarriers = (kBoxStages + kBoxOutputs) * kBoxBytes;
  static_assert(kCellBytes % 1024 == 0, "swizzles repeat there");

 public:
  BoxTransposer(const TensorMap& source, const TensorMap& result, const BoxShape& shape)
      : source_(source),
        result_(result),
        shape_(shape),
        shared_(shared_address(transpose_boxes_shared)) {}

  void run() {
    const bool leads = threadIdx.x == 0;
    if (leads) {
      prefetch_tensor_map(source_);
      prefetch_tensor_map(result_);
#pragma unroll
      for (int stage = 0; stage < kBoxStages; ++stage) mbarrier_init(barrier(stage), 1);
      fence_barrier_init();
#pragma unroll 1
      for (int stage = 0; stage < kBoxStages; ++stage) load(blockIdx.x + stage * gridDim.x, stage);
    }
    __syncthreads();
    const BlockPosition position = block_position();
    PipelineState<kBoxStages> ring;
    uint32 output = 0;
#pragma unroll 1
    for (uint32 tile = blockIdx.x; tile < shape_.tiles; tile += gridDim.x) {
      mbarrier_wait(barrier(ring.stage), ring.parity);
      uint32 block[kBlock][4];
      read(block, ring.stage, position);
      // TMA must have read the output buffer before it is overwritten.
      if (leads) tma_store_wait_read<kBoxOutputs - 1>();
      __syncthreads();
      if (leads) load(tile + kBoxStages * gridDim.x, ring.stage);
      write(block, output, position);
      fence_async_proxy();
      __syncthreads();
      if (leads) store(tile, output);
      output ^= 1;
      ring.advance();
    }
    if (leads) tma_store_wait_read<0>();
  }

 private:
  // The cell of a thread's block, and the block's place among the 8 by 8 of the cell.
  struct BlockPosition {
    int cell;
    int row;
    int column;
  };

  // Eight threads access shared memory at a time. Their blocks form a diagonal, so that their
  // 16-byte runs are in different banks in the source's cell and in the result's, because the
  // swizzle moves runs by their row.
  static BlockPosition block_position() {
    const int column = threadIdx.x % 8;
    return {static_cast<int>(threadIdx.x / 64), static_cast<int>(threadIdx.x % 64 / 8) ^ column,
            column};
  }

  static uint32 swizzled(uint32 cell_address, int row, int run) {
    return cell_address + row * 128 + ((run ^ (row & 7)) << 4);
  }

  uint32 barrier(int stage) const { return shared_ + kBarriers + stage * kBarrierBytes; }
  uint32 input(int stage) const { return shared_ + stage * kBoxBytes; }
  uint32 output(uint32 i) const { return input(kBoxStages + i); }

  TmaCoordinates origin(const TilePosition& tile, int64 inner, int64 second) const {
    uint32 outer = tile.outer;
    int32 indices[3];
#pragma unroll
    for (int dim = 2; dim >= 0; --dim) {
      const Quotient at = divide(outer, shape_.outer[dim]);
      indices[dim] = at.remainder;
      outer = at.quotient;
    }
    return {{static_cast<int32>(inner), static_cast<int32>(second), indices[0], indices[1],
             indices[2]}};
  }

  void load(uint32 tile, int stage) const {
    if (tile >= shape_.tiles) return;
    const TilePosition at = tile_position(shape_.grid, tile);
    mbarrier_arrive_expect_tx(barrier(stage), kBoxBytes);
    tma_load(input(stage), source_,
             origin(at, static_cast<int64>(at.column) * config.cell(),
                    static_cast<int64>(at.row) * kBoxRows),
             barrier(stage));
  }

  void store(uint32 tile, uint32 from) const {
    const TilePosition at = tile_position(shape_.grid, tile);
#pragma unroll
    for (int cell = 0; cell < config.cells(); ++cell) {
      const int64 row = static_cast<int64>(at.row) * kBoxRows + cell * config.cell();
      tma_store(result_, origin(at, row, static_cast<int64>(at.column) * config.cell()),
                output(from) + cell * kCellBytes);
    }
    tma_store_commit();
  }

  void read(uint32 (&block)[kBlock][4], int stage, const BlockPosition& at) const {
    const int row = at.cell * config.cell() + at.row * kBlock;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      load_shared(block[i], swizzled(input(stage), row + i, at.column));
    }
  }

  void write(const uint32 (&block)[kBlock][4], uint32 to, const BlockPosition& at) const {
    const uint32 cell_address = output(to) + at.cell * kCellBytes;
    uint32 transposed[kBlock][4];
    transpose<config.item_bytes>(transposed, block);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      store_shared(swizzled(cell_address, at.column * kBlock + i, at.row), transposed[i]);
    }
  }

  const TensorMap& source_;
  const TensorMap& result_;
  const BoxShape& shape_;
  uint32 shared_;
};

template <BoxConfig config>
__global__ void __launch_bounds__(config.threads())
    transpose_boxes(const __grid_constant__ TensorMap source,
                    const __grid_constant__ TensorMap result,
                    const __grid_constant__ BoxShape shape) {
  BoxTransposer<config>(source, result, shape).run();
}

}  // namespace tilekern

// The epilogue of a warp: stores its accumulators through shared memory, so that stores to global
// memory are coalesced along rows. Before that, the kernel's epilogue functor (../../epilogue.cuh)
// is applied to them.
#pragma once

#include "epilogue.cuh"
#include "ptx.cuh"

namespace tilekern {

// Rows of an epilogue subtile, which is staged in shared memory at a time.
inline constexpr int kSubtileRows = 16;

// The staging buffer of one warp, for a subtile of kColumns columns. Padding of 8 elements per row
// puts the accesses of neighbouring rows on different banks.
template <typename Out, int kColumns>
struct Staging {
  static constexpr int kPitch = (kColumns + 8) * static_cast<int>(sizeof(Out));
  static constexpr int kBytes = kSubtileRows * kPitch;
};

// Converts kCount accumulators and writes them to adjacent elements of the staging buffer.
template <typename Out, int kCount, typename Accumulator>
inline void stage_run(uint32 address, const Accumulator (&accumulators)[kCount]) {
  constexpr int kPairWords = static_cast<int>(sizeof(Out)) / 2;
  constexpr int kWords = kCount / 2 * kPairWords;
  constexpr int kVector = min_of(4, kWords);
  uint32 words[kWords];
#pragma unroll
  for (int pair = 0; pair < kCount / 2; ++pair) {
    uint32 packed[kPairWords];
    pack_pair(packed, static_cast<Out*>(nullptr), accumulators[2 * pair],
              accumulators[2 * pair + 1]);
#pragma unroll
    for (int i = 0; i < kPairWords; ++i) words[pair * kPairWords + i] = packed[i];
  }
#pragma unroll
  for (int first = 0; first < kWords; first += kVector) {
    uint32 vector[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) vector[i] = words[first + i];
    store_shared(address + 4 * first, vector);
  }
}

// A warp's part of the output, and the extent of it that is inside the array.
template <typename Out>
struct OutputTile {
  Out* first;
  int64 stride;
  int rows;
  int columns;
};

// Copies a staged subtile to the output in units of `Unit`, of which a row has a whole number.
template <typename Unit, typename Engine, typename Out>
inline void copy_subtile(const OutputTile<Out>& output, int subtile, uint32 staging, int lane) {
  constexpr int kElements = sizeof(Unit) / sizeof(Out);
  constexpr int kUnitsPerRow = Engine::kColumns / kElements;
#pragma unroll
  for (int first = 0; first < kSubtileRows * kUnitsPerRow; first += 32) {
    const int staged_row = (first + lane) / kUnitsPerRow;
    const int column = (first + lane) % kUnitsPerRow * kElements;
    const int row = Engine::subtile_row(subtile, staged_row);
    if (row < output.rows && column < output.columns) {
      const uint32 source = staging + staged_row * Staging<Out, Engine::kColumns>::kPitch +
                            column * static_cast<int>(sizeof(Out));
      Out* target = output.first + output.stride * row + column;
      *reinterpret_cast<Unit*>(target) = load_shared_as<Unit>(source);
    }
  }
}

// The coordinates of a lane's accumulators, for epilogues. `Layout` says where accumulator i lies
// in the warp's part of the output tile: row(lane, i) and column(lane, i).
template <class Layout>
struct WarpCoordinates {
  static constexpr int kAdjacentColumns = 1;
  static constexpr bool kConverged = true;
  static constexpr bool kQuads = false;

  // Where the warp's part starts in the matrix.
  int first_row;
  int first_column;
  const int32& row_count;
  const int32& column_count;
  int batch_index;
  bool is_group;

  int row(int i) const { return first_row + Layout::row(threadIdx.x % 32, i); }
  int column(int i) const { return first_column + Layout::column(threadIdx.x % 32, i); }
  int rows() const { return row_count; }
  int columns() const { return column_count; }
  int batch(int) const { return batch_index; }
  bool in_group() const { return is_group; }
};

// An engine holds the accumulators of its warp in subtiles of rows: stage_subtile() stages one, and
// subtile_row() returns the row of the warp's tile for a staged row.
template <typename Out, typename Engine>
inline void store_output(const Engine& engine, const OutputTile<Out>& output, bool vectors,
                         uint32 staging, int lane) {
#pragma unroll
  for (int subtile = 0; subtile < Engine::kRows / kSubtileRows; ++subtile) {
    engine.template stage_subtile<Out>(subtile, staging, Staging<Out, Engine::kColumns>::kPitch,
                                       lane);
    __syncwarp();
    if (vectors) {
      copy_subtile<uint4, Engine>(output, subtile, staging, lane);
    } else {
      copy_subtile<Out, Engine>(output, subtile, staging, lane);
    }
    __syncwarp();
  }
}

}  // namespace tilekern

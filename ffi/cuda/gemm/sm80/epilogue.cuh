// Stores a warp's accumulators, by way of shared memory so that global memory sees whole rows;
// before that, the epilogue (../../epilogue.cuh) is applied to them.
#pragma once

#include "epilogue.cuh"
#include "ptx.cuh"

namespace tilekern {

// Rows that pass through shared memory at a time.
inline constexpr int kSlabRows = 16;

// Staging of one warp for a slab of kColumns columns. Four bytes of padding for each two of an
// element put the accesses of neighbouring rows on different banks.
template <typename Out, int kColumns>
struct Staging {
  static constexpr int kPitch = (kColumns + 8) * static_cast<int>(sizeof(Out));
  static constexpr int kBytes = kSlabRows * kPitch;
};

// Writes kCount sums to adjacent elements of the staging area.
template <typename Out, int kCount, typename Sum>
inline void stage_run(uint32 address, const Sum (&sums)[kCount]) {
  constexpr int kPairWords = static_cast<int>(sizeof(Out)) / 2;
  constexpr int kWords = kCount / 2 * kPairWords;
  constexpr int kVector = min_of(4, kWords);
  uint32 words[kWords];
#pragma unroll
  for (int pair = 0; pair < kCount / 2; ++pair) {
    uint32 packed[kPairWords];
    pack_pair(packed, static_cast<Out*>(nullptr), sums[2 * pair], sums[2 * pair + 1]);
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

// Where a warp's part of the output lies, and how much of it is inside.
template <typename Out>
struct OutputTile {
  Out* first;
  int64 stride;
  int rows;
  int columns;
};

// Copies a staged slab to the output, in units of `Unit`, of which a row has a whole number.
template <typename Unit, typename Engine, typename Out>
inline void copy_slab(const OutputTile<Out>& output, int slab, uint32 staging, int lane) {
  constexpr int kElements = sizeof(Unit) / sizeof(Out);
  constexpr int kUnitsPerRow = Engine::kColumns / kElements;
#pragma unroll
  for (int first = 0; first < kSlabRows * kUnitsPerRow; first += 32) {
    const int staged_row = (first + lane) / kUnitsPerRow;
    const int column = (first + lane) % kUnitsPerRow * kElements;
    const int row = Engine::slab_row(slab, staged_row);
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
  // Where the warp's part starts in the matrix.
  int first_row;
  int first_column;
  const int32& row_count;
  const int32& column_count;
  int batch_index;

  int row(int i) const { return first_row + Layout::row(threadIdx.x % 32, i); }
  int column(int i) const { return first_column + Layout::column(threadIdx.x % 32, i); }
  int rows() const { return row_count; }
  int columns() const { return column_count; }
  int batch(int) const { return batch_index; }
};

// An engine holds the sums of its warp in slabs of rows: write_slab() stages one, and slab_row()
// tells which row of the warp's tile a staged row is.
template <typename Out, typename Engine>
inline void store_output(const Engine& engine, const OutputTile<Out>& output, bool vectors,
                         uint32 staging, int lane) {
#pragma unroll
  for (int slab = 0; slab < Engine::kRows / kSlabRows; ++slab) {
    engine.template write_slab<Out>(slab, staging, Staging<Out, Engine::kColumns>::kPitch, lane);
    __syncwarp();
    if (vectors) {
      copy_slab<uint4, Engine>(output, slab, staging, lane);
    } else {
      copy_slab<Out, Engine>(output, slab, staging, lane);
    }
    __syncwarp();
  }
}

}  // namespace tilekern

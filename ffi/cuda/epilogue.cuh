// The epilogue: what a kernel does to accumulators between the last multiply-add and the store.
//
// Every kernel that stores a product has a template parameter `Epilogue`, the identity by default,
// and passes its trailing parameters to it: the kernel constructs `Epilogue{operands...}`. Each
// thread then calls it with accumulators that it holds, once for each of its arrays of them:
//
//   struct BiasAndRelu {
//     static constexpr bool kStores = true;  // whether the kernel stores the accumulators
//     static constexpr bool kPrefetches = false;  // whether it has prefetch(), below
//     static constexpr int kStagedColumns = 0;  // see gemm/sm90/staged_operands.cuh
//     const float* bias;  // one for each column
//
//     template <typename Accumulator, int kCount, class Coordinates>
//     void operator()(Accumulator (&accumulators)[kCount], const Coordinates& at) const {
// #pragma unroll
//       for (int i = 0; i < kCount; ++i) {
//         const float sum = accumulators[i] + bias[min_of(at.column(i), at.columns() - 1)];
//         accumulators[i] = max_of(sum, 0.0f);
//       }
//     }
//   };
//
// The call changes the accumulators in place, in the accumulators' type; the store rounds them to
// the output's. `Coordinates` says where they belong:
//
//   int row(int i), column(int i)   where accumulator i lies in its matrix of the output
//   int batch(int i)                which matrix that is: the batch dimensions count as one, the
//                                   last one fastest; a grouped GEMM has batch * groups + group
//   int rows(), columns()           where the matrix ends; along the rows of groups, where the
//                                   group's tile does
//   bool in_group()                 whether these are rows of a group, in a grouped GEMM
//   kAdjacentColumns                so many accumulators, from a multiple of that number on, are
//                                   in adjacent columns of one row
//   kConverged                      whether all threads of a warp make the same calls
//   kQuads                          whether accumulators 0 to 15, 16 to 31 and so on of four
//                                   adjacent lanes are 2 rows of 32 columns, as those of wgmma
//
// The epilogue of two products of one lhs (gemm/sm90/matmul.cuh) is called with the accumulators of
// both, `(accumulators, second, at)`, and changes the first ones.
//
// Coordinates of kernels whose epilogues may reduce rows have more (gemm/row_reductions.cuh). An
// epilogue whose results are such reductions alone has `kStores = false`, and no accumulator is
// stored.
//
// A kernel whose work tiles take long may call `prefetch<kRows, kColumns>(at)` before it computes
// one, with the coordinates of accumulator 0: the epilogue prefetches the elements that the warp
// will read for kRows rows, from at.first_row() on, and kColumns columns, from at.tile_column() on.
//
// An epilogue has to unroll its loop over the accumulators, which are registers. It must not
// synchronise, but for the threads of a warp that is converged. A tile may reach
// beyond the matrix: accumulators there are not stored, but what an epilogue reads for them has to
// be clamped as above.
//
// Rows and columns are those of the kernel, so where a plan swaps A and B, its epilogue sees the
// transposed output. A kernel that stores partial sums (split-K) is given
// the identity, and the kernel that adds them up is given the epilogue. Rows of a grouped GEMM that
// are in no group are zeros, of group 0 by their number; a generated epilogue keeps them zeros.
#pragma once

#include "types.cuh"

namespace tilekern {

struct IdentityEpilogue {
  static constexpr bool kStores = true;
  static constexpr bool kPrefetches = false;
  static constexpr int kStagedColumns = 0;

  template <typename Accumulator, int kCount, class Coordinates>
  void operator()(Accumulator (&)[kCount], const Coordinates&) const {}
};

// Applies `first` and then `second`.
template <class First, class Second>
struct ComposedEpilogue {
  static constexpr bool kStores = Second::kStores;
  static constexpr bool kPrefetches = Second::kPrefetches;
  static constexpr int kStagedColumns = Second::kStagedColumns;

  First first;
  Second second;

  template <typename Accumulator, int kCount, class Coordinates>
  void operator()(Accumulator (&accumulators)[kCount], const Coordinates& at) const {
    first(accumulators, at);
    second(accumulators, at);
  }

  template <int kRows, int kColumns, class Coordinates>
  void prefetch(const Coordinates& at) const {
    second.template prefetch<kRows, kColumns>(at);
  }

  static constexpr int staged_bytes() { return Second::staged_bytes(); }
  template <class WorkTile>
  void load(uint32 to, const WorkTile& work, int column, uint32 full) const {
    second.load(to, work, column, full);
  }
  template <class WorkTile>
  void prefetch(const WorkTile& work, int column) const {
    second.prefetch(work, column);
  }
};

}  // namespace tilekern

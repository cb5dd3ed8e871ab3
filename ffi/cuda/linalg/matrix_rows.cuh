// Small square matrices in registers. A group of lanes works on a matrix, and each lane holds one
// row. A team of threads that synchronise with each other has one or more groups.
//
// Matrices are row-major and contiguous, so a team copies all of its matrices to and from shared
// memory with coalesced vector accesses. The row stride in shared memory is odd, which keeps
// accesses to rows and to columns free of bank conflicts.
#pragma once

#include "linalg/matrix_copy.cuh"
#include "linalg/matrix_numbers.cuh"

namespace tilekern {

// Sizes that follow from the size of a matrix.
template <typename T, int kN>
struct MatrixSizes {
  static_assert(kN >= 1 && kN <= 64);
  static constexpr int kLanes = kN <= 2 ? 2 : 1 << log2_of(kN);
  static constexpr int kTeam = max_of(32, kLanes);
  static constexpr int kTeams = kTeam == 32 ? 4 : 1;
  static constexpr int kThreads = kTeams * kTeam;
  static constexpr int kMatrices = kTeam / kLanes;  // of a team
  static constexpr int kRowStride = kN | 1;
  static constexpr int kWidest = 16 / sizeof(T);
  using Tiles = MatrixTiles<T, kN, kMatrices, kTeam, kRowStride, kN * kRowStride>;
  // Elements of a row's broadcast buffer.
  static constexpr int kBroadcast = (kN + kWidest - 1) / kWidest * kWidest;
};

// The maximal number of right-hand sides that a thread holds at once.
inline constexpr int kMaxColumns = 8;

// A candidate for the pivot: its magnitude, and its position as a tie-breaker.
template <typename T>
struct PivotChoice {
  using Magnitude = Select<sizeof(T) == 4, uint32, uint64>;
  Magnitude magnitude;
  uint32 priority;  // 64 - position, or 0 for none
};

// The shared memory of a team.
template <typename T, int kN>
struct MatrixStorage {
  using Sizes = MatrixSizes<T, kN>;
  // Each group has two buffers, so that one barrier separates a write from the reads of the
  // preceding one. The padding spreads groups over the banks.
  static constexpr int kBuffer = max_of(Sizes::kBroadcast, kMaxColumns);
  alignas(16) T broadcast[Sizes::kMatrices][2 * kBuffer + Sizes::kWidest];
  T rows[Sizes::kMatrices * kN * Sizes::kRowStride];
  PivotChoice<T> choices[2][2];
  int32 order[Sizes::kMatrices][kN];   // the lane whose row ends up at each position
  int32 pivots[Sizes::kMatrices][kN];  // the position with which each position was swapped
};

template <typename T>
inline bool precedes(PivotChoice<T> a, PivotChoice<T> b) {
  return a.magnitude > b.magnitude || (a.magnitude == b.magnitude && a.priority > b.priority);
}

// A thread's place in its team, and the operations of the team.
template <typename T, int kN>
struct MatrixTeam {
  using Sizes = MatrixSizes<T, kN>;
  using Vector = MatrixVector<T, Sizes::kWidest>;

  MatrixStorage<T, kN>& storage;
  int thread;    // in the team
  int lane;      // in the group, and the row of the matrix that the thread holds
  int group;     // in the team, and the index of the team's matrix
  int64 first;   // the team's first matrix
  int matrices;  // of the team that exist; 0 or less past the last one

  MatrixTeam(MatrixStorage<T, kN>* all, int64 count) : storage(all[threadIdx.x / Sizes::kTeam]) {
    thread = threadIdx.x % Sizes::kTeam;
    lane = thread % Sizes::kLanes;
    group = thread / Sizes::kLanes;
    const int64 team = static_cast<int64>(blockIdx.x) * Sizes::kTeams + threadIdx.x / Sizes::kTeam;
    first = team * Sizes::kMatrices;
    matrices = static_cast<int>(min_of<int64>(Sizes::kMatrices, count - first));
  }

  // Whether the thread holds a row. Other lanes still take part in synchronisation.
  bool has_row() const { return lane < kN; }

  // Whether that row belongs to a matrix that exists.
  bool has_matrix() const { return has_row() && group < matrices; }

  void sync() const {
    if constexpr (Sizes::kTeam == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Whether the condition holds for a matrix of the team. Lanes of a group agree on it.
  bool any(bool condition) const {
    condition = condition && group < matrices;
    return Sizes::kTeam == 32 ? __ballot_sync(~0u, condition) != 0 : condition;
  }

  T* row(int index) const { return storage.rows + (group * kN + index) * Sizes::kRowStride; }
  T* own_row() const { return row(has_row() ? lane : 0); }
  T* broadcast(int step) const {
    return storage.broadcast[group] + (step & 1) * MatrixStorage<T, kN>::kBuffer;
  }

  // Copies the team's matrices to shared memory.
  void load(const T* __restrict__ from) const {
    Sizes::Tiles::load(storage.rows, from + first * kN * kN, matrices, thread);
    sync();
  }

  // Stores the team's matrices; `read(matrix, row, column)` returns an element.
  template <typename Read>
  void store(T* __restrict__ to, const Read& read) const {
    sync();
    Sizes::Tiles::store(to + first * kN * kN, matrices, thread, read);
  }

  // Chooses the row with the largest `candidate` among those at `position` >= `step`, as LAPACK's
  // getrf does, and the first of equal ones. Returns its position. NaN counts as larger than
  // infinity.
  int choose_pivot(T candidate, int position, int step) const {
    const bool takes_part = has_row() && position >= step;
    PivotChoice<T> choice{takes_part ? magnitude_bits(candidate) : 0,
                          takes_part ? static_cast<uint32>(64 - position) : 0};
    if constexpr (Sizes::kLanes < 32) {
#pragma unroll
      for (int distance = Sizes::kLanes / 2; distance > 0; distance /= 2) {
        const PivotChoice<T> other{__shfl_xor_sync(~0u, choice.magnitude, distance),
                                   __shfl_xor_sync(~0u, choice.priority, distance)};
        if (precedes(other, choice)) choice = other;
      }
    } else {
      typename PivotChoice<T>::Magnitude largest;
      if constexpr (sizeof(T) == 4) {
        largest = __reduce_max_sync(~0u, choice.magnitude);
      } else {
        const uint32 high = static_cast<uint32>(choice.magnitude >> 32);
        const uint32 largest_high = __reduce_max_sync(~0u, high);
        const uint32 low = high == largest_high ? static_cast<uint32>(choice.magnitude) : 0;
        largest = static_cast<uint64>(largest_high) << 32 | __reduce_max_sync(~0u, low);
      }
      choice.priority = __reduce_max_sync(~0u, choice.magnitude == largest ? choice.priority : 0u);
      choice.magnitude = largest;
      if constexpr (Sizes::kLanes == 64) {
        PivotChoice<T>(&choices)[2] = storage.choices[step & 1];
        if (thread % 32 == 0) choices[thread / 32] = choice;
        sync();
        const PivotChoice<T> other = choices[1 - thread / 32];
        if (precedes(other, choice)) choice = other;
      }
    }
    return 64 - static_cast<int>(choice.priority);
  }

  // Makes a row the pivot of `step`: swaps positions, and records both. Returns whether the thread
  // holds that row.
  bool swap_rows(int pivot, int step, int& position) const {
    const bool chosen = position == pivot;
    if (chosen) {
      storage.order[group][step] = lane;
      storage.pivots[group][step] = pivot;
      position = step;
    } else if (position == step) {
      position = pivot;
    }
    return chosen;
  }

  // Writes a row to the broadcast buffer, which the group reads after a barrier.
  void broadcast_row(const T (&values)[kN], int step) const {
    Vector* to = reinterpret_cast<Vector*>(broadcast(step));
#pragma unroll
    for (int i = 0; i < Sizes::kBroadcast; i += Sizes::kWidest) {
      Vector vector;
#pragma unroll
      for (int j = 0; j < Sizes::kWidest; ++j) {
        vector.items[j] = i + j < kN ? values[i + j] : T(0);
      }
      to[i / Sizes::kWidest] = vector;
    }
  }

  // Subtracts `factor` times the broadcast row from the thread's own, drops the first element, and
  // shifts the others by one column. The current column is always the first, so the loop over
  // columns needs no unrolling. Only the first `columns` elements are read.
  void eliminate(T (&values)[kN], T factor, int step, int columns) const {
    const Vector* from = reinterpret_cast<const Vector*>(broadcast(step));
    constexpr int kBlock = 8;  // columns between checks for the last one
#pragma unroll
    for (int block = 0; block < Sizes::kBroadcast; block += kBlock) {
      if (block >= columns) break;
#pragma unroll
      for (int i = block; i < min_of(block + kBlock, Sizes::kBroadcast); i += Sizes::kWidest) {
        const Vector vector = from[i / Sizes::kWidest];
#pragma unroll
        for (int j = 0; j < Sizes::kWidest; ++j) {
          if (i + j > 0 && i + j < kN) values[i + j - 1] = values[i + j] - factor * vector.items[j];
        }
      }
    }
  }

  // Factors the team's matrices with partial pivoting; each thread holds a row in `values`.
  // Afterwards a thread's own row in shared memory has its part of L, without the unit diagonal,
  // and of U. Rows do not move; returns the position of the thread's row in P A = L U.
  int factor_lu(T (&values)[kN]) const {
    int position = lane;
#pragma unroll 1
    for (int step = 0; step < kN; ++step) {
      const int pivot = choose_pivot(values[0], position, step);
      if (swap_rows(pivot, step, position)) broadcast_row(values, step);
      sync();
      if (position > step) {
        // A column of zeros has factors of zero, as in LAPACK.
        const T largest = *broadcast(step);
        const T factor = largest == T(0) ? values[0] : values[0] / largest;
        if (has_row()) own_row()[step] = factor;
        eliminate(values, factor, step, kN - step);
      }
    }
    if (has_row()) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (position + i < kN) own_row()[position + i] = values[i];
      }
    }
    sync();
    return position;
  }

  // Solves a triangular system for kColumns right-hand sides, of which the thread holds row
  // `position`. coefficient(k) returns the matrix's element in that row and column k; only elements
  // of the triangle are read.
  template <bool kForward, bool kUnit, int kColumns, typename Coefficient>
  void substitute(T (&x)[kColumns], int position, const Coefficient& coefficient) const {
    static_assert(kColumns <= kMaxColumns);
#pragma unroll 1
    for (int step = 0; step < kN; ++step) {
      const int k = kForward ? step : kN - 1 - step;
      T* known = broadcast(step);
      if (position == k) {
        const T diagonal = kUnit ? T(1) : coefficient(k);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if constexpr (!kUnit) x[i] = x[i] / diagonal;
          known[i] = x[i];
        }
      }
      sync();
      if (has_row() && (kForward ? position > k : position < k)) {
        const T factor = coefficient(k);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) x[i] = x[i] - factor * known[i];
      }
    }
  }
};

}  // namespace tilekern

// Groups of lanes that decompose small matrices, and Householder reflections in a group.
//
// A lane on its own holds a matrix in registers, and its loops are unrolled. Lanes of larger groups
// share a matrix in shared memory. They access it in vectors of one or more elements, of which a
// row has an odd number, so that neighbouring rows begin at different banks.
#pragma once

#include "linalg/matrix_copy.cuh"
#include "linalg/matrix_numbers.cuh"

namespace tilekern {

// Matrices of up to this many rows and columns are held by one thread.
inline constexpr int kThreadRows = 4;

// The lanes that decompose a matrix together, if as many as `wanted` have work.
constexpr int group_lanes(int rows, int columns, int wanted) {
  return max_of(rows, columns) <= kThreadRows ? 1 : min_of(32, max_of(2, 1 << log2_of(wanted)));
}

// The smallest odd multiple of a number that is not less than a count.
constexpr int odd_multiple(int count, int of) { return ((count + of - 1) / of | 1) * of; }

// A thread's place in its group, of kGroupLanes lanes. A matrix takes kElements elements, which are
// accessed in vectors of kVectorElements.
template <typename T, int kGroupLanes, int kElements, int kVectorElements = 1>
struct MatrixGroup {
  static constexpr int kLanes = kGroupLanes;
  static constexpr int kMatrices = 32 / kLanes;  // of a warp
  static constexpr bool kRegisters = kLanes == 1;
  static constexpr int kWide = kVectorElements;
  static constexpr int kSize = odd_multiple(kElements, kWide);
  using Vector = MatrixVector<T, kWide>;

  // The stride of rows in memory.
  static constexpr int row_stride(int columns) {
    return kRegisters ? columns : odd_multiple(columns, kWide);
  }

  int lane = threadIdx.x % kLanes;
  int index = threadIdx.x / kLanes;
  int64 first = static_cast<int64>(blockIdx.x) * kMatrices;
  int existing;  // matrices of the warp
  T* memory;     // of the warp

  explicit MatrixGroup(int64 count)
      : existing(static_cast<int>(min_of<int64>(kMatrices, count - first))) {
    extern __shared__ float4 shared[];
    memory = reinterpret_cast<T*>(shared);
  }

  void sync() const {
    if constexpr (!kRegisters) __syncwarp();
  }

  // Whether a condition holds for a lane of the group.
  bool any(bool condition) const {
    if constexpr (kRegisters) return condition;
    const uint32 mask = ~0u >> (32 - kLanes);
    return (__ballot_sync(~0u, condition) >> (index * kLanes) & mask) != 0;
  }

  template <typename Bits>
  Bits maximum(Bits value) const {
#pragma unroll
    for (int other = 1; other < kLanes; other *= 2) {
      value = max_of(value, __shfl_xor_sync(~0u, value, other));
    }
    return value;
  }

  T sum(T value) const {
#pragma unroll
    for (int other = 1; other < kLanes; other *= 2) value += __shfl_xor_sync(~0u, value, other);
    return value;
  }

  // Loads row-major matrices. put(own, row, column, value) places an element in the memory `own` of
  // its matrix. Matrices past the last one are zero.
  template <int kRows, int kColumns, typename Put>
  void load(T* own, const T* __restrict__ from, const Put& put) const {
    constexpr int kEach = kRows * kColumns;
    from += first * kEach;
#pragma unroll 4
    for (int i = threadIdx.x; i < kMatrices * kEach; i += 32) {
      const int matrix = i / kEach, element = i % kEach;
      const T value = matrix < existing ? from[i] : T(0);
      if constexpr (kRegisters) {
        memory[matrix * (kEach | 1) + element] = value;
      } else {
        put(memory + matrix * kSize, element / kColumns, element % kColumns, value);
      }
    }
    __syncwarp();
    if constexpr (kRegisters) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        put(own, i / kColumns, i % kColumns, memory[threadIdx.x * (kEach | 1) + i]);
      }
    }
  }

  // Stores row-major matrices of which read(own, row, column) is an element.
  template <int kRows, int kColumns, typename Read>
  void store(T* own, T* __restrict__ to, const Read& read) const {
    constexpr int kEach = kRows * kColumns;
    to += first * kEach;
    __syncwarp();
    if constexpr (kRegisters) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        memory[threadIdx.x * (kEach | 1) + i] = read(own, i / kColumns, i % kColumns);
      }
      __syncwarp();
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < existing * kEach; i += 32) {
      const int matrix = i / kEach, element = i % kEach;
      if constexpr (kRegisters) {
        to[i] = memory[matrix * (kEach | 1) + element];
      } else {
        to[i] = read(memory + matrix * kSize, element / kColumns, element % kColumns);
      }
    }
  }

  // Calls body(row) for the rows that this lane has.
  template <typename Body>
  void each_row(int begin, int end, const Body& body) const {
    if constexpr (kRegisters) {
#pragma unroll
      for (int row = begin; row < end; ++row) body(row);
    } else {
#pragma unroll 1
      for (int row = begin + lane; row < end; row += kLanes) body(row);
    }
  }

  // Calls body(i) for elements of a row.
  template <typename Body>
  static void each_element(int begin, int end, const Body& body) {
    if constexpr (kRegisters) {
#pragma unroll
      for (int i = begin; i < end; ++i) body(i);
    } else {
#pragma unroll 4
      for (int i = begin; i < end; ++i) body(i);
    }
  }

  // Calls body(step) for steps in which the whole group takes part.
  template <typename Body>
  static void each_step(int end, const Body& body) {
    if constexpr (kRegisters) {
#pragma unroll
      for (int step = 0; step < end; ++step) body(step);
    } else {
#pragma unroll 1
      for (int step = 0; step < end; ++step) body(step);
    }
  }

  void set_identity(T* x, int rows, int columns, int stride) const {
    each_row(0, rows, [&](int row) {
      each_element(0, columns, [&](int i) { x[row * stride + i] = T(i == row); });
    });
  }

  // Makes elements NaN in the groups in which `failed` holds.
  void spoil(T* x, int rows, int columns, int stride, bool failed) const {
    each_row(0, rows, [&](int row) {
      each_element(0, columns, [&](int i) {
        if (failed) x[row * stride + i] = T(0) / T(0);
      });
    });
  }

  static Vector& vector(T* x, int first) { return *reinterpret_cast<Vector*>(x + first); }
  static const Vector& vector(const T* x, int first) {
    return *reinterpret_cast<const Vector*>(x + first);
  }

  // Calls body(first) for the first elements of vectors that this lane has of a matrix, and of what
  // is between its rows.
  template <typename Body>
  void each_vector(int elements, const Body& body) const {
    if constexpr (kRegisters) {
#pragma unroll
      for (int i = 0; i < elements; ++i) body(i);
    } else {
#pragma unroll 4
      for (int i = lane * kWide; i < elements; i += kLanes * kWide) body(i);
    }
  }

  void clear(T* x, int elements) const {
    each_vector(elements, [&](int first) { vector(x, first) = Vector{}; });
    sync();
  }

  // Scales a matrix to elements of about 1 at most, or sets it to zero if it is not finite.
  struct Scaled {
    T up;
    bool finite;
  };
  Scaled scale(T* x, int elements) const {
    typename FloatFormat<T>::Bits largest = 0;
    each_vector(elements, [&](int first) {
      const Vector values = vector(x, first);
#pragma unroll
      for (int i = 0; i < kWide; ++i) largest = max_of(largest, magnitude_bits(values.items[i]));
    });
    largest = maximum(largest);
    const PowerOfTwo<T> power(largest);
    const bool finite = largest < magnitude_bits(T(1) / T(0));
    each_vector(elements, [&](int first) {
      Vector values = vector(x, first);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        values.items[i] = finite ? values.items[i] * power.down : T(0);
      }
      vector(x, first) = values;
    });
    sync();
    return {power.up, finite};
  }

  // The norm of a vector that is multiplied by `down`.
  static T scaled_norm(const T* x, int count, T down) {
    T squares = T(0);
    each_element(0, count, [&](int i) {
      const T scaled = x[i] * down;
      squares += scaled * scaled;
    });
    return square_root(squares);
  }

  static typename FloatFormat<T>::Bits largest_of(const T* x, int begin, int count) {
    typename FloatFormat<T>::Bits largest = 0;
    each_element(begin, count, [&](int i) { largest = max_of(largest, magnitude_bits(x[i])); });
    return largest;
  }

  static T norm(const T* x, int count) {
    const PowerOfTwo<T> power(largest_of(x, 0, count));
    return scaled_norm(x, count, power.down) * power.up;
  }

  // y -= tau v (v^T y), where v is 1 and then factor * down times x[1], x[2], ... The product of
  // the two may overflow.
  static void apply_reflection(const T* x, T down, T factor, T tau, T* y, int count) {
    T dot = T(0);
    each_element(1, count, [&](int i) { dot += x[i] * down * y[i]; });
    const T change = tau * (y[0] + dot * factor), scaled = change * factor;
    y[0] -= change;
    each_element(1, count, [&](int i) { y[i] -= x[i] * down * scaled; });
  }

  // Factors the matrix whose columns are `vectors` rows of x, with LAPACK's signs. The triangular
  // factor takes the place of each row's first elements; the reflections are stored behind them.
  void factor(T* x, int vectors, int length, int stride, T* taus) const {
    each_step(min_of(vectors, length), [&](int step) {
      T* own = x + step * stride + step;
      const int count = length - step;
      // Every lane computes the reflection.
      const auto below = largest_of(own, 1, count);
      const PowerOfTwo<T> power(max_of(below, magnitude_bits(own[0])));
      const T size = scaled_norm(own, count, power.down), alpha = own[0] * power.down;
      const T beta = alpha < T(0) || (alpha == T(0) && T(1) / alpha < T(0)) ? size : -size;
      // A vector that is a multiple already is not reflected.
      const bool none = below == 0;
      const T factor = none ? T(0) : T(1) / (alpha - beta);
      const T tau = none ? T(0) : (beta - alpha) / beta;
      const T first_element = none ? own[0] : beta * power.up;
      each_row(step + 1, vectors, [&](int other) {
        apply_reflection(own, power.down, factor, tau, x + other * stride + step, count);
      });
      sync();
      each_row(1, count, [&](int i) { own[i] = own[i] * power.down * factor; });
      if (lane == 0) {
        own[0] = first_element;
        taus[step] = tau;
      }
      sync();
    });
  }

  // Multiplies rows of y by the product of the reflections of factor(). If they begin as unit
  // vectors, a reflection changes only those of its own number or later ones.
  void apply_reflections(const T* x, int steps, int length, int stride, const T* taus, T* y,
                         int vectors, int y_stride, bool units) const {
    each_step(steps, [&](int reversed) {
      const int step = steps - 1 - reversed;
      // Each lane changes its own rows.
      each_row(0, vectors, [&](int row) {
        if (units && row < step) return;
        apply_reflection(x + step * stride + step, T(1), T(1), taus[step],
                         y + row * y_stride + step, length - step);
      });
    });
    sync();
  }
};

// Jacobi rotations.

// Rows p and q of a pair become first_p * p + first_q * q and second_p * p + second_q * q.
template <typename T>
struct JacobiRotation {
  T first_p, first_q, second_p, second_q;
  T change;  // of the diagonal elements, unless they are exchanged

  // The rotation that diagonalises [alpha gamma; gamma beta], or none unless `rotate`, with rows
  // exchanged if asked. The tangent is that of the smaller angle.
  JacobiRotation(T alpha, T beta, T gamma, bool rotate, bool exchange) {
    T difference = beta - alpha, twice = gamma + gamma;
    const PowerOfTwo<T> power(max_of(magnitude_bits(difference), magnitude_bits(twice)));
    difference *= power.down;
    twice *= power.down;
    const T magnitude = difference < T(0) ? -difference : difference;
    const T quotient = twice / (magnitude + square_root(difference * difference + twice * twice));
    const T tangent = !rotate ? T(0) : difference < T(0) ? -quotient : quotient;
    const T cosine = T(1) / square_root(tangent * tangent + T(1));
    const T sine = tangent * cosine;
    first_p = exchange ? sine : cosine;
    first_q = exchange ? cosine : -sine;
    second_p = exchange ? cosine : sine;
    second_q = exchange ? -sine : cosine;
    change = tangent * gamma;
  }

  void apply(T& p, T& q) const {
    const T before = p;
    p = first_p * before + first_q * q;
    q = second_p * before + second_q * q;
  }
};

// Rows of a matrix of kRows rows, paired as in a round-robin tournament: in each step every row is
// in one pair, and in all steps every two rows meet once.
template <int kRows>
struct RowPairs {
  static constexpr int kPlayers = kRows + kRows % 2;  // an odd row has no partner
  static constexpr int kSteps = kPlayers - 1;
  static constexpr int kPairs = kPlayers / 2;
  int p, q;  // p < q

  RowPairs(int step, int pair) {
    const int one = pair == 0 ? kSteps : (step + pair) % kSteps;
    const int other = pair == 0 ? step : (step - pair + kSteps) % kSteps;
    p = min_of(one, other);
    q = max_of(one, other);
  }
};

// Random matrices take 6 to 11 sweeps.
inline constexpr int kMaxSweeps = 40;

// Sorts values, and rows of `columns` elements with them, by exchanges of neighbours.
template <int kRows, typename Group, typename T, typename Before>
void sort_rows(const Group& group, T* values, T* rows, T* more_rows, int columns, int stride,
               const Before& before) {
  Group::each_step(kRows, [&](int round) {
    group.each_row(0, kRows / 2, [&](int pair) {
      const int i = round % 2 + 2 * pair;
      if (i + 1 >= kRows) return;
      const auto swap = [exchange = before(values[i + 1], values[i])](T& x, T& y) {
        const T kept = x;
        if (exchange) x = y;
        if (exchange) y = kept;
      };
      Group::each_element(0, columns, [&](int j) {
        if (rows != nullptr) swap(rows[i * stride + j], rows[(i + 1) * stride + j]);
        if (more_rows != nullptr) swap(more_rows[i * stride + j], more_rows[(i + 1) * stride + j]);
      });
      swap(values[i], values[i + 1]);
    });
    group.sync();
  });
}

}  // namespace tilekern

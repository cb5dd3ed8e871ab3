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

  void set_identity(T* x, int rows, int stride) const {
    each_row(0, rows, [&](int row) {
      each_element(0, stride, [&](int i) { x[row * stride + i] = T(i == row); });
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

  // Calls body(first, part) for parts of a row: single elements before the first whole vector, and
  // then vectors, of which the last one may have elements behind the row.
  template <typename Body>
  static void each_part(int begin, int end, const Body& body) {
    using Single = MatrixVector<T, 1>;
    if constexpr (kWide == 1) {
      each_element(begin, end, [&](int i) { body(i, Single{}); });
    } else {
      const int whole = min_of(end, (begin + kWide - 1) / kWide * kWide);
#pragma unroll 1
      for (int i = begin; i < whole; ++i) body(i, Single{});
#pragma unroll 4
      for (int i = whole; i < end; i += kWide) body(i, Vector{});
    }
  }

  // The norm of elements of a row that are multiplied by `down`.
  static T scaled_norm(const T* x, int begin, int end, T down) {
    T squares = T(0);
    each_part(begin, end, [&]<typename Part>(int first, Part) {
      const Part part = *reinterpret_cast<const Part*>(x + first);
#pragma unroll
      for (const T& element : part.items) squares += (element * down) * (element * down);
    });
    return square_root(squares);
  }

  static typename FloatFormat<T>::Bits largest_of(const T* x, int begin, int end) {
    typename FloatFormat<T>::Bits largest = 0;
    each_part(begin, end, [&]<typename Part>(int first, Part) {
      const Part part = *reinterpret_cast<const Part*>(x + first);
#pragma unroll
      for (const T& element : part.items) largest = max_of(largest, magnitude_bits(element));
    });
    return largest;
  }

  static T norm(const T* x, int count) {
    const PowerOfTwo<T> power(largest_of(x, 0, count));
    return scaled_norm(x, 0, count, power.down) * power.up;
  }

  // y -= tau v (v^T y), where v has zeros, then 1 at `step`, and then factor * down times elements
  // of x. The product of the two factors may overflow.
  static void apply_reflection(const T* x, T down, T factor, T tau, T* y, int step, int count) {
    T dot = T(0);
    each_part(step + 1, count, [&]<typename Part>(int first, Part) {
      const Part v = *reinterpret_cast<const Part*>(x + first);
      const Part part = *reinterpret_cast<const Part*>(y + first);
#pragma unroll
      for (int i = 0; i < Part::kSize; ++i) dot += v.items[i] * down * part.items[i];
    });
    const T change = tau * (y[step] + dot * factor), scaled = change * factor;
    y[step] -= change;
    each_part(step + 1, count, [&]<typename Part>(int first, Part) {
      const Part v = *reinterpret_cast<const Part*>(x + first);
      Part& part = *reinterpret_cast<Part*>(y + first);
      Part changed = part;
#pragma unroll
      for (int i = 0; i < Part::kSize; ++i) changed.items[i] -= v.items[i] * down * scaled;
      part = changed;
    });
  }

  // Factors the matrix whose columns are the vectors row(0), row(1), ..., with LAPACK's signs. The
  // triangular factor takes the place of each vector's first elements; the reflections are stored
  // behind them.
  template <typename Row>
  void factor(const Row& row, int vectors, int length, T* taus) const {
    each_step(min_of(vectors, length), [&](int step) {
      T* const own = row(step);
      // Every lane computes the reflection.
      const auto below = largest_of(own, step + 1, length);
      const PowerOfTwo<T> power(max_of(below, magnitude_bits(own[step])));
      const T size = scaled_norm(own, step, length, power.down), alpha = own[step] * power.down;
      const T beta = alpha < T(0) || (alpha == T(0) && T(1) / alpha < T(0)) ? size : -size;
      // A vector that is a multiple already is not reflected.
      const bool none = below == 0;
      const T factor = none ? T(0) : T(1) / (alpha - beta);
      const T tau = none ? T(0) : (beta - alpha) / beta;
      const T first_element = none ? own[step] : beta * power.up;
      each_row(step + 1, vectors, [&](int other) {
        apply_reflection(own, power.down, factor, tau, row(other), step, length);
      });
      sync();
      each_row(step + 1, length, [&](int i) { own[i] = own[i] * power.down * factor; });
      if (lane == 0) {
        own[step] = first_element;
        taus[step] = tau;
      }
      sync();
    });
  }

  // Multiplies rows of y by the product of the reflections of factor(). If they begin as unit
  // vectors, a reflection changes only those of its own number or later ones.
  template <typename Row>
  void apply_reflections(const Row& row, int steps, int length, const T* taus, T* y, int vectors,
                         int stride, bool units) const {
    each_step(steps, [&](int reversed) {
      const int step = steps - 1 - reversed;
      // Each lane changes its own rows.
      each_row(0, vectors, [&](int other) {
        if (units && other < step) return;
        apply_reflection(row(step), T(1), T(1), taus[step], y + other * stride, step, length);
      });
    });
    sync();
  }

  // Sorts values, and finds the places in which they were.
  template <int kCount, typename Before>
  void sort(const T* values, T* sorted, T* places, const Before& before) const {
    each_row(0, kCount, [&](int i) {
      const T value = values[i];
      int place = 0;
      each_element(0, kCount, [&](int j) {
        place += before(values[j], value) || (values[j] == value && j < i);
      });
      sorted[place] = value;
      places[place] = static_cast<T>(i);
    });
    sync();
  }
};

// Rotations.

// Within two units in the last place.
inline float inverse_root(float value) {
  const float root = rsqrtf(value);
  return root + root * 0.5f * __fmaf_rn(-value * root, root, 1.0f);
}
inline double inverse_root(double value) { return rsqrt(value); }

// The rotation that takes (x, y), of at most about 1, to (r, 0): r is c x + s y.
template <typename T>
struct GivensRotation {
  using Format = FloatFormat<T>;

  GivensRotation(T x, T y) {
    T squares = x * x + y * y, lower = T(1);
    if (squares < Format::kSmallestSquare) {
      x *= Format::kRaise;
      y *= Format::kRaise;
      squares = x * x + y * y;
      lower = T(1) / Format::kRaise;
    }
    const bool none = squares == T(0);
    const T inverse = none ? T(0) : inverse_root(squares);
    c = none ? T(1) : x * inverse;
    s = y * inverse;
    r = squares * inverse * lower;
  }

  T c, s, r;
};

// The rotation of rows p and q to c p - s q and s p + c q that diagonalises [alpha gamma; gamma
// beta], or none unless `rotate`. The tangent is that of the smaller angle.
template <typename T>
struct JacobiRotation {
  T c, s;
  T change;  // of the diagonal elements

  JacobiRotation(T alpha, T beta, T gamma, bool rotate) {
    T difference = beta - alpha, twice = gamma + gamma;
    const PowerOfTwo<T> power(max_of(magnitude_bits(difference), magnitude_bits(twice)));
    difference *= power.down;
    twice *= power.down;
    const T root = square_root(difference * difference + twice * twice);
    const T quotient = twice / (absolute(difference) + root);
    const T tangent = !rotate ? T(0) : difference < T(0) ? -quotient : quotient;
    c = inverse_root(tangent * tangent + T(1));
    s = tangent * c;
    change = tangent * gamma;
  }

  void apply(T& p, T& q) const {
    const T before = p;
    p = c * before - s * q;
    q = s * before + c * q;
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

// Sorts values in registers, and rows with them, by exchanges of neighbours.
template <int kRows, typename T, typename Before, typename... Rows>
inline void sort_rows(T* values, const Before& before, Rows*... rows) {
#pragma unroll
  for (int round = 0; round < kRows; ++round) {
#pragma unroll
    for (int i = round % 2; i + 1 < kRows; i += 2) {
      const auto swap = [exchange = before(values[i + 1], values[i])](T& x, T& y) {
        const T kept = x;
        if (exchange) x = y;
        if (exchange) y = kept;
      };
#pragma unroll
      for (int j = 0; j < kRows; ++j) (swap(rows[i * kRows + j], rows[(i + 1) * kRows + j]), ...);
      swap(values[i], values[i + 1]);
    }
  }
}

}  // namespace tilekern

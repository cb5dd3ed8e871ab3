// Symmetric matrices as tridiagonal ones, and the eigenvalues of these by implicit QL steps with
// Wilkinson's shifts (Golub and Van Loan, sections 8.3.1 and 8.3.5).
//
// A lane has one or more vectors of every row. The recurrences of a QL step are short and serial:
// all lanes of a group compute them, and each applies the rotations to its own elements of the
// eigenvectors. Groups of a warp take rotations together, each in a step of its own.
#pragma once

#include "linalg/matrix_group.cuh"

namespace tilekern {

// Bits of rows.
template <int kRows>
using RowBits = Select<(kRows > 32), uint64, uint32>;
inline int first_bit(uint32 bits) { return __ffs(bits) - 1; }
inline int first_bit(uint64 bits) { return __ffsll(bits) - 1; }

// LAPACK's limit of steps for each row. Random matrices take about 1.7.
inline constexpr int kMaxStepsPerRow = 30;

// The memory of a matrix: offsets of its parts, in elements.
template <typename T, int kN>
struct TridiagonalSizes {
  static constexpr int kWide = 16 / sizeof(T);
  static constexpr int kLanes = group_lanes(kN, kN, (kN + 3) / 4);
  static constexpr int kStride = odd_multiple(kN, kWide);
  static constexpr int kVectors = (kN + kWide - 1) / kWide;  // of a row
  static constexpr int kPadded = kVectors * kWide;
  static constexpr int kDiagonal = kN * kStride;
  static constexpr int kOff = kDiagonal + kPadded;
  static constexpr int kUpdate = kOff + kPadded;
  static constexpr int kTaus = kUpdate + kPadded;
  static constexpr int kElements = kTaus + kPadded;
  // The eigenvalues in ascending order, and the rows in which they were.
  static constexpr int kSorted = kUpdate, kPlaces = kTaus;
  using Group = MatrixGroup<T, kLanes, kElements, kWide>;
};

template <typename T, int kN>
class Tridiagonal {
 public:
  using Sizes = TridiagonalSizes<T, kN>;
  using Group = typename Sizes::Group;

  Tridiagonal(const Group& group, T* memory)
      : group_(group),
        rows_(memory),
        diagonal_(memory + Sizes::kDiagonal),
        off_(memory + Sizes::kOff),
        update_(memory + Sizes::kUpdate),
        taus_(memory + Sizes::kTaus) {}

  // Reduces the symmetric matrix to a tridiagonal one by Householder reflections, whose vectors
  // take the place of the rows above those that they change.
  void reduce() const {
#pragma unroll 1
    for (int step = 0; step + 2 < kN; ++step) {
      T* const own = row(step);
      const T pivot = own[step], alpha = own[step + 1];
      Vector v[kOwn], w[kOwn];
      Bits below = 0;
      each_own([&](int k, int first) {
        v[k] = vector(own, first);
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          if (first + i < step + 2) v[k].items[i] = T(0);
          below = max_of(below, magnitude_bits(v[k].items[i]));
        }
      });
      below = group_.maximum(below);
      const PowerOfTwo<T> power(max_of(below, magnitude_bits(alpha)));
      T squares = T(0);
      each_own([&](int k, int) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          v[k].items[i] *= power.down;
          squares += v[k].items[i] * v[k].items[i];
        }
      });
      const T scaled = alpha * power.down;
      const T size = square_root(group_.sum(squares) + scaled * scaled);
      const T beta = scaled < T(0) ? size : -size;
      // A vector that is a multiple already is not reflected.
      const bool none = below == 0;
      const T factor = none ? T(0) : T(1) / (scaled - beta);
      const T tau = none ? T(0) : (beta - scaled) / beta;
      group_.sync();
      each_own([&](int k, int first) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          v[k].items[i] = first + i == step + 1 ? T(1) : v[k].items[i] * factor;
          w[k].items[i] = T(0);
        }
        vector(own, first) = v[k];
      });
      if (group_.lane == 0) {
        diagonal_[step] = pivot;
        off_[step] = none ? alpha : beta * power.up;
        taus_[step] = tau;
      }
      group_.sync();
#pragma unroll 4
      for (int j = step + 1; j < kN; ++j) {
        const T by = own[j];
        each_own([&](int k, int first) { add(w[k], by, vector(row(j), first)); });
      }
      T dot = T(0);
      each_own([&](int k, int first) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          w[k].items[i] = first + i <= step ? T(0) : w[k].items[i] * tau;
          dot += w[k].items[i] * v[k].items[i];
        }
      });
      dot = group_.sum(dot) * tau / T(2);
      each_own([&](int k, int first) {
        add(w[k], -dot, v[k]);
        vector(update_, first) = w[k];
      });
      group_.sync();
#pragma unroll 4
      for (int j = step + 1; j < kN; ++j) {
        const T by_v = -own[j], by_w = -update_[j];
        each_own([&](int k, int first) {
          Vector x = vector(row(j), first);
          add(x, by_v, w[k]);
          add(x, by_w, v[k]);
          vector(row(j), first) = x;
        });
      }
      group_.sync();
    }
    if (group_.lane == 0) {
      diagonal_[kN - 2] = row(kN - 2)[kN - 2];
      diagonal_[kN - 1] = row(kN - 1)[kN - 1];
      off_[kN - 2] = row(kN - 2)[kN - 1];
    }
    group_.sync();
  }

  // Replaces the vectors of the reflections by the rows of their transposed product.
  void form_rotation() const {
    set_unit(kN - 1, T(0), rows_);
    set_unit(kN - 2, T(0), rows_);
    group_.sync();
#pragma unroll 1
    for (int step = kN - 3; step >= 0; --step) {
      const T* const v = row(step);
      const T tau = taus_[step];
      const int begin = (step + 1) / kWide * kWide;
#pragma unroll 1
      for (int j = step + 2 + group_.lane; j < kN; j += Group::kLanes) {
        T* const y = row(j);
        T dot = T(0);
#pragma unroll 4
        for (int first = begin; first < Sizes::kPadded; first += kWide) {
          const Vector x = vector(v, first), z = vector(y, first);
#pragma unroll
          for (int i = 0; i < kWide; ++i) dot += x.items[i] * z.items[i];
        }
#pragma unroll 4
        for (int first = begin; first < Sizes::kPadded; first += kWide) {
          Vector z = vector(y, first);
          add(z, -tau * dot, vector(v, first));
          vector(y, first) = z;
        }
      }
      set_unit(step + 1, -tau, v);
      group_.sync();
    }
    set_unit(0, T(0), rows_);
    group_.sync();
  }

  // Diagonalises the tridiagonal matrix, and applies the rotations to the rows if kVectors. Returns
  // whether it has converged.
  template <bool kVectors>
  bool diagonalise() const {
    using Rows = RowBits<kN>;
    // Rows whose off-diagonal element is not negligible.
    Rows coupled = 0;
#pragma unroll 4
    for (int i = 0; i + 1 < kN; ++i) {
      if (couples(off_[i], diagonal_[i], diagonal_[i + 1])) coupled |= Rows(1) << i;
    }
    // A step takes the rows of a block from one end to the other, and its next rotation is that of
    // `at` and of the row before it, `way` from it.
    int low = 0, high = 0, end = 0, at = 0, way = 1, steps = 0;
    bool begins = true, done = false;
    T c = T(1), s = T(1), p = T(0), g = T(0), settled = T(0);
    T next = T(0), element = T(0), off = T(0);
    Vector moved[kOwn];  // elements of the row before `at`
    // The place of the off-diagonal element between a row and the one before it.
    const auto before = [&](int row) { return way > 0 ? row - 1 : row; };
#pragma unroll 1
    while (true) {
      group_.sync();
      if (__ballot_sync(~0u, begins) != 0) {
        if (begins) {
          done = coupled == 0 || steps == kMaxStepsPerRow * kN;
          begins = false;
          if (!done) {
            ++steps;
            const int first = first_bit(coupled), last = first + first_bit(~(coupled >> first));
            // A step converges at its end, which is the smaller one of a graded matrix. A block
            // keeps its direction.
            if (first < low || last > high) {
              way = absolute(diagonal_[last]) < absolute(diagonal_[first]) ? 1 : -1;
            }
            low = first;
            high = last;
            end = way > 0 ? high : low;
            const int start = low + high - end;
            at = start + way;
            next = diagonal_[start];
            element = diagonal_[at];
            off = off_[before(at)];
            g = next - shift(diagonal_[end], diagonal_[end - way], off_[before(end)]);
            c = s = T(1);
            p = T(0);
            if constexpr (kVectors) {
              each_own([&](int k, int first) { moved[k] = vector(row(start), first); });
            }
          }
        }
        if (__ballot_sync(~0u, !done) == 0) break;
        group_.sync();
      }
      if (done) continue;
      const T b = c * off;
      const GivensRotation<T> by(g, s * off);
      c = by.c;
      s = by.s;
      const T shifted = next - p, change = (element - shifted) * s + T(2) * c * b;
      p = s * change;
      g = c * change - b;
      const T settled_before = settled;
      settled = shifted + p;
      const int previous = at - way;
      const bool first_rotation = previous == low + high - end, last = at == end;
      const auto uncouple = [&](int place) { coupled &= ~(Rows(1) << place); };
      if (!first_rotation && !couples(by.r, settled, settled_before)) uncouple(before(previous));
      if (last && !couples(g, element - p, settled)) uncouple(before(at));
      if (group_.lane == 0) {
        diagonal_[previous] = settled;
        if (!first_rotation) off_[before(previous)] = by.r;
        if (last) {
          diagonal_[at] = element - p;
          off_[before(at)] = g;
        }
      }
      if constexpr (kVectors) {
        each_own([&](int k, int first) {
          const Vector x = vector(row(at), first);
          Vector y;
#pragma unroll
          for (int i = 0; i < kWide; ++i) {
            y.items[i] = s * x.items[i] + c * moved[k].items[i];
            moved[k].items[i] = c * x.items[i] - s * moved[k].items[i];
          }
          vector(row(previous), first) = y;
          if (last) vector(row(at), first) = moved[k];
        });
      }
      begins = last;
      at += way;
      if (!last) {
        next = element;
        // Before another lane stores them, in the next rotation.
        element = diagonal_[at];
        off = off_[before(at)];
      }
    }
    group_.sync();
    return coupled == 0;
  }

 private:
  using Bits = typename FloatFormat<T>::Bits;
  using Vector = typename Group::Vector;
  static constexpr int kWide = Sizes::kWide;
  static constexpr int kOwn = (Sizes::kVectors + Group::kLanes - 1) / Group::kLanes;

  T* row(int i) const { return rows_ + i * Sizes::kStride; }

  static Vector& vector(T* x, int first) { return Group::vector(x, first); }
  static const Vector& vector(const T* x, int first) { return Group::vector(x, first); }

  static void add(Vector& x, T by, const Vector& y) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) x.items[i] += by * y.items[i];
  }

  // Calls body(k, first) for this lane's vectors of a row, of which `first` is the first element.
  template <typename Body>
  void each_own(const Body& body) const {
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int index = group_.lane + k * Group::kLanes;
      if (index < Sizes::kVectors) body(k, index * kWide);
    }
  }

  // Sets a row to a unit vector plus a multiple of another.
  void set_unit(int i, T factor, const T* other) const {
    each_own([&](int, int first) {
      Vector x = vector(other, first);
#pragma unroll
      for (int k = 0; k < kWide; ++k) x.items[k] = x.items[k] * factor + T(first + k == i);
      vector(row(i), first) = x;
    });
  }

  // The distance to Wilkinson's shift from the first diagonal element.
  static T shift(T first, T second, T off) {
    const T half = (second - first) / T(2);
    // The root is at least |off|, unless squares underflow.
    const T root = square_root(half * half + off * off);
    const T denominator = max_of(absolute(half) + root, absolute(off));
    const T distance = off / denominator * off;
    return half < T(0) ? first + distance : first - distance;
  }

  // Whether an off-diagonal element of a matrix of norm 1 is not negligible.
  static bool couples(T off, T one, T other) {
    using Format = FloatFormat<T>;
    const T sum = absolute(one) + absolute(other);
    return absolute(off) > Format::kEpsilon / T(2) * sum + Format::kSmallestSquare;
  }

  const Group& group_;
  T *const rows_, *const diagonal_, *const off_, *const update_, *const taus_;
};

}  // namespace tilekern

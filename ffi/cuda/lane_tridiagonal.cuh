// Tridiagonal systems of a lane.
#pragma once

#include "scalar_functions.cuh"

namespace tilekern::lax {

// Elements of an array in memory that are `step` apart.
template <typename T>
struct Line {
  T* first;
  long long step;
  T& operator[](long long i) const { return first[i * step]; }
};

// 1 / x within a unit in the last place, without a branch.
template <typename T>
inline T reciprocal(T x) {
  return T(1) / x;
}
inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  const float error = __fmaf_rn(-x, y, 1.0f);
  return abs(error) < 1.0f ? __fmaf_rn(y, error, y) : y;
}

// A system of kSize equations with kColumns right sides, whose columns are `column_step` apart.
//
// It is eliminated from both ends, with exchanges of neighbouring rows as in LAPACK's gtsv. A step
// depends on the one before, so these are two chains of half the length. An eliminated row is
// divided by its pivot. A row that is exchanged with the next one gets a second element beside the
// pivot. The solution takes the place of the right sides, and the eliminated rows that of `lower`
// and `upper`.
template <int kSize, int kColumns, typename T>
class TridiagonalSystem {
  Line<T> lower_, upper_, right_;
  Line<const T> diagonal_;
  long long column_step_;

  // How far the eliminated rows are loaded before their turn. A step is as short as a load.
  static constexpr int kAhead = 4;
  // Short systems are in registers, which have no indices.
  static constexpr bool kIsShort = kSize <= 16;
  // Rows that are eliminated from the first one down, and from the last one up. Two are left.
  static constexpr int kDown = kSize / 2 - (kSize % 2 == 0), kUp = kSize - 2 - kDown;

  struct Row {
    T under, pivot, beside, right[kColumns];
  };

  T& at(int row, int column) const {
    return right_.first[row * right_.step + column * column_step_];
  }

  // The row `i`, where elimination goes down or up. The first element of `lower` and the last one
  // of `upper` are not part of the system, and no step reads an `under` of the first row.
  template <bool kIsDown>
  Row load(int i) const {
    Row row{(kIsDown ? lower_ : upper_)[i], diagonal_[i], (kIsDown ? upper_ : lower_)[i], {}};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) row.right[c] = at(i, c);
    return row;
  }

  // Eliminates `under` of the next row, or of `row` if they are exchanged. Stores the other one at
  // row `i`, and leaves the result in `row`.
  template <bool kIsDown>
  void eliminate(int i, Row& row, const Row& next) const {
    const bool exchanged = abs(next.under) > abs(row.pivot);
    const T inverse = reciprocal(exchanged ? next.under : row.pivot);
    const T factor = (exchanged ? row.pivot : next.under) * inverse;
    const T first = exchanged ? next.pivot : row.beside, second = exchanged ? next.beside : T(0);
    row.pivot = (exchanged ? row.beside : next.pivot) - factor * first;
    row.beside = (exchanged ? T(0) : next.beside) - factor * second;
    (kIsDown ? upper_ : lower_)[i] = first * inverse;
    (kIsDown ? lower_ : upper_)[i] = second * inverse;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const T own = exchanged ? next.right[c] : row.right[c];
      row.right[c] = (exchanged ? row.right[c] : next.right[c]) - factor * own;
      at(i, c) = own * inverse;
    }
  }

  struct Eliminated {
    T first, second, right[kColumns];
  };

  template <bool kIsDown>
  Eliminated load_eliminated(int i) const {
    Eliminated row{(kIsDown ? upper_ : lower_)[i], (kIsDown ? lower_ : upper_)[i], {}};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) row.right[c] = at(i, c);
    return row;
  }

  // Solves for the unknown `i`, given the one before and the one before that.
  void substitute(int i, const Eliminated& row, T (&x)[kColumns], T (&later)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const T rest = row.right[c] - row.second * later[c];
      later[c] = x[c];
      x[c] = rest - row.first * later[c];
      at(i, c) = x[c];
    }
  }

 public:
  TridiagonalSystem(Line<T> lower, Line<const T> diagonal, Line<T> upper, Line<T> right,
                    long long column_step)
      : lower_(lower),
        upper_(upper),
        right_(right),
        diagonal_(diagonal),
        column_step_(column_step) {}

  // The solution of a singular system is NaN.
  void solve() const {
    if constexpr (kSize == 1) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) at(0, c) = quotient(at(0, c), diagonal_[0]);
    } else {
      Row down = load<true>(0), up = load<false>(kSize - 1);
      Row next_down = load<true>(1), next_up = load<false>(kSize - 2);
#pragma unroll(kIsShort ? kSize : 1)
      for (int i = 0; i < kUp; ++i) {
        const Row after_down = load<true>(i + 2), after_up = load<false>(kSize - 3 - i);
        eliminate<true>(i, down, next_down);
        eliminate<false>(kSize - 1 - i, up, next_up);
        next_down = after_down;
        next_up = after_up;
      }
      if constexpr (kDown > kUp) eliminate<true>(kUp, down, next_down);
      substitute_all(down, up);
    }
  }

 private:
  static T quotient(T x, T y) {
    const T found = x / y;
    return y != T(0) ? found : found - found;
  }

  // Solves for the two unknowns that are left, and then for those before and behind them.
  void substitute_all(const Row& down, const Row& up) const {
    const bool exchanged = abs(up.beside) > abs(down.pivot);
    const T inverse = reciprocal(exchanged ? up.beside : down.pivot);
    const T factor = (exchanged ? down.pivot : up.beside) * inverse;
    const T first = exchanged ? up.pivot : down.beside;
    const T pivot = (exchanged ? down.beside : up.pivot) - factor * first;
    T x[2][kColumns], later[2][kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const T own = exchanged ? up.right[c] : down.right[c];
      const T rest = (exchanged ? down.right[c] : up.right[c]) - factor * own;
      x[1][c] = later[0][c] = quotient(rest, pivot);
      x[0][c] = later[1][c] = (own - first * x[1][c]) * inverse;
      at(kDown, c) = x[0][c];
      at(kDown + 1, c) = x[1][c];
    }
    // The rows of a step, the last of which may be loaded again.
    const auto before = [&](int step) {
      return load_eliminated<true>(max_of(kDown - 1 - step, 0));
    };
    const auto behind = [&](int step) {
      return load_eliminated<false>(min_of(kDown + 2 + step, kSize - 1));
    };
    Eliminated rows[2][kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      rows[0][i] = before(i);
      rows[1][i] = behind(i);
    }
#pragma unroll(kIsShort ? kSize : kAhead)
    for (int i = 0; i < kUp; ++i) {
      const int slot = i % kAhead;
      const Eliminated row[2] = {rows[0][slot], rows[1][slot]};
      rows[0][slot] = before(i + kAhead);
      rows[1][slot] = behind(i + kAhead);
      substitute(kDown - 1 - i, row[0], x[0], later[0]);
      substitute(kDown + 2 + i, row[1], x[1], later[1]);
    }
    if constexpr (kDown > kUp) substitute(0, rows[0][kUp % kAhead], x[0], later[0]);
  }
};

template <int kSize, int kColumns, typename T>
inline void solve_tridiagonal(Line<T> lower, Line<const T> diagonal, Line<T> upper, Line<T> right,
                              long long column_step) {
  TridiagonalSystem<kSize, kColumns, T>(lower, diagonal, upper, right, column_step).solve();
}

}  // namespace tilekern::lax

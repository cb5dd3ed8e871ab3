// Inverses and solutions by LU factors in blocks, on emulated kernels. Launches are those of
// jax_tilekern/plans/linalg/blocked_lu.py, but each block is substituted into all rows above at
// once. Products are sums here.
//
//   blocked_lu type variant rows columns matrix    no columns for an inverse
//
// Prints the largest error of an element of the product of the matrix and the result, relative to
// the sum of the magnitudes that make it up.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>

#include "cuda.h"
#include "kernels.h"

using namespace tilekern;
using emulation::launch;

namespace {

// Adds a product of a block's extent, or subtracts it.
template <typename T>
void multiply(const T* lhs, int lhs_stride, const T* rhs, T* out, int stride, int rows, int columns,
              int sign) {
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      double sum = 0;
      for (int k = 0; k < kBlockColumns; ++k) {
        sum += static_cast<double>(lhs[int64(i) * lhs_stride + k]) * rhs[int64(k) * stride + j];
      }
      T& element = out[int64(i) * stride + j];
      element = static_cast<T>(element + sign * sum);
    }
  }
}

// Elements of a matrix.
double element(const std::string& matrix, int i, int j, int rows, std::mt19937& random) {
  if (matrix == "normal") return std::normal_distribution<double>()(random);
  if (matrix == "signs") return random() % 2 ? 1 : -1;
  if (matrix == "reversed") return i + j == rows - 1;
  if (matrix == "growth") return i == j ? 1 : j < i ? -1 : 0;
  std::fprintf(stderr, "no matrix %s\n", matrix.c_str());
  std::exit(2);
}

// kRows and kFinalRows are those of the tournament, kWarps those of the update.
template <typename T, int kRows, int kFinalRows, int kWarps>
double largest_error(int rows, int columns, const std::string& matrix) {
  const bool inverse = columns == 0;
  const int extended = (rows + 255) / 256 * 256, sides = (columns + 31) / 32 * 32;
  const int stride = extended + sides, results = inverse ? rows : columns;
  const T poison = std::numeric_limits<T>::quiet_NaN();
  std::mt19937 random(1);
  std::vector<T> a(rows * rows), b(rows * results, poison);
  for (int i = 0; i < rows * rows; ++i) {
    a[i] = static_cast<T>(element(matrix, i / rows, i % rows, rows, random));
  }
  // The exact solutions are ones.
  for (int i = 0; i < rows; ++i) {
    double sum = 0;
    for (int j = 0; j < rows; ++j) sum += a[i * rows + j];
    for (int j = 0; j < results; ++j) b[i * results + j] = inverse ? i == j : static_cast<T>(sum);
  }

  std::vector<T> working(extended * stride, poison), pivot_rows(kBlockColumns * stride, poison);
  std::vector<T> multiples(extended * kBlockColumns, poison),
      solutions(extended * extended, poison);
  std::vector<T> panel_rows(kPanelColumns * kBlockColumns, poison), x(rows * results, poison);
  std::vector<int32> steps(extended, -9), order(kBlockColumns, -9), permutation(extended, -9);
  std::vector<int32> candidates(16 * kPanelColumns, -9);
  uint32 arrived = 9;
  PanelSteps<T> panel_steps;

  launch(extended, 256, [&] {
    copy_and_extend<T>(a.data(), working.data(), rows, rows, extended, rows, stride, 1);
  });
  if (!inverse) {
    launch(extended, 256, [&] {
      copy_and_extend<T>(b.data(), working.data() + extended, rows, columns, sides, columns, stride,
                         0);
    });
  }
  launch((extended + 255) / 256, 256,
         [&] { blocked_lu_begin(&arrived, permutation.data(), extended); });
  for (int first = 0; first < extended; first += kBlockColumns) {
    const int left = extended - first, rows_of_cta = kRows * kGroups;
    T* block = working.data() + int64(first) * stride + first;
    for (int column = 0; column < kBlockColumns; column += kPanelColumns) {
      launch((left + rows_of_cta - 1) / rows_of_cta, kPivotsThreads, [&] {
        blocked_lu_pivots<T, kRows, kFinalRows>(block, steps.data(), order.data(), &arrived,
                                                candidates.data(), &panel_steps, panel_rows.data(),
                                                left, stride, column);
      });
      launch((left + 8 * kWarps - 1) / (8 * kWarps), 32 * kWarps, [&] {
        blocked_lu_update<T, kWarps>(block, steps.data(), &panel_steps, panel_rows.data(), left,
                                     stride, column);
      });
    }
    const int begin = inverse ? 0 : first, changed = inverse ? 0 : first + kBlockColumns;
    launch((stride - begin) * static_cast<int>(sizeof(T)) / 128, 256, [&] {
      blocked_lu_exchange<T>(working.data(), steps.data(), order.data(), permutation.data(),
                             pivot_rows.data(), stride, first, begin);
    });
    launch((stride - changed) / 32, kSubstitutionThreads, [&] {
      block_substitution<T, true>(block, pivot_rows.data() + changed,
                                  working.data() + int64(first) * stride + changed, stride, stride,
                                  first - changed);
    });
    const int below = first + kBlockColumns;
    if (inverse) {
      launch(3, 256, [&] {
        blocked_lu_multiples<T>(block, pivot_rows.data() + first, multiples.data(), left, stride);
      });
    }
    multiply(inverse ? multiples.data() : working.data() + int64(below) * stride + first,
             inverse ? kBlockColumns : stride, pivot_rows.data() + changed,
             working.data() + int64(below) * stride + changed, stride, extended - below,
             stride - changed, 1);
  }
  if (inverse) {
    launch(extended, 256, [&] { copy_unit_lower<T>(working.data(), solutions.data(), extended); });
  }
  T* right = inverse ? solutions.data() : working.data() + extended;
  for (int first = extended - kBlockColumns; first >= 0; first -= kBlockColumns) {
    T* own = right + int64(first) * stride;
    launch((inverse ? extended : sides) / 32, kSubstitutionThreads, [&] {
      block_substitution<T, false>(working.data() + int64(first) * stride + first, own,
                                   static_cast<T*>(nullptr), stride, stride, -kBlockColumns);
    });
    multiply(working.data() + first, stride, own, right, stride, first, inverse ? extended : sides,
             -1);
  }
  if (inverse) {
    launch(rows, 512,
           [&] { permute_columns<T>(right, permutation.data(), x.data(), extended, rows); });
  } else {
    launch(rows, 256, [&] {
      copy_and_extend<T>(right, x.data(), rows, columns, columns, stride, columns, 0);
    });
  }

  double largest = 0;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < results; ++j) {
      double sum = 0, magnitudes = 0;
      for (int k = 0; k < rows; ++k) {
        const double term = static_cast<double>(a[i * rows + k]) * x[k * results + j];
        sum += term;
        magnitudes += std::fabs(term);
      }
      const double error = std::fabs(sum - b[i * results + j]) / std::max(magnitudes, 1e-300);
      // NaN is the largest, and stays.
      if (largest == largest && !(error <= largest)) largest = error;
    }
  }
  return largest;
}

// The tournament of a group of lanes with so many rows, and the update by so many warps.
template <typename T>
double largest_error(const std::string& variant, int rows, int columns, const std::string& matrix) {
  if (variant == "4") return largest_error<T, 4, 4, 4>(rows, columns, matrix);
  if (variant == "4, 8") return largest_error<T, 4, 8, 8>(rows, columns, matrix);
  return largest_error<T, 8, 8, 4>(rows, columns, matrix);
}

}  // namespace

int main(int, char** arguments) {
  const std::string type = arguments[1], variant = arguments[2], matrix = arguments[5];
  const int rows = std::atoi(arguments[3]), columns = std::atoi(arguments[4]);
  std::printf("%.3e\n", type == "float32" ? largest_error<float>(variant, rows, columns, matrix)
                                          : largest_error<double>(variant, rows, columns, matrix));
}

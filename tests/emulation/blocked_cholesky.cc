// Cholesky factors in blocks, on emulated kernels. Launches are those of
// jax_tilekern/plans/linalg/blocked_cholesky.py, but products update all columns behind a block at
// once, and are sums here.
//
//   blocked_cholesky rows symmetrize matrix
//
// There are two matrices, of which the second is what the arguments say, and the first is normal.
// Prints the largest error of an element of the product of a factor and its transpose, relative to
// the sum of the magnitudes that make it up; or -1 if all of the second triangle is NaN.
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

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

constexpr int kMatrices = 2;

// Fills a matrix. Its halves differ, which shows what is read.
template <bool kSymmetrize>
void fill(float* a, int rows, const std::string& matrix, std::mt19937& random) {
  std::normal_distribution<double> normal;
  std::vector<double> root(rows * rows);
  for (double& element : root) element = normal(random);
  const auto scale_of = [&](int row) {
    return matrix == "graded" ? std::pow(10.0, 12 - 24.0 * row / rows) : 1;
  };
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j <= i; ++j) {
      double sum = i == j ? rows : 0;
      for (int k = 0; k < rows; ++k) sum += root[i * rows + k] * root[j * rows + k];
      const double value = sum * scale_of(i) * scale_of(j);
      a[i * rows + j] = static_cast<float>(kSymmetrize && i != j ? value * 1.5 : value);
      if (i != j) a[j * rows + i] = kSymmetrize ? static_cast<float>(value * 0.5) : kPoison;
    }
  }
  if (matrix == "indefinite") a[(rows / 2) * rows + rows / 2] *= -1;
  if (matrix == "nearly") a[rows * rows - 1] = 1e-3f * a[0];
  if (matrix == "zero") a[0] = 0;
  if (matrix == "infinite") a[rows + 1] = std::numeric_limits<float>::infinity();
}

// The largest error of a factor, or -1.
template <bool kSymmetrize>
double error_of(const float* a, const float* x, int rows) {
  double largest = 0;
  int nans = 0;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < rows; ++j) {
      const float element = x[i * rows + j];
      if (j > i) {
        if (element != 0) std::abort();
        continue;
      }
      nans += element != element;
      double sum = 0, magnitudes = 0;
      for (int k = 0; k <= j; ++k) {
        const double term = static_cast<double>(x[i * rows + k]) * x[j * rows + k];
        sum += term;
        magnitudes += std::fabs(term);
      }
      double expected = a[i * rows + j];
      if (kSymmetrize) expected = (expected + a[j * rows + i]) / 2;
      const double error = std::fabs(sum - expected) / std::max(magnitudes, 1e-300);
      // NaN is the largest, and stays.
      if (largest == largest && !(error <= largest)) largest = error;
    }
  }
  return nans == rows * (rows + 1) / 2 ? -1 : largest;
}

template <typename Kernel>
void launch_of_all(int ctas, int threads, Kernel kernel) {
  for (emulation::block_row = 0; emulation::block_row < kMatrices; ++emulation::block_row) {
    launch(ctas, threads, kernel);
  }
}

template <bool kSymmetrize>
double largest_error(int rows, const std::string& matrix) {
  const int extended = (rows + kCholeskyBlock - 1) / kCholeskyBlock * kCholeskyBlock;
  const int64 square = int64(extended) * extended;
  std::mt19937 random(1);
  std::vector<float> a(kMatrices * rows * rows), x(kMatrices * rows * rows, kPoison);
  fill<kSymmetrize>(a.data(), rows, "normal", random);
  fill<kSymmetrize>(a.data() + rows * rows, rows, matrix, random);
  std::vector<float> working(kMatrices * square, kPoison);
  std::vector<float16> parts(2 * kMatrices * square, float16{0x7e00});
  std::vector<int32> exponents(kMatrices * extended, -1000);
  // Rows of all matrices follow each other.
  const auto part = [&](int row, int half, int column) {
    const float16 value = parts[(2 * int64(row) + half) * extended + column];
    return static_cast<double>(std::bit_cast<_Float16>(value.bits));
  };

  const int tiles = extended / 32;
  launch_of_all(tiles * (tiles + 1) / 2, 256, [&] {
    cholesky_begin<kSymmetrize>(a.data(), working.data(), x.data(), exponents.data(), rows,
                                extended);
  });
  for (int first = 0; first < extended; first += kCholeskyBlock) {
    const int below = extended - first - kCholeskyBlock;
    launch_of_all(std::max(below / kCholeskyRows, 1), kCholeskyThreads, [&] {
      blocked_cholesky(working.data(), x.data(), parts.data(), exponents.data(), first, rows,
                       extended);
    });
    for (int number = 0; number < kMatrices; ++number) {
      const int begin = number * extended;
      for (int i = begin + first + kCholeskyBlock; i < begin + extended; ++i) {
        for (int j = first + kCholeskyBlock; j < extended; ++j) {
          double sum = 0;
          for (int k = first; k < first + kCholeskyBlock; ++k) {
            const double i_hi = part(i, 0, k), i_lo = part(i, 1, k);
            const double j_hi = part(begin + j, 0, k), j_lo = part(begin + j, 1, k);
            sum += i_hi * j_hi + i_hi * j_lo + i_lo * j_hi;
          }
          working[int64(i) * extended + j] -=
              static_cast<float>(std::ldexp(sum, exponents[i] + exponents[begin + j]));
        }
      }
    }
  }
  launch_of_all(3, 256, [&] { cholesky_end(x.data(), rows); });

  const double first = error_of<kSymmetrize>(a.data(), x.data(), rows);
  const double second = error_of<kSymmetrize>(a.data() + rows * rows, x.data() + rows * rows, rows);
  // A first factor of NaN would be hidden by the second.
  if (!(first >= 0)) std::abort();
  return second < 0 ? second : std::max(first, second);
}

}  // namespace

int main(int, char** arguments) {
  const int rows = std::atoi(arguments[1]);
  const bool symmetrize = std::atoi(arguments[2]);
  const std::string matrix = arguments[3];
  std::printf("%.3e\n",
              symmetrize ? largest_error<true>(rows, matrix) : largest_error<false>(rows, matrix));
}

// Inverses of small matrices on emulated kernels: small_inverse type size
//
// Every second matrix is singular. Prints the largest error of an element of a regular matrix's
// product with its inverse, relative to the sum of the magnitudes that make it up; infinity where
// the inverse of a singular matrix is not the solution by LU factors.
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "cuda.h"
#include "kernels.h"

using namespace tilekern;

namespace {

// Solves A X = I with partial pivoting, as LAPACK does.
template <typename T, int kN>
void solve_identity(const T* matrix, T (&x)[kN][kN]) {
  T a[kN][kN];
  std::copy(matrix, matrix + kN * kN, a[0]);
  for (int i = 0; i < kN; ++i) {
    for (int j = 0; j < kN; ++j) x[i][j] = i == j;
  }
  for (int k = 0; k < kN; ++k) {
    int pivot = k;
    for (int i = k + 1; i < kN; ++i) {
      if (std::fabs(a[i][k]) > std::fabs(a[pivot][k])) pivot = i;
    }
    std::swap(a[k], a[pivot]);
    std::swap(x[k], x[pivot]);
    for (int i = k + 1; i < kN; ++i) {
      const T factor = a[k][k] == 0 ? a[i][k] : a[i][k] / a[k][k];
      for (int j = k; j < kN; ++j) a[i][j] -= factor * a[k][j];
      for (int j = 0; j < kN; ++j) x[i][j] -= factor * x[k][j];
    }
  }
  for (int k = kN - 1; k >= 0; --k) {
    for (int j = 0; j < kN; ++j) x[k][j] /= a[k][k];
    for (int i = 0; i < k; ++i) {
      for (int j = 0; j < kN; ++j) x[i][j] -= a[i][k] * x[k][j];
    }
  }
}

template <typename T, int kN>
double largest_error() {
  using Sizes = MatrixSizes<T, kN>;
  constexpr int kCount = 2 * Sizes::kTeams * Sizes::kMatrices + 3;
  std::mt19937 random(1);
  std::vector<T> a(kCount * kN * kN), inverses(kCount * kN * kN);
  for (int i = 0; i < kCount * kN * kN; ++i) {
    const int row = i / kN % kN, column = i % kN, matrix = i / (kN * kN);
    a[i] = static_cast<T>(static_cast<int>(random() % 5) - 2);
    if (matrix % 2 == 0) a[i] += row == column ? 4 : 0;
    // Two columns are equal, or one is zero.
    if (matrix % 2 == 1 && column == kN / 2)
      a[i] = matrix % 4 == 1 && column > 0 ? a[i - column] : 0;
  }
  emulation::launch((kCount + 1) / (Sizes::kTeams * Sizes::kMatrices) + 1, Sizes::kThreads,
                    [&] { matrix_inverse<T, kN>(a.data(), inverses.data(), kCount); });
  double largest = 0;
  for (int matrix = 0; matrix < kCount; ++matrix) {
    const T *own = &a[matrix * kN * kN], *inverse = &inverses[matrix * kN * kN];
    T expected[kN][kN];
    solve_identity<T, kN>(own, expected);
    bool finite = true;
    for (const auto& row : expected) {
      for (T element : row) finite = finite && std::isfinite(element);
    }
    for (int i = 0; i < kN * kN; ++i) {
      if (!finite) {
        const T found = inverse[i], wanted = expected[i / kN][i % kN];
        if (found != wanted && (found == found || wanted == wanted)) return INFINITY;
        continue;
      }
      double sum = 0, magnitudes = 0;
      for (int k = 0; k < kN; ++k) {
        const double term = double(own[i / kN * kN + k]) * inverse[k * kN + i % kN];
        sum += term;
        magnitudes += std::fabs(term);
      }
      largest = std::max(largest, std::fabs(sum - (i % (kN + 1) == 0)) / magnitudes);
    }
  }
  return largest;
}

template <typename T>
double error_of(const std::string& size) {
  if (size == "1") return largest_error<T, 1>();
  if (size == "3") return largest_error<T, 3>();
  if (size == "17") return largest_error<T, 17>();
  return largest_error<T, 33>();
}

}  // namespace

int main(int, char** arguments) {
  const bool single = std::string(arguments[1]) == "float32";
  std::printf("%g\n", single ? error_of<float>(arguments[2]) : error_of<double>(arguments[2]));
}

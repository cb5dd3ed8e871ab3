// Sums of rows, on emulated kernels.
//
//   row_sums types rows lanes k
//
// Sums rows of k random elements, so many rows to a thread and so many lanes to a row. Prints the
// largest error of a sum, relative to the sum of the magnitudes.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <type_traits>

#include "cuda.h"
#include "kernels.h"

using namespace tilekern;

namespace {

template <typename T, typename Sum, typename Out, int kRows, int kUnroll>
double largest_error(int lanes, int k) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const int rows = 21, stride = (k + kVector - 1) / kVector * kVector, segments = 2;
  std::mt19937_64 random(1);
  std::vector<T> x(rows * stride);
  for (T& element : x) {
    if constexpr (std::is_integral_v<T>) {
      element = static_cast<T>(random());
    } else {
      element = static_cast<T>(std::normal_distribution<double>()(random));
    }
  }
  std::vector<Out> sums(rows * segments, static_cast<Out>(77));

  RowShape shape = {};
  for (uint32& size : shape.batch.sizes) size = 1;
  shape.lhs_row = stride;
  shape.out_row = segments;
  shape.out_segment = 1;
  shape.k = k;
  shape.segment_k = (k / segments + kVector - 1) / kVector * kVector;
  shape.rows = rows;
  shape.row_groups = shape.groups = (rows + kRows - 1) / kRows;
  shape.segments = segments;
  shape.log2_lanes = std::countr_zero(static_cast<unsigned>(lanes));
  const int groups_of_cta = kReductionThreads / lanes;
  const int ctas = (shape.groups + groups_of_cta - 1) / groups_of_cta * segments;
  constexpr RowConfig config = {.vector_bytes = 16, .rows = kRows, .unroll = kUnroll};
  emulation::launch(ctas, kReductionThreads,
                    [&] { row_sums<T, Sum, Out, config>(x.data(), sums.data(), shape); });

  double largest = 0;
  for (int row = 0; row < rows; ++row) {
    for (int segment = 0; segment < segments; ++segment) {
      const int begin = segment * static_cast<int>(shape.segment_k);
      const int end = std::min<int>(k, begin + static_cast<int>(shape.segment_k));
      // Integers wrap.
      std::conditional_t<std::is_integral_v<T>, uint64, double> exact = 0;
      double magnitudes = 1;
      for (int i = begin; i < end; ++i) {
        exact += static_cast<decltype(exact)>(x[row * stride + i]);
        magnitudes += std::fabs(static_cast<double>(x[row * stride + i]));
      }
      const Out sum = sums[row * segments + segment];
      const double error = std::is_integral_v<T>
                               ? static_cast<double>(sum != static_cast<Out>(exact))
                               : std::fabs(static_cast<double>(sum) - exact) / magnitudes;
      // NaN is the largest.
      if (!(error <= largest)) largest = error;
    }
  }
  return largest;
}

template <int kRows, int kUnroll>
double largest_error(const std::string& types, int lanes, int k) {
  if (types == "uint32 int32")
    return largest_error<uint32, uint32, int32, kRows, kUnroll>(lanes, k);
  if (types == "float32 float32") {
    return largest_error<float, float, float, kRows, kUnroll>(lanes, k);
  }
  std::fprintf(stderr, "no types %s\n", types.c_str());
  std::exit(2);
}

}  // namespace

int main(int, char** arguments) {
  const int rows = std::atoi(arguments[2]), lanes = std::atoi(arguments[3]);
  const int k = std::atoi(arguments[4]);
  std::printf("%.3e\n", rows == 1 ? largest_error<1, 8>(arguments[1], lanes, k)
                                  : largest_error<4, 2>(arguments[1], lanes, k));
}

// Rows of tokens as rows of their pairs with experts, and back, on emulated kernels.
//
//   expert_rows spread type tokens chosen columns places
//   expert_rows combine type tokens chosen columns places arrays
//
// `places` is a permutation, has some numbers out of bounds ("outside"), or nothing else
// ("dropped"). Prints how many elements are wrong.
#include <cstdio>
#include <numeric>
#include <string>

#include "arrays.h"

using namespace tilekern;

namespace {

using emulation::Array, emulation::below, emulation::random_bits;

template <typename T>
T random_element() {
  const double value = std::normal_distribution<double>()(random_bits);
  if constexpr (sizeof(T) == 1) return static_cast<T>(random_bits());
  if constexpr (kSame<T, double>) return value;
  if constexpr (!kSame<T, double> && sizeof(T) > 1) {
    return from_float<T>(static_cast<float>(value));
  }
}

template <typename T>
Array<T> random_array(std::size_t size) {
  Array<T> array(size);
  for (std::size_t i = 0; i < size; ++i) array[i] = random_element<T>();
  return array;
}

// The places of some pairs among the rows of these and of other pairs.
Array<int32> places_of(const std::string& kind, int pairs, int rows) {
  std::vector<int32> all(rows);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random_bits);
  Array<int32> places(pairs);
  const int32 outside[] = {-1, rows, std::numeric_limits<int32>::min(),
                           std::numeric_limits<int32>::max()};
  for (int i = 0; i < pairs; ++i) {
    const bool is_outside = kind == "dropped" || (kind == "outside" && below(3) == 0);
    places[i] = is_outside ? outside[below(4)] : all[i];
  }
  return places;
}

template <typename T>
int differences(Array<T>& found, Array<T>& wanted) {
  int wrong = 0;
  for (std::size_t i = 0; i < wanted.size; ++i) {
    wrong += std::memcmp(&found[i], &wanted[i], sizeof(T)) != 0;
  }
  return wrong;
}

// Calls `use` with one of some numbers, as a constant.
template <int... kNumbers, typename Use>
void with_constant(int number, Use use) {
  ((number == kNumbers ? use(std::integral_constant<int, kNumbers>()) : void()), ...);
}

// Launches a kernel as `ExpertRows` in plans/grouped_gemm/expert_rows.py does.
template <typename T, typename Kernel>
void launch(int tokens, int chosen, int rows, int columns, Kernel kernel) {
  const int row = columns * static_cast<int>(sizeof(T)), bytes = std::gcd(16, row);
  const ExpertRowsShape shape = {row / bytes, static_cast<uint32>(tokens),
                                 static_cast<uint32>(chosen), static_cast<uint32>(rows)};
  const int lanes = std::min<int>(32, std::bit_ceil(static_cast<unsigned>(shape.vectors)));
  with_constant<1, 2, 4, 8, 16>(bytes, [&](auto vector) {
    if constexpr (decltype(vector)::value >= sizeof(T)) {
      with_constant<1, 2, 4, 8, 16, 32>(lanes, [&](auto of_row) {
        const int ctas = (tokens * lanes + kExpertRowThreads - 1) / kExpertRowThreads;
        emulation::launch(ctas, kExpertRowThreads, [&] { kernel(vector, of_row, shape); });
      });
    }
  });
}

template <typename T>
int spread(int tokens, int chosen, int columns, const std::string& kind) {
  Array<T> x = random_array<T>(static_cast<std::size_t>(tokens) * columns);
  const int rows = tokens * chosen;
  Array<int32> places = places_of(kind, rows, rows);
  Array<T> out(x.size * chosen), wanted(x.size * chosen);
  for (int pair = 0; pair < rows; ++pair) {
    if (places[pair] < 0 || places[pair] >= rows) continue;
    std::memcpy(&wanted[0] + static_cast<int64>(places[pair]) * columns,
                &x[0] + static_cast<int64>(pair / chosen) * columns, columns * sizeof(T));
  }
  launch<T>(tokens, chosen, rows, columns,
            [&](auto bytes, auto lanes, const ExpertRowsShape& shape) {
              using Vector = RowVector<decltype(bytes)::value>;
              spread_rows<decltype(bytes)::value, decltype(lanes)::value>(
                  reinterpret_cast<const Vector*>(&x[0]), places,
                  reinterpret_cast<Vector*>(&out[0]), shape);
            });
  return differences(out, wanted);
}

template <typename T, int kArrays>
int combine(int tokens, int chosen, int columns, const std::string& kind) {
  using Sum = Select<kSame<T, double>, double, float>;
  // A device has all rows, and some of the tokens.
  const int all = tokens * chosen + 5;
  const std::size_t size = static_cast<std::size_t>(all) * columns;
  Array<T> rows[] = {random_array<T>(size), random_array<T>(kArrays == 2 ? size : 0)};
  Array<int32> places = places_of(kind, tokens * chosen, all);
  Array<T> out(static_cast<std::size_t>(tokens) * columns), wanted(out.size);
  const auto widened = [](T value) -> Sum {
    if constexpr (kSame<T, double>) return value;
    if constexpr (!kSame<T, double>) return to_float(value);
  };
  for (int token = 0; token < tokens; ++token) {
    for (int column = 0; column < columns; ++column) {
      // The kernel's order, so that equal sums have equal bits.
      Sum sum = 0;
      for (int i = 0; i < chosen; ++i) {
        const int place = places[token * chosen + i];
        if (place < 0 || place >= all) continue;
        for (int array = 0; array < kArrays; ++array) {
          sum += widened(rows[array][static_cast<int64>(place) * columns + column]);
        }
      }
      wanted[token * columns + column] = rounded<T>(sum);
    }
  }
  launch<T>(tokens, chosen, all, columns,
            [&](auto bytes, auto lanes, const ExpertRowsShape& shape) {
              combine_rows<T, Sum, decltype(bytes)::value, decltype(lanes)::value, kArrays>(
                  &rows[0][0], &rows[kArrays - 1][0], places, out, shape);
            });
  return differences(out, wanted);
}

template <typename Use>
int with_type(const std::string& type, Use use) {
  if (type == "float32") return use(float());
  if (type == "float64") return use(double());
  if (type == "float16") return use(float16());
  if (type == "bfloat16") return use(bfloat16());
  std::fprintf(stderr, "no type %s\n", type.c_str());
  std::exit(2);
}

int wrong(const std::string& kind, char** arguments) {
  const std::string type = arguments[0], places = arguments[4];
  const int tokens = std::atoi(arguments[1]), chosen = std::atoi(arguments[2]);
  const int columns = std::atoi(arguments[3]);
  if (kind == "spread") {
    const auto call = [&](auto of) {
      return spread<decltype(of)>(tokens, chosen, columns, places);
    };
    return type == "int8" ? call(int8()) : with_type(type, call);
  }
  const int arrays = std::atoi(arguments[5]);
  return with_type(type, [&](auto of) {
    using T = decltype(of);
    return arrays == 1 ? combine<T, 1>(tokens, chosen, columns, places)
                       : combine<T, 2>(tokens, chosen, columns, places);
  });
}

}  // namespace

int main(int, char** arguments) { std::printf("%d\n", wrong(arguments[1], arguments + 2)); }

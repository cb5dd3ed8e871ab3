// Transposes, sums, additions, dot products, sums by segment and updated rows on every instruction
// set that this CPU runs, over arrays that end where their memory ends. Elements are small
// integers, so every sum is exact in any order and is compared bit by bit.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/matmul.h"
#include "elements.h"
#include "ffi_frame.h"
#include "handlers.h"

namespace {

using Numbers = std::vector<int64_t>;
using Bytes = std::unique_ptr<char[]>;

int64_t Count(const Numbers& sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

Numbers RowMajor(const Numbers& sizes) {
  Numbers strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

std::string ToText(const Numbers& numbers) {
  std::string text;
  for (int64_t number : numbers) text += " " + std::to_string(number);
  return text;
}

// Calls body(place in each array) for every index of `sizes`, by each array's strides.
template <typename Body>
void ForEach(const Numbers& sizes, const std::vector<Numbers>& strides, const Body& body) {
  const int64_t count = Count(sizes);
  for (int64_t i = 0; i < count; ++i) {
    Numbers places(strides.size());
    int64_t rest = i;
    for (size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) {
      for (size_t a = 0; a < places.size(); ++a) places[a] += rest % sizes[d] * strides[a][d];
    }
    body(places);
  }
}

struct Problem {
  std::string name;
  Handler* handler;
  std::vector<FrameBuffer> operands;
  FrameBuffer result;
  std::map<std::string, Attribute> attributes;
  Bytes expected;
  int64_t result_bytes;
  Bytes in_place = nullptr;  // what the result has before the call, as the last operand

  // What is wrong with the handler's result, or nothing.
  std::string Run(Pool pool, int64_t threads) const {
    const Bytes out(new char[result_bytes]);
    std::memset(out.get(), 0x55, result_bytes);
    FrameBuffer target = result;
    target.data = out.get();
    std::vector<FrameBuffer> all = operands;
    if (in_place != nullptr) {
      std::memcpy(out.get(), in_place.get(), result_bytes);
      all.push_back(target);
    }
    const std::string error = CallHandler(handler, all, {target}, attributes, pool, threads);
    if (!error.empty()) return error;
    const auto* differs = std::mismatch(out.get(), out.get() + result_bytes, expected.get()).first;
    if (differs == out.get() + result_bytes) return {};
    return "byte " + std::to_string(differs - out.get()) + " differs";
  }
};

class Checks {
 public:
  Checks(Counts& counts, bool threads_only) : counts_(counts), threads_only_(threads_only) {}

  void Transpose(const Type& type, const Numbers& sizes, const Numbers& permutation) {
    const int64_t bytes = static_cast<int64_t>(type.bytes), count = Count(sizes);
    const Bytes x(new char[count * bytes]);
    for (int64_t i = 0; i < count * bytes; ++i) x[i] = static_cast<char>(random_());
    Numbers result, strides;
    for (int64_t dim : permutation) {
      result.push_back(sizes[dim]);
      strides.push_back(RowMajor(sizes)[dim]);
    }
    Problem problem = Make("transpose", type, CpuTranspose, result);
    problem.operands = {{type.ffi, x.get(), sizes}};
    problem.name += ToText(sizes) + " in order" + ToText(permutation);
    ForEach(result, {strides, RowMajor(result)}, [&](const Numbers& places) {
      std::memcpy(&problem.expected[places[1] * bytes], &x[places[0] * bytes], bytes);
    });
    for (int64_t stream : {0, 1}) {
      problem.attributes = {{"sizes", Attribute::Numbers(sizes)},
                            {"permutation", Attribute::Numbers(permutation)},
                            {"stream", Attribute::Number(stream)}};
      Check(problem);
    }
  }

  void Sum(const Type& type, const Numbers& sizes, const Numbers& reduced) {
    Numbers kept, strides(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (reduced[i] == 0) kept.push_back(sizes[i]);
    }
    for (size_t i = sizes.size(), k = kept.size(); i-- > 0;) {
      if (reduced[i] == 0) strides[i] = RowMajor(kept)[--k];
    }
    const std::vector<double> x = Draw(Count(sizes));
    const Bytes memory = Elements(type, x);
    Problem problem = Make("sum", type, CpuSum, kept);
    problem.operands = {{type.ffi, memory.get(), sizes}};
    problem.attributes = {{"sizes", Attribute::Numbers(sizes)},
                          {"reduced", Attribute::Numbers(reduced)}};
    problem.name += ToText(sizes) + " over" + ToText(reduced);
    std::vector<double> sums(Count(kept));
    ForEach(sizes, {RowMajor(sizes), strides},
            [&](const Numbers& places) { sums[places[1]] += x[places[0]]; });
    problem.expected = Elements(type, sums);
    Check(problem);
  }

  void Add(const Type& type, const Numbers& sizes, const Numbers& lhs_strides,
           const Numbers& rhs_strides) {
    const auto reach = [&](const Numbers& strides) {
      int64_t last = 0;
      for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
      return last + 1;
    };
    const std::vector<double> left = Draw(reach(lhs_strides)), right = Draw(reach(rhs_strides));
    const Bytes lhs = Elements(type, left), rhs = Elements(type, right);
    Problem problem = Make("add", type, CpuAdd, sizes);
    problem.operands = {{type.ffi, lhs.get(), {reach(lhs_strides)}},
                        {type.ffi, rhs.get(), {reach(rhs_strides)}}};
    problem.attributes = {{"sizes", Attribute::Numbers(sizes)},
                          {"lhs_strides", Attribute::Numbers(lhs_strides)},
                          {"rhs_strides", Attribute::Numbers(rhs_strides)}};
    problem.name +=
        ToText(sizes) + ", strides" + ToText(lhs_strides) + " and" + ToText(rhs_strides);
    std::vector<double> sums(Count(sizes));
    ForEach(sizes, {lhs_strides, rhs_strides, RowMajor(sizes)},
            [&](const Numbers& places) { sums[places[2]] = left[places[0]] + right[places[1]]; });
    problem.expected = Elements(type, sums);
    Check(problem);
  }

  // By keys as they lie, and by an order and bounds, of which segment 1 has half of the edges.
  void Segments(const Type& type, int64_t edges, int64_t columns, int64_t segments) {
    const std::vector<double> x = Draw(edges * columns);
    const Bytes memory = Elements(type, x);
    std::vector<int32_t> keys(edges), order(edges), bounds(segments + 3);
    std::vector<double> sums(segments * columns);
    for (int64_t i = 0; i < edges; ++i) {
      keys[i] = random_() % 2 == 0 ? 1 : static_cast<int32_t>(random_() % (segments + 2)) - 1;
      order[i] = static_cast<int32_t>(i);
      for (int64_t bin = keys[i] + 2; bin < segments + 3; ++bin) ++bounds[bin];
      if (keys[i] < 0 || keys[i] >= segments) continue;
      for (int64_t c = 0; c < columns; ++c) sums[keys[i] * columns + c] += x[i * columns + c];
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[a] < keys[b]; });
    for (int64_t by_key : {0, 1}) {
      Problem problem = Make("segments", type, CpuSegmentReduce, {segments, columns});
      problem.operands = {{type.ffi, memory.get(), {edges, columns}}};
      if (by_key) {
        problem.operands.push_back({XLA_FFI_DataType_S32, keys.data(), {edges}});
      } else {
        problem.operands.push_back({XLA_FFI_DataType_S32, order.data(), {edges}});
        problem.operands.push_back({XLA_FFI_DataType_S32, bounds.data(), {segments + 3}});
      }
      problem.attributes = {
          {"edges", Attribute::Number(edges)}, {"segments", Attribute::Number(segments)},
          {"batch", Attribute::Number(1)},     {"columns", Attribute::Number(columns)},
          {"reduction", Attribute::Number(0)}, {"by_key", Attribute::Number(by_key)}};
      problem.name += ToText({edges, columns, segments, by_key});
      problem.expected = Elements(type, sums);
      Check(problem);
    }
  }

  // Updates of zeros and of a table, of which row 1 has half.
  void UpdatedRows(const Type& type, int64_t edges, int64_t columns, int64_t rows) {
    const std::vector<double> x = Draw(edges * columns), start = Draw(rows * columns);
    const Bytes memory = Elements(type, x);
    std::vector<int32_t> keys(edges);
    for (int32_t& key : keys) {
      key = random_() % 2 == 0 ? 1 : static_cast<int32_t>(random_() % (rows + 2)) - 1;
    }
    for (bool has_table : {false, true}) {
      std::vector<double> sums = has_table ? start : std::vector<double>(rows * columns);
      for (int64_t i = 0; i < edges; ++i) {
        if (keys[i] < 0 || keys[i] >= rows) continue;
        for (int64_t c = 0; c < columns; ++c) sums[keys[i] * columns + c] += x[i * columns + c];
      }
      Problem problem = Make("updated rows", type, CpuUpdateRows, {rows, columns});
      problem.operands = {{type.ffi, memory.get(), {edges, columns}},
                          {XLA_FFI_DataType_S32, keys.data(), {edges}}};
      if (has_table) problem.in_place = Elements(type, start);
      problem.attributes = {{"edges", Attribute::Number(edges)},
                            {"rows", Attribute::Number(rows)},
                            {"columns", Attribute::Number(columns)},
                            {"reduction", Attribute::Number(0)}};
      problem.name += ToText({edges, columns, rows, has_table});
      problem.expected = Elements(type, sums);
      Check(problem);
    }
  }

  void Dot(const Type& type, const Type& out, int64_t k) {
    const std::vector<double> left = Draw(k), right = Draw(k);
    const Bytes lhs = Elements(type, left), rhs = Elements(type, right);
    Problem problem = Make("dot", out, CpuMatmul, {1});
    problem.operands = {{type.ffi, lhs.get(), {k}}, {type.ffi, rhs.get(), {k}}};
    problem.attributes = {{"sizes", Attribute::Numbers({1, 1, k})},
                          {"lhs_strides", Attribute::Numbers({k, 1})},
                          {"rhs_strides", Attribute::Numbers({1, 1})},
                          {"out_strides", Attribute::Numbers({1, 1})}};
    problem.name += std::string(" of ") + type.name + " " + std::to_string(k);
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += left[i] * right[i];
    problem.expected = Elements(out, {sum});
    Check(problem);
  }

 private:
  Problem Make(const char* name, const Type& type, Handler* handler, const Numbers& result) {
    const int64_t bytes = Count(result) * static_cast<int64_t>(type.bytes);
    return {std::string(name) + " " + type.name,
            handler,
            {},
            {type.ffi, nullptr, result},
            {},
            Bytes(new char[bytes]),
            bytes};
  }

  std::vector<double> Draw(int64_t count) {
    std::vector<double> values(count);
    for (double& value : values) value = static_cast<int>(random_() % 5) - 2;
    return values;
  }

  static Bytes Elements(const Type& type, const std::vector<double>& values) {
    Bytes memory(new char[values.size() * type.bytes]);
    // The sign of a zero depends on the order of a sum, and here on nothing else.
    for (size_t i = 0; i < values.size(); ++i) {
      Write(type, values[i] + 0.0, &memory[i * type.bytes]);
    }
    return memory;
  }

  void Check(const Problem& problem) {
    for (const std::string& level : tilekern::cpu::CpuInstructionSets()) {
      tilekern::cpu::SetCpuInstructionSet(level);
      const auto check = [&](Pool pool, int64_t threads) {
        const std::string wrong = problem.Run(pool, threads);
        counts_.Check(wrong.empty(), level + ", " + problem.name + ", " + std::to_string(threads) +
                                         " threads: " + wrong);
      };
      if (!threads_only_) check(Pool::kInline, 1);
      // What is not large enough to be shared is the same on any number of threads.
      if (problem.result_bytes + Count(problem.operands[0].dims) < (1 << 16)) continue;
      for (int64_t threads : {2, 5}) check(Pool::kThreads, threads);
      check(Pool::kLate, 4);
    }
  }

  Counts& counts_;
  const bool threads_only_;
  std::mt19937 random_{4};
};

constexpr Type kC64 = {"c64", XLA_FFI_DataType_C64, 8}, kC128 = {"c128", XLA_FFI_DataType_C128, 16};

}  // namespace

void CheckArrays(Counts& counts, bool threads_only) {
  const int before = counts.passed;
  Checks checks(counts, threads_only);
  // Ones, less than a vector, odd sizes, tiles and their ends, narrow rows next to each other.
  const std::vector<std::pair<Numbers, Numbers>> transposes = {{{1, 1}, {1, 0}},
                                                               {{5, 1}, {1, 0}},
                                                               {{3, 5}, {1, 0}},
                                                               {{1000, 3}, {1, 0}},
                                                               {{3, 1001}, {1, 0}},
                                                               {{16, 16}, {1, 0}},
                                                               {{64, 64}, {1, 0}},
                                                               {{65, 131}, {1, 0}},
                                                               {{17, 259}, {1, 0}},
                                                               {{70, 9, 5}, {1, 0, 2}},
                                                               {{7, 9, 66}, {0, 2, 1}},
                                                               {{7, 9, 66}, {2, 1, 0}},
                                                               {{5, 6, 40}, {1, 0, 2}},
                                                               {{9, 7, 3}, {1, 0, 2}},
                                                               {{9, 7, 11}, {1, 0, 2}},
                                                               {{9, 7, 33}, {1, 0, 2}},
                                                               {{9, 7, 65}, {1, 0, 2}},
                                                               {{9, 7, 129}, {1, 0, 2}},
                                                               {{3, 300, 5, 70}, {2, 3, 1, 0}},
                                                               {{2, 3, 4, 5}, {3, 1, 2, 0}},
                                                               {{6, 5, 2}, {1, 0, 2}},
                                                               {{3, 1, 4, 1, 5}, {4, 3, 2, 1, 0}},
                                                               {{40}, {0}},
                                                               {{0, 4}, {1, 0}},
                                                               {{900, 700}, {1, 0}},
                                                               {{1024, 2304}, {1, 0}},
                                                               {{70, 200, 128}, {1, 0, 2}},
                                                               {{100001, 3}, {1, 0}},
                                                               {{3, 100001}, {1, 0}},
                                                               {{70, 31, 150}, {2, 1, 0}}};
  for (const Type& type : {kU8, kBF16, kF32, kF64, kC128}) {
    for (const auto& [sizes, permutation] : transposes) {
      if (!threads_only || Count(sizes) > 60000) checks.Transpose(type, sizes, permutation);
    }
  }
  const std::vector<std::pair<Numbers, Numbers>> sums = {{{1}, {1}},
                                                         {{7}, {1}},
                                                         {{7}, {0}},
                                                         {{1000}, {1}},
                                                         {{37, 129}, {0, 1}},
                                                         {{37, 129}, {1, 0}},
                                                         {{7, 521}, {0, 1}},
                                                         {{600, 3}, {0, 1}},
                                                         {{600, 3}, {1, 0}},
                                                         {{5, 67, 9}, {0, 1, 0}},
                                                         {{40, 5}, {0, 1}},
                                                         {{37, 41}, {0, 1}},
                                                         {{19, 255}, {0, 1}},
                                                         {{301, 3, 5}, {0, 1, 0}},
                                                         {{9000, 3, 12}, {0, 1, 0}},
                                                         {{5, 67, 9}, {1, 0, 1}},
                                                         {{2, 3, 4, 5, 6}, {1, 0, 1, 0, 1}},
                                                         {{2, 3, 4, 5, 6}, {0, 1, 0, 1, 0}},
                                                         {{0, 3}, {1, 0}},
                                                         {{3, 0}, {1, 0}},
                                                         {{4, 5}, {1, 1}},
                                                         {{300000}, {1}},
                                                         {{3, 100000}, {0, 1}},
                                                         {{40, 3000}, {1, 0}},
                                                         {{1500, 90}, {1, 0}},
                                                         {{70, 1, 1030}, {0, 1, 1}},
                                                         {{5, 300, 70}, {0, 1, 0}},
                                                         {{300, 5, 70}, {1, 0, 1}}};
  for (const Type& type : {kF32, kF64, kBF16, kF16, kS8, kS16, kS32, kU64}) {
    for (const auto& [sizes, reduced] : sums) {
      // 16-bit floats cannot represent the sum of more elements.
      const bool exact = type.bytes != 2 || Count(sizes) <= 5000 || type.ffi == kS16.ffi;
      if (exact && (!threads_only || Count(sizes) > 60000)) checks.Sum(type, sizes, reduced);
    }
  }
  for (const Type& type : {kF32, kF64, kBF16, kF16, kS8, kS16, kS32, kU64}) {
    checks.Add(type, {1}, {1}, {0});
    checks.Add(type, {131}, {1}, {1});
    checks.Add(type, {131}, {0}, {1});
    checks.Add(type, {37, 65}, {65, 1}, {0, 1});
    checks.Add(type, {37, 65}, {1, 0}, {0, 1});
    checks.Add(type, {4, 3, 6}, {6, 0, 1}, {0, 1, 0});
    checks.Add(type, {0, 3}, {3, 1}, {0, 1});
    checks.Add(type, {300001}, {1}, {1});
    checks.Add(type, {3, 100001}, {1, 0}, {100001, 1});
  }
  for (const Type& type : {kF32, kF64, kBF16, kF16, kS8, kS16, kS32, kU64}) {
    for (int64_t columns : {1, 3, 8, 17, 33, 130}) checks.Segments(type, 100, columns, 7);
    checks.Segments(type, 300, 257, 40);
    // 16-bit floats cannot represent the sum of more edges.
    if (type.bytes != 2) checks.Segments(type, 30000, 5, 9);
    if (type.bytes != 2) checks.Segments(type, 3000, 70, 900);
  }
  for (const Type& type : {kF32, kF64, kBF16, kF16, kS8, kS16, kS32, kU64}) {
    for (int64_t columns : {1, 3, 17, 33, 130}) checks.UpdatedRows(type, 40, columns, 300);
    checks.UpdatedRows(type, 100, 257, 7);
    if (type.bytes != 2) checks.UpdatedRows(type, 3000, 70, 900);
  }
  const std::pair<Type, Type> dots[] = {
      {kF32, kF32}, {kF64, kF64}, {kBF16, kF32}, {kF16, kF32}, {kS8, kS32}};
  for (const auto& [type, out] : dots) {
    for (int64_t k : {1, 3, 64, 1000, 4097, 500001}) checks.Dot(type, out, k);
  }
  std::printf(
      "arrays: %d transposes, sums, additions, dot products, sums by segment and updated rows\n",
      counts.passed - before);
}

// Ragged products on every instruction set that this CPU runs, as products.cc does for dense ones:
// operands and bounds end where their memory ends, and results are compared bit by bit.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/matmul.h"
#include "ffi_frame.h"
#include "handlers.h"
#include "product_operands.h"

namespace {

enum Fill { kBalanced, kOneHot, kRandom, kFew, kNone };
constexpr const char* kFillNames[] = {"balanced", "one-hot", "random", "few rows", "no rows"};

struct Case {
  bool ragged_k;
  int64_t batch, groups, m, n, k;  // m or k has the rows
  Fill fill;
  bool row_major;  // the operands; the result is padded if they are not

  int64_t rows() const { return ragged_k ? k : m; }

  std::string Text() const {
    std::string text = ragged_k ? "ragged k, sizes" : "ragged m, sizes";
    for (int64_t size : {batch, groups, m, n, k}) text += " " + std::to_string(size);
    return text + ", " + kFillNames[fill] + (row_major ? ", row-major" : ", column-major");
  }
};

// The strides of batch, group, row and column.
using Strides = std::vector<int64_t>;

Strides Lay(int64_t groups, int64_t rows, int64_t cols, bool row_major, int64_t padding) {
  const int64_t major = (row_major ? cols : rows) + padding;
  const int64_t matrix = (row_major ? rows : cols) * major;
  const int64_t row = row_major ? major : 1, col = row_major ? 1 : major;
  // Without groups the stride is 0.
  return {std::max<int64_t>(groups, 1) * matrix, groups > 0 ? matrix : 0, row, col};
}

int64_t Count(const Case& c, int64_t rows, int64_t cols, const Strides& s) {
  return (c.batch - 1) * s[0] + (c.groups - 1) * s[1] + (rows - 1) * s[2] + (cols - 1) * s[3] + 1;
}

// In order within [0, rows], groups + 1 of them.
std::vector<int32_t> Bounds(const Case& c, std::mt19937& random) {
  const int64_t rows = c.rows();
  std::vector<int32_t> bounds(c.groups + 1);
  const int64_t hot = static_cast<int64_t>(random() % c.groups);
  for (int64_t g = 0; g <= c.groups; ++g) {
    const int64_t all = c.fill == kBalanced ? rows * g / c.groups
                        : c.fill == kOneHot ? (g > hot ? rows : 0)
                        : c.fill == kRandom ? static_cast<int64_t>(random() % (rows + 1))
                        : c.fill == kFew    ? std::min(rows / 3 + g, rows)
                                            : rows / 2;
    bounds[g] = static_cast<int32_t>(all);
  }
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

class Problem {
 public:
  Problem(const Types& types, const Case& c, std::mt19937& random)
      : types_(types),
        c_(c),
        lhs_strides_(Lay(0, c.m, c.k, c.row_major, 0)),
        rhs_strides_(Lay(c.ragged_k ? 0 : c.groups, c.k, c.n, c.row_major, 0)),
        out_strides_(Lay(c.ragged_k ? c.groups : 0, c.m, c.n, true, c.row_major ? 0 : 3)),
        lhs_(types.lhs, Count(c, c.m, c.k, lhs_strides_), random),
        rhs_(types.rhs, Count(c, c.k, c.n, rhs_strides_), random),
        out_count_(Count(c, c.m, c.n, out_strides_)),
        bounds_(new int32_t[c.batch * (c.groups + 1)]),
        expected_(new char[out_count_ * types.out.bytes]) {
    std::memset(expected_.get(), kUntouched, out_count_ * types.out.bytes);
    for (int64_t b = 0; b < c.batch; ++b) {
      const std::vector<int32_t> bounds = Bounds(c, random);
      std::copy(bounds.begin(), bounds.end(), &bounds_[b * (c.groups + 1)]);
      // Zeros for rows of no group, over which groups write theirs.
      if (!c.ragged_k) Expect(b, 0, 0, c.m, 0, 0);
      for (int64_t g = 0; g < c.groups; ++g) {
        if (c.ragged_k) {
          Expect(b, g, 0, c.m, bounds[g], bounds[g + 1]);
        } else {
          Expect(b, g, bounds[g], bounds[g + 1], 0, c.k);
        }
      }
    }
  }

  // What is wrong with the handler's result, or nothing.
  std::string Run(Pool pool, int64_t threads) const {
    std::unique_ptr<char[]> out(new char[out_count_ * types_.out.bytes]);
    std::memset(out.get(), kUntouched, out_count_ * types_.out.bytes);
    const std::string error = CallHandler(
        CpuRaggedMatmul,
        {{types_.lhs.ffi, lhs_.memory.get(), {static_cast<int64_t>(lhs_.values.size())}},
         {types_.rhs.ffi, rhs_.memory.get(), {static_cast<int64_t>(rhs_.values.size())}},
         {XLA_FFI_DataType_S32, bounds_.get(), {c_.batch, c_.groups + 1}}},
        {{types_.out.ffi, out.get(), {out_count_}}},
        {{"sizes", Attribute::Numbers({c_.batch, c_.groups, c_.m, c_.n, c_.k})},
         {"lhs_strides", Attribute::Numbers(lhs_strides_)},
         {"rhs_strides", Attribute::Numbers(rhs_strides_)},
         {"out_strides", Attribute::Numbers(out_strides_)},
         {"bounds_strides", Attribute::Numbers({c_.groups + 1})},
         {"ragged_k", Attribute::Number(c_.ragged_k ? 1 : 0)}},
        pool, threads);
    if (!error.empty()) return error;
    for (int64_t i = 0; i < out_count_; ++i) {
      if (std::memcmp(&out[i * types_.out.bytes], &expected_[i * types_.out.bytes],
                      types_.out.bytes) != 0) {
        return "element " + std::to_string(i) + " of " + std::to_string(out_count_) + " differs";
      }
    }
    return {};
  }

  std::string Text() const { return types_.Text() + ", " + c_.Text(); }

 private:
  // The product of rows m0 to m1 of lhs and the matrix of a group, summed over k0 to k1.
  void Expect(int64_t b, int64_t g, int64_t m0, int64_t m1, int64_t k0, int64_t k1) {
    const auto at = [&](const Strides& s, int64_t row, int64_t col) {
      return b * s[0] + g * s[1] + row * s[2] + col * s[3];
    };
    for (int64_t i = m0; i < m1; ++i) {
      for (int64_t j = 0; j < c_.n; ++j) {
        double sum = 0;
        for (int64_t l = k0; l < k1; ++l) {
          sum += lhs_.values[at(lhs_strides_, i, l)] * rhs_.values[at(rhs_strides_, l, j)];
        }
        // The sign of a zero depends on the order of a sum, and here on nothing else.
        Write(types_.out, sum + 0.0, &expected_[at(out_strides_, i, j) * types_.out.bytes]);
      }
    }
  }

  const Types types_;
  const Case c_;
  const Strides lhs_strides_, rhs_strides_, out_strides_;
  const Operand lhs_, rhs_;
  const int64_t out_count_;
  const std::unique_ptr<int32_t[]> bounds_;
  const std::unique_ptr<char[]> expected_;
};

// Ones, primes, and groups of few rows beside groups of many.
std::vector<Case> Cases() {
  const int64_t shapes[][5] = {{1, 1, 1, 1, 1},     {1, 3, 7, 5, 9},    {2, 4, 33, 17, 31},
                               {1, 5, 97, 66, 67},  {1, 2, 70, 3, 130}, {3, 2, 12, 150, 5},
                               {1, 17, 40, 35, 40}, {1, 3, 130, 33, 1}, {2, 3, 3, 70, 402}};
  std::vector<Case> cases;
  for (const auto& s : shapes) {
    for (Fill fill : {kBalanced, kOneHot, kRandom, kFew, kNone}) {
      for (bool ragged_k : {false, true}) {
        for (bool row_major : {false, true}) {
          cases.push_back({ragged_k, s[0], s[1], s[2], s[3], s[4], fill, row_major});
        }
      }
    }
  }
  return cases;
}

// Large enough for threads: one product that they share, few, many, and mostly zeros.
std::vector<Case> ThreadedCases() {
  return {
      {false, 1, 3, 240, 130, 150, kOneHot, true},   {false, 2, 5, 150, 140, 130, kRandom, false},
      {false, 1, 60, 960, 33, 130, kBalanced, true}, {false, 1, 4, 3000, 300, 2, kFew, true},
      {false, 1, 40, 40, 140, 150, kBalanced, true}, {true, 1, 3, 130, 120, 320, kOneHot, false},
      {true, 2, 5, 130, 110, 150, kRandom, true},    {true, 1, 60, 90, 66, 120, kBalanced, false},
      {true, 1, 9, 310, 330, 6, kFew, true}};
}

void Check(Counts& counts, const std::string& level, const Problem& problem, Pool pool,
           int64_t threads) {
  const std::string wrong = problem.Run(pool, threads);
  // The text is made for failures only; most of the time would go there.
  counts.Check(wrong.empty(), wrong.empty() ? wrong
                                            : level + ", " + problem.Text() + ", " +
                                                  std::to_string(threads) + " threads: " + wrong);
}

}  // namespace

void CheckRaggedProducts(Counts& counts, bool threads_only) {
  const int before = counts.passed;
  std::mt19937 random(5);
  const std::vector<std::string> levels = tilekern::cpu::CpuInstructionSets();
  for (const Types& types : kTypes) {
    for (const Case& c : threads_only ? std::vector<Case>() : Cases()) {
      const Problem problem(types, c, random);
      for (const std::string& level : levels) {
        tilekern::cpu::SetCpuInstructionSet(level);
        Check(counts, level, problem, Pool::kInline, 1);
      }
    }
    // How threads share the work hardly depends on the kernels, so one level will do.
    tilekern::cpu::SetCpuInstructionSet(levels.back());
    for (const Case& c : ThreadedCases()) {
      const Problem problem(types, c, random);
      for (int64_t threads : {2, 5}) {
        Check(counts, levels.back(), problem, Pool::kThreads, threads);
      }
      Check(counts, levels.back(), problem, Pool::kLate, 4);
    }
  }
  std::printf("ragged products: %d\n", counts.passed - before);
}

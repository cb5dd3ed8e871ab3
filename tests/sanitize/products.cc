// Products on every instruction set that this CPU runs, over operands that end where their memory
// ends. Elements are small integers, so every sum is exact in any order and is compared bit by bit.
#include <cstdint>
#include <cstring>
#include <random>

#include "check.h"
#include "cpu/matmul.h"
#include "ffi_frame.h"
#include "handlers.h"
#include "product_operands.h"

namespace {

// Sizes are batch, m, n, k; strides are of batch, row and column.
struct Case {
  std::string name;
  int64_t sizes[4];
  int64_t lhs[3], rhs[3], out[3];
};

int64_t Last(int64_t batch, int64_t rows, int64_t cols, const int64_t (&strides)[3]) {
  return (batch - 1) * strides[0] + (rows - 1) * strides[1] + (cols - 1) * strides[2];
}

enum Layout { kRowMajor, kColumnMajor, kPadded, kBatchInnermost, kBroadcast };

// Strides of a batch of matrices, each layout as far as it makes sense for an operand.
void Lay(Layout layout, int64_t batch, int64_t rows, int64_t cols, int64_t (&strides)[3]) {
  const int64_t result[][3] = {{rows * cols, cols, 1},
                               {rows * cols, 1, rows},
                               {rows * (cols + 3) + 5, cols + 3, 1},
                               {1, cols * batch, batch},
                               {0, cols, 1}};
  std::memcpy(strides, result[layout], sizeof strides);
}

std::vector<Case> Cases() {
  const char* const names[] = {"row-major", "column-major", "padded", "batch innermost",
                               "broadcast"};
  // Ones, primes, full and partial tiles and vectors, deep k, and few rows or columns.
  const int64_t shapes[][4] = {{1, 1, 1, 1},    {1, 1, 7, 3},     {1, 5, 1, 9},    {1, 1, 1, 130},
                               {1, 4, 33, 17},  {1, 33, 3, 70},   {2, 3, 5, 1},    {1, 17, 31, 61},
                               {3, 12, 32, 16}, {1, 64, 64, 64},  {1, 49, 66, 67}, {1, 2, 150, 33},
                               {1, 150, 4, 35}, {1, 13, 50, 402}, {2, 5, 9, 790},  {7, 5, 5, 5}};
  std::vector<Case> cases;
  for (const auto& s : shapes) {
    for (Layout lhs : {kRowMajor, kColumnMajor, kPadded, kBatchInnermost, kBroadcast}) {
      for (Layout rhs : {kRowMajor, kColumnMajor, kPadded, kBatchInnermost, kBroadcast}) {
        // With every layout beside the plain ones, and with itself.
        if (lhs > kColumnMajor && rhs > kColumnMajor && lhs != rhs) continue;
        Case c = {std::string("lhs ") + names[lhs] + ", rhs " + names[rhs],
                  {s[0], s[1], s[2], s[3]},
                  {},
                  {},
                  {}};
        Lay(lhs, s[0], s[1], s[3], c.lhs);
        Lay(rhs, s[0], s[3], s[2], c.rhs);
        Lay(lhs == kPadded ? kPadded : kRowMajor, s[0], s[1], s[2], c.out);
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Large enough to be shared by threads, in each of the ways in which it can be.
std::vector<Case> ThreadedCases() {
  const int64_t shapes[][4] = {{1, 65, 130, 150}, {1, 97, 131, 802},  {1, 3, 1500, 260},
                               {1, 1300, 2, 300}, {40, 16, 17, 128},  {3, 150, 140, 130},
                               {1, 2050, 20, 40}, {1, 20, 1100, 420}, {1, 61, 9, 2100},
                               {1, 270, 40, 600}, {1, 2, 60, 2300}};
  std::vector<Case> cases;
  for (const auto& s : shapes) {
    for (Layout lhs : {kRowMajor, kColumnMajor}) {
      for (Layout rhs : {kRowMajor, kColumnMajor}) {
        const auto name = [](Layout layout) {
          return std::string(layout == kRowMajor ? "row-major" : "column-major");
        };
        Case c = {name(lhs) + " and " + name(rhs), {s[0], s[1], s[2], s[3]}, {}, {}, {}};
        Lay(lhs, s[0], s[1], s[3], c.lhs);
        Lay(rhs, s[0], s[3], s[2], c.rhs);
        Lay(kRowMajor, s[0], s[1], s[2], c.out);
        cases.push_back(c);
      }
    }
  }
  return cases;
}

class Problem {
 public:
  Problem(const Types& types, const Case& c, std::mt19937& random)
      : types_(types),
        c_(c),
        lhs_(types.lhs, Last(c.sizes[0], c.sizes[1], c.sizes[3], c.lhs) + 1, random),
        rhs_(types.rhs, Last(c.sizes[0], c.sizes[3], c.sizes[2], c.rhs) + 1, random),
        out_count_(Last(c.sizes[0], c.sizes[1], c.sizes[2], c.out) + 1),
        expected_(new char[out_count_ * types.out.bytes]) {
    std::memset(expected_.get(), kUntouched, out_count_ * types.out.bytes);
    const auto& [batch, m, n, k] = c.sizes;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          const double* left = &lhs_.values[b * c.lhs[0] + i * c.lhs[1]];
          const double* right = &rhs_.values[b * c.rhs[0] + j * c.rhs[2]];
          double sum = 0;
          for (int64_t l = 0; l < k; ++l) sum += left[l * c.lhs[2]] * right[l * c.rhs[1]];
          // The sign of a zero depends on the order of a sum, and here on nothing else.
          Write(types.out, sum + 0.0,
                &expected_[(b * c.out[0] + i * c.out[1] + j * c.out[2]) * types.out.bytes]);
        }
      }
    }
  }

  // What is wrong with the handler's result, or nothing.
  std::string Run(Pool pool, int64_t threads) const {
    std::unique_ptr<char[]> out(new char[out_count_ * types_.out.bytes]);
    std::memset(out.get(), kUntouched, out_count_ * types_.out.bytes);
    const auto& [batch, m, n, k] = c_.sizes;
    const auto strides = [](const int64_t (&s)[3]) {
      return Attribute::Numbers({s[0], s[1], s[2]});
    };
    const std::string error = CallHandler(
        CpuMatmul,
        {{types_.lhs.ffi, lhs_.memory.get(), {static_cast<int64_t>(lhs_.values.size())}},
         {types_.rhs.ffi, rhs_.memory.get(), {static_cast<int64_t>(rhs_.values.size())}}},
        {{types_.out.ffi, out.get(), {out_count_}}},
        {{"sizes", Attribute::Numbers({batch, m, n, k})},
         {"lhs_strides", strides(c_.lhs)},
         {"rhs_strides", strides(c_.rhs)},
         {"out_strides", strides(c_.out)}},
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

  std::string Text() const {
    std::string text = types_.Text() + ", sizes";
    for (int64_t size : c_.sizes) text += " " + std::to_string(size);
    return text + ", " + c_.name;
  }

 private:
  const Types types_;
  const Case c_;
  const Operand lhs_, rhs_;
  const int64_t out_count_;
  const std::unique_ptr<char[]> expected_;
};

void Check(Counts& counts, const std::string& level, const Problem& problem, Pool pool,
           int64_t threads) {
  const std::string wrong = problem.Run(pool, threads);
  // The text is made for failures only; most of the time would go there.
  counts.Check(wrong.empty(), wrong.empty() ? wrong
                                            : level + ", " + problem.Text() + ", " +
                                                  std::to_string(threads) + " threads: " + wrong);
}

}  // namespace

void CheckProducts(Counts& counts, bool threads_only) {
  const std::vector<std::string> levels = tilekern::cpu::CpuInstructionSets();
  std::mt19937 random(3);
  for (const Types& types : kTypes) {
    const int before = counts.passed;
    for (const Case& c : threads_only ? std::vector<Case>() : Cases()) {
      const Problem problem(types, c, random);
      for (const std::string& level : levels) {
        tilekern::cpu::SetCpuInstructionSet(level);
        Check(counts, level, problem, Pool::kInline, 1);
      }
    }
    for (const Case& c : ThreadedCases()) {
      const Problem problem(types, c, random);
      for (const std::string& level : levels) {
        tilekern::cpu::SetCpuInstructionSet(level);
        for (int64_t threads : {1, 2, 3, 5}) Check(counts, level, problem, Pool::kThreads, threads);
        Check(counts, level, problem, Pool::kInline, 4);
        Check(counts, level, problem, Pool::kLate, 4);
      }
    }
    std::printf("%s: %d products\n", types.Text().c_str(), counts.passed - before);
    std::fflush(stdout);
  }
  std::printf("instruction sets:");
  for (const std::string& level : levels) std::printf(" %s", level.c_str());
  std::printf("\n");
}

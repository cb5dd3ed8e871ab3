#include "cpu/gemm.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/scratch.h"

namespace tilekern::cpu {
namespace {

// The loops over blocks are, outermost first, n_block columns, m_block rows, and k_block of k. Each
// stage packs the left block once for all threads. Then tasks of a few columns each pack their part
// of the right operand, which stays in L2, and stream the left panels, each of which stays in L1
// while it multiplies all columns.
constexpr int64_t kRowsPerBlock = 2040;           // a multiple of every panel's rows
constexpr int64_t kRowsForFewColumns = 240;       // a left block that stays in L2
constexpr int64_t kNarrowColumnsPerBlock = 1024;  // bounds the accumulators kept for narrow outputs
constexpr int64_t kVectorsPerTask = 16;
constexpr int64_t kMinVectorsPerTask = 4;
constexpr int64_t kRhsTaskBytes = 128 << 10;  // of rhs: over a short k, tasks write long rows
constexpr int64_t kPanelsPerPackTask = 8;
constexpr int64_t kPackedTasksPerThread = 2;

class Gemm {
 public:
  Gemm(const GemmFamily& family, StoreFn store, const Product& product, int64_t threads)
      : family_(family),
        store_(store),
        p_(product),
        pack_lhs_(family.pack_lhs[static_cast<int>(product.lhs.type)]),
        pack_rhs_(family.pack_rhs[static_cast<int>(product.rhs.type)]),
        out_bytes_(Bytes(product.out.type)),
        narrow_(out_bytes_ < family.unit_bytes),
        rows_per_panel_(kRowSteps * family.row_step),
        cols_per_panel_(kMaxVectors * family.lanes) {
    k_blocks_ = CeilDiv(p_.k, family.k_block);
    k_block_ = RoundUp(CeilDiv(p_.k, k_blocks_), 16);
    k_blocks_ = CeilDiv(p_.k, k_block_);
    const bool few_columns = p_.n <= kVectorsPerTask * family.lanes;
    m_block_ = std::min(p_.m, few_columns && threads == 1 ? kRowsForFewColumns : kRowsPerBlock);
    n_block_ = narrow_ && k_blocks_ > 1 ? std::min(p_.n, kNarrowColumnsPerBlock) : p_.n;
    m_blocks_ = CeilDiv(p_.m, m_block_);
    n_blocks_ = CeilDiv(p_.n, n_block_);

    panels_ = CeilDiv(m_block_, rows_per_panel_);
    pack_tasks_ = CeilDiv(panels_, kPanelsPerPackTask);
    const int64_t wide = kRhsTaskBytes / (std::max<int64_t>(k_block_, 1) * family.unit_bytes);
    task_cols_ = std::min(n_block_, std::max(kVectorsPerTask * family.lanes, wide));
    if (threads > 1) {
      const int64_t share = CeilDiv(n_block_, kPackedTasksPerThread * threads);
      task_cols_ = std::min(task_cols_, std::max(share, kMinVectorsPerTask * family.lanes));
    }
    task_cols_ = RoundUp(task_cols_, cols_per_panel_);
    col_tasks_ = CeilDiv(n_block_, task_cols_);
    row_tasks_ = 1;
    if (threads > 1) {
      row_tasks_ =
          std::clamp(kPackedTasksPerThread * threads / col_tasks_, int64_t{1}, pack_tasks_);
    }
    const int64_t groups = CeilDiv(k_block_, family.group);
    lhs_panel_bytes_ = PanelBytes(groups, rows_per_panel_, 0);
    rhs_panel_bytes_ = PanelBytes(groups, cols_per_panel_, family.rhs_header_units);
    if (narrow_ && k_blocks_ > 1) {
      sums_stride_ = RoundUp(n_block_, cols_per_panel_);
      sums_ = static_cast<char*>(
          Scratch(ScratchUse::kSums, panels_ * rows_per_panel_ * sums_stride_ * family.unit_bytes));
    }
    lhs_buffers_ = threads > 1 && Stages() > 1 ? 2 : 1;
    lhs_ = static_cast<char*>(Scratch(ScratchUse::kLhs, lhs_buffers_ * panels_ * lhs_panel_bytes_));
  }

  void Run() {
    for (int64_t stage = 0; stage < Stages(); ++stage) {
      for (int64_t i = 0; i < pack_tasks_; ++i) PackLhs(stage, i);
      for (int64_t i = 0; i < ComputeTasks(); ++i) Compute(stage, i);
    }
  }

  // Tickets are ordered by stage, packing first, so every wait is for a lower ticket.
  void Run(const Workers& workers) {
    std::vector<std::atomic<int64_t>> packed(pack_tasks_);  // stages done by each task
    std::vector<std::atomic<int64_t>> computed(ComputeTasks());
    const auto wait = [](const std::atomic<int64_t>& stages, int64_t count) {
      SpinUntil([&] { return stages.load(std::memory_order_acquire) >= count; });
    };
    const int64_t per_stage = pack_tasks_ + ComputeTasks();
    workers.Run(Stages() * per_stage, [&](int64_t ticket) {
      const int64_t stage = ticket / per_stage;
      const int64_t task = ticket % per_stage;
      if (task < pack_tasks_) {
        wait(packed[task], stage);
        // The buffer's last readers are two stages back.
        for (const auto& stages : computed) wait(stages, stage - 1);
        PackLhs(stage, task);
        packed[task].store(stage + 1, std::memory_order_release);
      } else {
        for (const auto& stages : packed) wait(stages, stage + 1);
        wait(computed[task - pack_tasks_], stage);  // the accumulators so far
        Compute(stage, task - pack_tasks_);
        computed[task - pack_tasks_].store(stage + 1, std::memory_order_release);
      }
    });
  }

 private:
  struct Stage {
    int64_t n0, m0, k0;         // the block's origin
    int64_t cols, rows, depth;  // the block's size
    int64_t groups;
  };

  int64_t Stages() const { return n_blocks_ * m_blocks_ * k_blocks_; }
  int64_t ComputeTasks() const { return row_tasks_ * col_tasks_; }

  // Packers may write past the end by less than a vector.
  int64_t PanelBytes(int64_t groups, int64_t width, int64_t header_units) const {
    return RoundUp(((groups + header_units) * width + family_.lanes) * family_.unit_bytes, 64);
  }

  Stage StageAt(int64_t index) const {
    Stage s;
    s.k0 = index % k_blocks_ * k_block_;
    s.m0 = index / k_blocks_ % m_blocks_ * m_block_;
    s.n0 = index / k_blocks_ / m_blocks_ * n_block_;
    s.depth = std::min(k_block_, p_.k - s.k0);
    s.rows = std::min(m_block_, p_.m - s.m0);
    s.cols = std::min(n_block_, p_.n - s.n0);
    s.groups = CeilDiv(s.depth, family_.group);
    return s;
  }

  char* LhsPanel(int64_t stage, int64_t panel) const {
    return lhs_ + (stage % lhs_buffers_ * panels_ + panel) * lhs_panel_bytes_;
  }

  // Panels are as wide as the smallest kernel that fits. Divisions would be visible in tiny
  // products.
  int LhsSteps(int64_t rows) const {
    static_assert(kRowSteps == 3);
    return rows <= family_.row_step ? 1 : rows <= 2 * family_.row_step ? 2 : 3;
  }
  int RhsVectors(int64_t cols) const {
    static_assert(kMaxVectors == 2);
    return cols <= family_.lanes ? 1 : 2;
  }
  int64_t LhsPanelWidth(int64_t rows) const { return LhsSteps(rows) * family_.row_step; }
  int64_t RhsPanelWidth(int64_t cols) const { return RhsVectors(cols) * family_.lanes; }

  // Panels have `width`, except the last, which is as narrow as the kernels allow.
  static void PackPanels(PackFn pack, PanelSource source, DType type, int64_t width,
                         int64_t last_width, int64_t panel_bytes, char* to) {
    const int64_t whole = last_width == width ? CeilDiv(source.outer, width) : source.outer / width;
    if (whole > 0) pack(source, width, whole, panel_bytes, to);
    const int64_t done = whole * width;
    if (done >= source.outer) return;
    source.data = static_cast<const char*>(source.data) + done * source.outer_stride * Bytes(type);
    source.outer -= done;
    source.readable -= done;
    pack(source, last_width, 1, panel_bytes, to + whole * panel_bytes);
  }

  void PackLhs(int64_t stage, int64_t task) const {
    const Stage s = StageAt(stage);
    const int64_t first = task * kPanelsPerPackTask;
    const int64_t r = first * rows_per_panel_;
    if (r >= s.rows) return;
    const int64_t rows = std::min(kPanelsPerPackTask * rows_per_panel_, s.rows - r);
    PackPanels(pack_lhs_,
               {p_.lhs.At(s.m0 + r, s.k0), p_.lhs.row_stride, p_.lhs.col_stride, rows,
                p_.m - s.m0 - r, s.depth},
               p_.lhs.type, rows_per_panel_, LhsPanelWidth((rows - 1) % rows_per_panel_ + 1),
               lhs_panel_bytes_, LhsPanel(stage, first));
  }

  void Compute(int64_t stage, int64_t task) const {
    const Stage s = StageAt(stage);
    const int64_t c0 = task % col_tasks_ * task_cols_;
    const int64_t cols = std::min(task_cols_, s.cols - c0);
    const int64_t panels = CeilDiv(s.rows, rows_per_panel_);
    const int64_t panels_per_task = CeilDiv(panels, row_tasks_);
    const int64_t first = task / col_tasks_ * panels_per_task;
    const int64_t end = std::min(first + panels_per_task, panels);
    if (cols <= 0 || first >= end) return;

    const int64_t rhs_panels = CeilDiv(cols, cols_per_panel_);
    char* rhs = static_cast<char*>(Scratch(ScratchUse::kRhs, rhs_panels * rhs_panel_bytes_));
    PackPanels(pack_rhs_,
               {p_.rhs.At(s.k0, s.n0 + c0), p_.rhs.col_stride, p_.rhs.row_stride, cols,
                p_.n - s.n0 - c0, s.depth},
               p_.rhs.type, cols_per_panel_, RhsPanelWidth((cols - 1) % cols_per_panel_ + 1),
               rhs_panel_bytes_, rhs);
    for (int64_t i = first; i < end; ++i) {
      const int64_t r = i * rows_per_panel_;
      const RowPanel panel = RowPanelAt(s, LhsPanel(stage, i), r, c0);
      for (int64_t j = 0; j < rhs_panels; ++j) {
        const int64_t c = j * cols_per_panel_;
        Tile(s, panel, rhs + j * rhs_panel_bytes_, c, std::min(cols_per_panel_, cols - c));
      }
    }
  }

  // What the register tiles of a panel of lhs have in common.
  struct RowPanel {
    const char* lhs;
    int64_t rows, height;
    const GemmKernel* kernels;  // by vectors of columns
    char* out;
    char* sums;  // if results are narrow and have to be added up
  };

  // Returns the panel at row r and column c of the block.
  RowPanel RowPanelAt(const Stage& s, const char* lhs, int64_t r, int64_t c) const {
    const int64_t rows = std::min(rows_per_panel_, s.rows - r);
    char* sums = sums_ != nullptr ? sums_ + (r * sums_stride_ + c) * family_.unit_bytes : nullptr;
    return {lhs,
            rows,
            LhsPanelWidth(rows),
            family_.kernel[LhsSteps(rows) - 1],
            p_.out.At(s.m0 + r, s.n0 + c),
            sums};
  }

  // Computes the register tile at column c of a panel's results.
  void Tile(const Stage& s, const RowPanel& panel, const char* rhs, int64_t c, int64_t cols) const {
    const int64_t width = RhsPanelWidth(cols);
    const GemmKernel kernel = panel.kernels[RhsVectors(cols) - 1];
    const bool accumulate = s.k0 > 0;
    const bool last = s.k0 + s.depth == p_.k;
    char* out = panel.out + c * out_bytes_;
    if (panel.sums != nullptr) {
      char* sums = panel.sums + c * family_.unit_bytes;
      kernel(s.groups, panel.lhs, rhs, sums, sums_stride_, accumulate);
      if (last) {
        store_(sums, sums_stride_, panel.rows, cols, out, p_.out.row_stride, 1, false);
      }
    } else if (!narrow_ && panel.rows == panel.height && cols == width) {
      kernel(s.groups, panel.lhs, rhs, out, p_.out.row_stride, accumulate);
    } else {
      alignas(64) char tile[kMaxTileBytes];
      kernel(s.groups, panel.lhs, rhs, tile, width, false);
      store_(tile, width, panel.rows, cols, out, p_.out.row_stride, 1, accumulate);
    }
  }

  static constexpr int64_t kMaxTileBytes = 12 * 2 * 64;

  const GemmFamily& family_;
  const StoreFn store_;
  const Product& p_;
  const PackFn pack_lhs_, pack_rhs_;
  const int64_t out_bytes_;
  const bool narrow_;
  const int64_t rows_per_panel_, cols_per_panel_;
  int64_t m_block_, n_block_, k_block_;
  int64_t m_blocks_, n_blocks_, k_blocks_;
  int64_t panels_, pack_tasks_;
  int64_t task_cols_, col_tasks_, row_tasks_;
  int64_t lhs_panel_bytes_, rhs_panel_bytes_;
  int64_t lhs_buffers_;
  int64_t sums_stride_ = 0;
  char* lhs_;
  char* sums_ = nullptr;
};

}  // namespace

void RunGemm(const GemmFamily& family, StoreFn store, const Product& product) {
  Gemm(family, store, product, 1).Run();
}

void RunGemm(const GemmFamily& family, StoreFn store, const Product& product,
             const Workers& workers) {
  Gemm(family, store, product, workers.threads()).Run(workers);
}

}  // namespace tilekern::cpu

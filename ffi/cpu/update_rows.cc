// The custom call jax_tilekern_cpu_update_rows: rows combined with those of a table.
//
// Attributes:
//   edges, rows, columns   each edge has a row of `columns` numbers, and the table has `rows` rows
//   reduction              0 for sums, 1 products, 2 maxima, 3 minima
// Operands are the edges' rows, for each edge the int32 number of the table's row that it is
// combined with, where numbers out of bounds are of none, and the table, whose memory the result
// takes. Without a table its rows are those of no edge.
// Complex numbers are pairs of columns, and are only summed. Floats of 16 bits are combined in
// float32, and a row is rounded once. The result does not depend on the number of threads.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/call.h"
#include "cpu/dispatch.h"
#include "cpu/product.h"
#include "cpu/scratch.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

// A task has edges of so many bytes, so that it takes longer than to hand it to a thread.
constexpr int64_t kTaskBytes = 64 << 10;
// Results are filled with rows of so many bytes, which are copied.
constexpr int64_t kFillBytes = 8 << 10;
// Rows of the table are fetched for so many edges ahead.
constexpr int64_t kEdgesAhead = 2;

struct Table {
  int64_t edges, rows, columns;
  const SegmentFamily* family;
  // Converts totals to the table's type; null if they are of it.
  void (*narrow)(const void* totals, int64_t count, void* out);
  int64_t row_bytes, total_bytes;
  const char* updates;
  const int32_t* keys;
  char* table;

  bool Has(int64_t edge) const {
    return static_cast<uint32_t>(keys[edge]) < static_cast<uint64_t>(rows);
  }
  char* Row(int64_t edge) const { return table + keys[edge] * row_bytes; }
};

// Puts the edges of each row side by side, in their order, and returns how many there are. Numbers
// of `rows` that no edge has are left alone.
int64_t OrderEdges(const Table& t, int32_t* rows, int32_t* order) {
  for (int64_t edge = 0; edge < t.edges; ++edge) {
    if (t.Has(edge)) rows[t.keys[edge]] = 0;
  }
  for (int64_t edge = 0; edge < t.edges; ++edge) {
    if (t.Has(edge)) ++rows[t.keys[edge]];
  }
  int32_t count = 0;
  for (int64_t edge = 0; edge < t.edges; ++edge) {
    if (!t.Has(edge)) continue;
    // A row has the number of its edges, and then the complement of the place of the next one.
    int32_t& row = rows[t.keys[edge]];
    const int32_t place = row > 0 ? count : ~row;
    if (row > 0) count += row;
    row = ~(place + 1);
    order[place] = static_cast<int32_t>(edge);
  }
  std::fill(order + count, order + t.edges, 0);
  return count;
}

// Combines a row with its edges, which are order[first] .. order[last - 1].
void UpdateRow(const Table& t, const int32_t* order, int64_t first, int64_t last, char* totals) {
  char* const row = t.Row(order[first]);
  char* const to = t.narrow == nullptr ? row : totals;
  if (t.narrow != nullptr) t.family->listed({row, nullptr, 1, t.columns, 0, 1}, to);
  if (last == first + 1) {
    t.family->by_key({t.updates + order[first] * t.row_bytes, t.keys + order[first], 1, t.columns,
                      t.keys[order[first]], 1, true},
                     to);
  } else {
    char* const of_edges = totals + t.total_bytes;
    t.family->listed({t.updates, order, t.edges, t.columns, first, last}, of_edges);
    t.family->combine(to, of_edges, t.columns);
  }
  if (t.narrow != nullptr) t.narrow(totals, t.columns, row);
}

void Update(const Workers& workers, const Table& t) {
  auto* rows = static_cast<int32_t*>(
      Scratch(ScratchUse::kLhs, (t.rows + t.edges) * static_cast<int64_t>(sizeof(int32_t))));
  int32_t* order = rows + t.rows;
  const int64_t count = OrderEdges(t, rows, order);
  const auto same_row = [&](int64_t a, int64_t b) { return t.keys[order[a]] == t.keys[order[b]]; };
  const int64_t each = std::max<int64_t>(kTaskBytes / (2 * t.row_bytes), 1);
  workers.Run(CeilDiv(count, each), [&](int64_t task) {
    auto* totals = static_cast<char*>(Scratch(ScratchUse::kSums, 2 * t.total_bytes));
    const int64_t end = std::min((task + 1) * each, count);
    for (int64_t first = task * each; first < end; ++first) {
      if (first + kEdgesAhead < end) {
        const char* const ahead = t.Row(order[first + kEdgesAhead]);
        for (int64_t at = 0; at < t.row_bytes; at += kLineBytes) __builtin_prefetch(ahead + at);
      }
      if (first > 0 && same_row(first - 1, first)) continue;
      int64_t last = first + 1;
      while (last < count && same_row(first, last)) ++last;
      UpdateRow(t, order, first, last, totals);
    }
  });
}

// Sets the rows of the table to those of no edge.
void FillRows(const Workers& workers, const Table& t) {
  char* row = static_cast<char*>(Scratch(ScratchUse::kLhs, t.row_bytes));
  if (t.narrow == nullptr) {
    t.family->fill(row, t.columns);
  } else {
    char* totals = static_cast<char*>(Scratch(ScratchUse::kSums, t.total_bytes));
    t.family->fill(totals, t.columns);
    t.narrow(totals, t.columns, row);
  }
  const bool has_zeros = std::all_of(row, row + t.row_bytes, [](char byte) { return byte == 0; });
  workers.RunRanges(t.rows, t.row_bytes, [&](int64_t first, int64_t last) {
    char* const begin = t.table + first * t.row_bytes;
    const int64_t bytes = (last - first) * t.row_bytes;
    if (has_zeros) {
      std::memset(begin, 0, bytes);
      return;
    }
    std::memcpy(begin, row, t.row_bytes);
    // What is copied again and again stays in L1.
    for (int64_t done = t.row_bytes; done < bytes;) {
      const int64_t next = std::min(
          {done, bytes - done, std::max<int64_t>(kFillBytes / t.row_bytes, 1) * t.row_bytes});
      std::memcpy(begin + done, begin, next);
      done += next;
    }
  });
}

void RunCall(const Workers& workers, ffi::AnyBuffer updates, ffi::AnyBuffer keys,
             ffi::RemainingArgs table, ffi::AnyBuffer out, int64_t edges, int64_t rows,
             int64_t columns, int64_t reduction) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (edges < 1 || rows < 1 || columns < 1) Refuse("a size is not positive");
  if (edges > kMost || rows > kMost) Refuse("there are more than 2^31 - 1 edges or rows");
  if (reduction < 0 || reduction >= kNumSegmentReductions) Refuse("there is no such reduction");
  if (TypeOf(keys) != DType::kS32) Refuse("numbers of rows are not of int32");
  const RealNumbers of_table = RealNumbersOf(out), of_updates = RealNumbersOf(updates);
  const DType type = of_table.type;
  if (TypeOf(updates) != TypeOf(out)) Refuse("updates and result are of different types");
  if (of_table.count != CheckedMultiply(rows, columns, "the number of elements") ||
      of_updates.count != CheckedMultiply(edges, columns, "the number of elements") ||
      static_cast<int64_t>(keys.element_count()) != edges) {
    Refuse(std::to_string(of_table.count) + " numbers of a table, " +
           std::to_string(of_updates.count) + " of updates and " +
           std::to_string(keys.element_count()) + " numbers of rows do not fit the sizes");
  }
  if (reduction != 0 && type != TypeOf(out)) Refuse("complex numbers are only summed");
  const SegmentFamily* family = Kernels().segments[reduction][static_cast<int>(type)];
  if (family == nullptr) Refuse(std::string("no kernel for ") + Name(type));
  const Table t = {edges,
                   rows,
                   columns,
                   family,
                   Kernels().narrow_segments[static_cast<int>(type)],
                   columns * Bytes(type),
                   columns * family->total_bytes,
                   static_cast<const char*>(updates.untyped_data()),
                   static_cast<const int32_t*>(keys.untyped_data()),
                   static_cast<char*>(out.untyped_data())};
  if (table.size() == 0) {
    AdviseNewResult(out);
    FillRows(workers, t);
  } else {
    const auto given = table.get<ffi::AnyBuffer>(0);
    if (table.size() > 1 || !given.has_value() || given->untyped_data() != out.untyped_data()) {
      Refuse("the result is not in the memory of the one table");
    }
  }
  Update(workers, t);
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer updates, ffi::AnyBuffer keys,
                  ffi::RemainingArgs table, ffi::Result<ffi::AnyBuffer> out, int64_t edges,
                  int64_t rows, int64_t columns, int64_t reduction) {
  return Guarded("jax_tilekern_cpu_update_rows", [&] {
    RunCall(WorkersOf(pool), updates, keys, table, *out, edges, rows, columns, reduction);
  });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuUpdateRows, tilekern::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("edges")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("columns")
                                  .Attr<int64_t>("reduction"));

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
  void Add(int64_t edge, void* totals) const {
    family->by_key({updates + edge * row_bytes, keys + edge, 1, columns, keys[edge], 1, true},
                   totals);
  }
};

// Lists the edges of each row: `first[row]` is its first edge, and `next[edge]` the one after an
// edge, or -1. Rows that no edge has are left alone.
void ListEdges(const Table& t, int32_t* first, int32_t* next) {
  for (int64_t edge = 0; edge < t.edges; ++edge) {
    if (t.Has(edge)) first[t.keys[edge]] = -1;
  }
  for (int64_t edge = t.edges - 1; edge >= 0; --edge) {
    if (!t.Has(edge)) continue;
    next[edge] = first[t.keys[edge]];
    first[t.keys[edge]] = static_cast<int32_t>(edge);
  }
}

// Combines the row with its edges, of which `edge` is the first.
void UpdateRow(const Table& t, int64_t edge, const int32_t* next, char* totals) {
  char* const row = t.Row(edge);
  if (t.narrow == nullptr) {
    for (int64_t each = edge; each >= 0; each = next[each]) t.Add(each, row);
    return;
  }
  t.family->listed({row, nullptr, 1, t.columns, 0, 1}, totals);
  for (int64_t each = edge; each >= 0; each = next[each]) t.Add(each, totals);
  t.narrow(totals, t.columns, row);
}

void Update(const Workers& workers, const Table& t) {
  auto* first = static_cast<int32_t*>(
      Scratch(ScratchUse::kLhs, (t.rows + t.edges) * static_cast<int64_t>(sizeof(int32_t))));
  int32_t* next = first + t.rows;
  ListEdges(t, first, next);
  const int64_t each = std::max<int64_t>(kTaskBytes / (2 * t.row_bytes), 1);
  workers.Run(CeilDiv(t.edges, each), [&](int64_t task) {
    auto* totals = static_cast<char*>(Scratch(ScratchUse::kSums, t.total_bytes));
    const int64_t end = std::min((task + 1) * each, t.edges);
    for (int64_t edge = task * each; edge < end; ++edge) {
      const int64_t ahead = edge + kEdgesAhead;
      if (ahead < end && t.Has(ahead)) {
        for (int64_t at = 0; at < t.row_bytes; at += kLineBytes) {
          __builtin_prefetch(t.Row(ahead) + at);
        }
      }
      if (t.Has(edge) && first[t.keys[edge]] == edge) UpdateRow(t, edge, next, totals);
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
    // What is copied again and again stays in the cache.
    for (int64_t done = t.row_bytes; done < bytes;) {
      const int64_t next = std::min(
          {done, bytes - done, std::max<int64_t>(kTaskBytes / t.row_bytes, 1) * t.row_bytes});
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

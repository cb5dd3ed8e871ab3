// The custom call jax_tilekern_cpu_segment_reduce: rows reduced to segments.
//
// Attributes:
//   edges, segments, batch, columns   `batch` groups of `segments` segments follow one another, and
//                                     each edge has a row of `columns` numbers
//   reduction                         0 for sums, 1 products, 2 maxima, 3 minima
//   by_key                            whether edges have keys, or a list and bounds
// Operands are the edges' rows, and either the key of each edge, of a single batch, or where each
// bin begins in the list of edges, with that list in front unless it is the edges as they lie. Keys
// and bounds are those of jax_tilekern_cpu_order_by_key. A batch has `segments` + 2 bins, of which
// the first and the last belong to no segment.
// Complex numbers are pairs of columns. Floats of 16 bits are reduced in float32, to which the
// result may belong. The result does not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "cpu/call.h"
#include "cpu/dispatch.h"
#include "cpu/product.h"
#include "cpu/scratch.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

// Edges and ends of segments are divided into parts by the bytes that they move.
constexpr int64_t kPartBytes = 128 << 10;
constexpr int64_t kMostParts = 256;
constexpr int64_t kLeastItems = 16;
// Parts of edges have totals of their own for all segments where these have fewer bytes together,
// and a part has so many times more edges than there are segments.
constexpr int64_t kTotalsBytes = 1 << 20;
constexpr int64_t kEdgesOfSegment = 8;
constexpr int64_t kMostTotals = 16;
// Otherwise threads have segments, and every thread looks at all keys.
constexpr int64_t kMostReaders = 8;

struct Segments {
  int64_t edges, segments, batch, columns;
  const SegmentFamily* family;
  // Converts totals to the result; null if the result is of their type.
  void (*narrow)(const void* totals, int64_t count, void* out);
  int64_t bytes, out_bytes;  // of an element
  const char* data;
  char* out;

  int64_t bins() const { return batch * (segments + 2); }

  // Returns the result's row for a bin, or -1.
  int64_t Row(int64_t bin) const {
    const int64_t within = bin % (segments + 2);
    if (within < 1 || within > segments) return -1;
    return bin / (segments + 2) * segments + within - 1;
  }

  void Store(const char* totals, int64_t first, int64_t count) const {
    char* to = out + first * out_bytes;
    if (narrow != nullptr) {
      narrow(totals, count, to);
    } else {
      std::memcpy(to, totals, count * out_bytes);
    }
  }
};

// Memory of the calling thread, aligned so that no vector of a row is in two lines of the cache.
char* Totals(const Segments& s, int64_t count) {
  return static_cast<char*>(Scratch(ScratchUse::kSums, count * s.family->total_bytes));
}

// Reduces rows as they lie, by their keys.
void ReduceByKey(const Workers& workers, const Segments& s, const int32_t* keys) {
  const SegmentFamily& family = *s.family;
  const int64_t total = family.total_bytes, results = s.segments * s.columns;
  const auto reduce = [&](int64_t first, int64_t last, int64_t segment, int64_t segments,
                          void* totals) {
    family.fill(totals, segments * s.columns);
    family.by_key({s.data + first * s.columns * s.bytes, keys + first, last - first, s.columns,
                   static_cast<int32_t>(segment), segments, segments == s.segments},
                  totals);
  };
  const int64_t worthwhile = s.edges * (s.columns * s.bytes + 4) / kPartBytes;
  const int64_t parts = std::min({worthwhile, s.edges / (kEdgesOfSegment * s.segments),
                                  kTotalsBytes / (results * total), kMostTotals});
  if (parts > 1) {
    char* totals = Totals(s, parts * results);
    workers.Run(parts, [&](int64_t part) {
      reduce(s.edges * part / parts, s.edges * (part + 1) / parts, 0, s.segments,
             &totals[part * results * total]);
    });
    workers.RunRanges(results, parts * total, [&](int64_t first, int64_t last) {
      for (int64_t part = 1; part < parts; ++part) {
        family.combine(&totals[first * total], &totals[(part * results + first) * total],
                       last - first);
      }
      s.Store(&totals[first * total], first, last - first);
    });
    return;
  }
  // A segment is reduced in the order of its edges, whatever the ranges are. Threads would read the
  // same lines of narrow rows.
  const int64_t threads = s.columns * s.bytes < kLineBytes ? 1 : workers.threads();
  const int64_t readers =
      std::clamp<int64_t>(std::min({worthwhile / 2, threads, s.segments}), 1, kMostReaders);
  char* narrow = s.narrow == nullptr ? nullptr : Totals(s, results);
  workers.Run(readers, [&](int64_t reader) {
    const int64_t first = s.segments * reader / readers;
    const int64_t segments = s.segments * (reader + 1) / readers - first;
    const int64_t at = first * s.columns;
    char* totals = narrow == nullptr ? s.out + at * s.out_bytes : &narrow[at * total];
    reduce(0, s.edges, first, segments, totals);
    if (narrow != nullptr) s.Store(totals, at, segments * s.columns);
  });
}

// Reduces a list of edges by the bounds of bins. The list of edges and ends of bins is divided into
// parts by sizes alone; a bin that several parts have is combined from theirs.
class ListedSegments {
 public:
  ListedSegments(const Segments& s, const int32_t* order, const int32_t* bounds)
      : s_(s), order_(order), bounds_(bounds), total_bytes_(s.family->total_bytes * s.columns) {
    const int64_t items = s.edges + s.bins(), bytes = s.columns * s.bytes + 4;
    const int64_t parts = std::clamp<int64_t>(
        std::min(items / kLeastItems, items * bytes / kPartBytes), 1, kMostParts);
    each_ = CeilDiv(items, parts);
    parts_ = CeilDiv(items, each_);
    totals_ = Totals(s, 2 * parts_ * s.columns);
  }

  void Run(const Workers& workers) {
    workers.Run(parts_, [&](int64_t part) { Reduce(part); });
    workers.Run(parts_ > 1 ? 1 : 0, [&](int64_t) {
      for (int64_t part = 1; part < parts_; ++part) Combine(part);
    });
  }

 private:
  struct Place {
    int64_t bin, edge;
  };

  // Returns how many bins and edges precede an item, where a bin's end follows its edges.
  Place At(int64_t item) const {
    int64_t first = std::max<int64_t>(item - s_.edges, 0), last = std::min(item, s_.bins());
    while (first < last) {
      const int64_t middle = first + (last - first) / 2;
      if (bounds_[middle + 1] + middle < item) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return {first, item - first};
  }
  Place Begin(int64_t part) const { return At(std::min(part * each_, s_.edges + s_.bins())); }

  // What a part has of the bin that began before it, and of the one that it does not end.
  char* Head(int64_t part) const { return &totals_[2 * part * total_bytes_]; }
  char* Tail(int64_t part) const { return Head(part) + total_bytes_; }

  void List(int64_t first, int64_t last, char* totals) const {
    s_.family->listed({s_.data, order_, s_.edges, s_.columns, first, last}, totals);
  }

  void Store(int64_t row, const char* totals) const {
    s_.Store(totals, row * s_.columns, s_.columns);
  }

  void Reduce(int64_t part) const {
    const Place begin = Begin(part), end = Begin(part + 1);
    int64_t edge = begin.edge;
    for (int64_t bin = begin.bin; bin < end.bin; ++bin) {
      const int64_t first = edge, row = s_.Row(bin);
      edge = bounds_[bin + 1];
      if (row < 0) continue;
      if (bounds_[bin] < first) {
        List(first, edge, Head(part));
      } else if (s_.narrow == nullptr) {
        List(first, edge, s_.out + row * s_.columns * s_.out_bytes);
      } else {
        // Nothing reads the tail yet.
        List(first, edge, Tail(part));
        Store(row, Tail(part));
      }
    }
    if (end.bin < s_.bins() && s_.Row(end.bin) >= 0) List(edge, end.edge, Tail(part));
  }

  // Combines the bin that ends in a part and began before it.
  void Combine(int64_t part) const {
    const Place begin = Begin(part);
    if (begin.bin >= Begin(part + 1).bin) return;
    const int64_t row = s_.Row(begin.bin);
    if (row < 0 || bounds_[begin.bin] >= begin.edge) return;
    const int64_t first = (bounds_[begin.bin] + begin.bin) / each_;
    for (int64_t other = first + 1; other < part; ++other) {
      s_.family->combine(Tail(first), Tail(other), s_.columns);
    }
    s_.family->combine(Tail(first), Head(part), s_.columns);
    Store(row, Tail(first));
  }

  const Segments& s_;
  const int32_t* const order_;
  const int32_t* const bounds_;
  const int64_t total_bytes_;
  int64_t each_, parts_;
  char* totals_;
};

void CheckBounds(const Workers& workers, const int32_t* bounds, int64_t bins, int64_t edges) {
  std::atomic<bool> ascend{bounds[0] == 0 && bounds[bins] == edges};
  workers.RunRanges(bins, sizeof *bounds, [&](int64_t first, int64_t last) {
    bool own = true;
    for (int64_t bin = first; bin < last; ++bin) own &= bounds[bin] <= bounds[bin + 1];
    if (!own) ascend.store(false, std::memory_order_relaxed);
  });
  if (!ascend) Refuse("bounds do not ascend from 0 to " + std::to_string(edges));
}

void RunCall(const Workers& workers, ffi::AnyBuffer data, ffi::RemainingArgs indices,
             ffi::AnyBuffer out, int64_t edges, int64_t segments, int64_t batch, int64_t columns,
             int64_t reduction, int64_t by_key) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (edges < 0 || segments < 1 || batch < 1 || columns < 1) Refuse("a size is not positive");
  if (segments > kMost - 2 || batch > kMost / (segments + 2) || edges > kMost) {
    Refuse("there are more than 2^31 - 1 edges or segments");
  }
  if (reduction < 0 || reduction >= kNumSegmentReductions) Refuse("there is no such reduction");
  DType type = TypeOf(data), out_type = TypeOf(out);
  const bool widened = out_type == DType::kF32 && (type == DType::kBF16 || type == DType::kF16);
  if (type != out_type && !widened) Refuse("operand and result are of different types");
  const bool complex = type == DType::kC64 || type == DType::kC128;
  if (complex) {
    if (reduction != 0) Refuse("complex numbers are only summed");
    type = out_type = type == DType::kC64 ? DType::kF32 : DType::kF64;
  }
  const auto numbers = [&](ffi::AnyBuffer buffer) {
    return static_cast<int64_t>(buffer.element_count()) * (complex ? 2 : 1);
  };
  if (numbers(data) != CheckedMultiply(edges, columns, "the number of elements") ||
      numbers(out) != CheckedMultiply(batch * segments, columns, "the number of results")) {
    Refuse(std::to_string(numbers(data)) + " numbers and " + std::to_string(numbers(out)) +
           " results do not fit the sizes");
  }
  const SegmentFamily* family = Kernels().segments[reduction][static_cast<int>(type)];
  if (family == nullptr) Refuse(std::string("no kernel for ") + Name(type));
  const auto narrow = Kernels().narrow_segments[static_cast<int>(out_type)];
  const auto index = [&](size_t i, int64_t count) {
    const auto found = indices.get<ffi::AnyBuffer>(i);
    if (!found.has_value() || TypeOf(*found) != DType::kS32) Refuse("indices are not of int32");
    if (static_cast<int64_t>(found->element_count()) != count) {
      Refuse(std::to_string(found->element_count()) + " indices, not " + std::to_string(count));
    }
    return static_cast<const int32_t*>(found->untyped_data());
  };
  const Segments s = {edges,
                      segments,
                      batch,
                      columns,
                      family,
                      narrow,
                      Bytes(type),
                      Bytes(out_type),
                      static_cast<const char*>(data.untyped_data()),
                      static_cast<char*>(out.untyped_data())};
  AdviseNewResult(out);
  if (by_key != 0) {
    if (indices.size() != 1 || batch != 1) Refuse("there is one batch and one key for each edge");
    return ReduceByKey(workers, s, index(0, edges));
  }
  if (indices.size() != 1 && indices.size() != 2) Refuse("there are no bounds");
  const int32_t* order = indices.size() == 2 ? index(0, edges) : nullptr;
  const int32_t* bounds = index(indices.size() - 1, s.bins() + 1);
  CheckBounds(workers, bounds, s.bins(), edges);
  ListedSegments(s, order, bounds).Run(workers);
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::RemainingArgs indices,
                  ffi::Result<ffi::AnyBuffer> out, int64_t edges, int64_t segments, int64_t batch,
                  int64_t columns, int64_t reduction, int64_t by_key) {
  return Guarded("jax_tilekern_cpu_segment_reduce", [&] {
    RunCall(WorkersOf(pool), data, indices, *out, edges, segments, batch, columns, reduction,
            by_key);
  });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuSegmentReduce, tilekern::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("edges")
                                  .Attr<int64_t>("segments")
                                  .Attr<int64_t>("batch")
                                  .Attr<int64_t>("columns")
                                  .Attr<int64_t>("reduction")
                                  .Attr<int64_t>("by_key"));

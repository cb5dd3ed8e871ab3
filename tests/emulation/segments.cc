// Sorts by small keys, reductions to segments and top_k, on emulated kernels.
//
//   segments sort ids rows segments items
//   segments sorted ids edges segments batches columns lanes ordered
//   segments hostile lanes ordered
//   segments few ids edges segments columns
//   segments scanned ids edges segments columns
//   segments top_k rows columns k
//   segments map edges segments
//
// `ids` is random, equal or outside. Prints how many elements are wrong. `map` needs
// generated_map.h, with the product of rows that edges gather and a number of each edge.
#include <cstdio>
#include <numeric>
#include <string>

#include "arrays.h"
#ifdef GENERATED_MAP
#include "generated_map.h"
#endif

using namespace tilekern;

namespace {

using emulation::Array, emulation::below, emulation::random_bits;

Array<int32> random_rows(std::size_t size) {
  Array<int32> rows(size);
  for (std::size_t i = 0; i < size; ++i) rows[i] = static_cast<int32>(random_bits());
  return rows;
}

// Keys of a batch's segments, from -1 to `segments`; some are further out where there is one batch.
Array<int32> keys_of(const std::string& ids, int edges, int segments, int batches) {
  Array<int32> keys(edges);
  for (int i = 0; i < edges; ++i) {
    const int batch = static_cast<int>(static_cast<int64>(i) * batches / edges);
    int id = below(3) == 0 ? segments / 2 : below(segments + 2) - 1;
    if (ids == "equal") id = segments / 2;
    if (ids == "outside") id = below(2) == 0 ? -1 : segments;
    if (batches == 1 && id < 0) id = -1 - below(1 << 30);
    if (batches == 1 && id >= segments) id += below(1 << 30);
    keys[i] = id + batch * (segments + 2);
  }
  return keys;
}

struct Sorted {
  Array<int32> order;
  Array<int32> bounds;
};

Sorted sorted_of(Array<int32>& keys, int bins) {
  Sorted found = {Array<int32>(keys.size), Array<int32>(bins + 1)};
  const auto bin_of = [&](int32 row) { return std::clamp(keys[row], -1, bins - 2) + 1; };
  std::iota(&found.order[0], &found.order[0] + keys.size, 0);
  std::stable_sort(&found.order[0], &found.order[0] + keys.size,
                   [&](int32 a, int32 b) { return bin_of(a) < bin_of(b); });
  std::fill(&found.bounds[0], &found.bounds[0] + bins + 1, 0);
  for (std::size_t i = 0; i < keys.size; ++i) ++found.bounds[bin_of(i) + 1];
  std::partial_sum(&found.bounds[0], &found.bounds[0] + bins + 1, &found.bounds[0]);
  return found;
}

template <typename T>
int differences(Array<T>& found, Array<T>& wanted) {
  int wrong = 0;
  for (std::size_t i = 0; i < wanted.size; ++i) wrong += found[i] != wanted[i];
  return wrong;
}

// The sums, modulo 2^32, of values(edge, column).
template <typename Values>
Array<int32> sums_of(Array<int32>& keys, int segments, int batches, int columns, Values values) {
  Array<int32> sums(static_cast<std::size_t>(batches) * segments * columns);
  std::fill(&sums[0], &sums[0] + sums.size, 0);
  for (std::size_t edge = 0; edge < keys.size; ++edge) {
    if (keys[edge] < 0 || keys[edge] >= batches * (segments + 2)) continue;
    const int batch = keys[edge] / (segments + 2), id = keys[edge] % (segments + 2);
    if (id >= segments) continue;
    for (int column = 0; column < columns; ++column) {
      int32& sum = sums[(static_cast<int64>(batch) * segments + id) * columns + column];
      sum = lax::add(sum, values(edge, column));
    }
  }
  return sums;
}

template <int kItems>
int sort(const std::string& ids, int rows, int segments) {
  const int bins = segments + 2,
            tiles = (rows + kSortThreads * kItems - 1) / (kSortThreads * kItems);
  Array<int32> keys = keys_of(ids, rows, segments, 1);
  Sorted wanted = sorted_of(keys, bins);
  // As the planner: as few digits as there may be.
  const int bits = std::bit_width(static_cast<unsigned>(bins - 1)), passes = (bits + 8) / 9;
  Array<int32> order(rows), bounds(bins + 1);
  Array<int32> between[] = {Array<int32>(rows), Array<int32>(rows), Array<int32>(rows),
                            Array<int32>(rows)};
  const int32 *from_keys = keys, *from_rows = keys;
  uint32 shift = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const int width = bits / passes + (pass < bits % passes);
    const SortPass shape = {static_cast<uint32>(rows), static_cast<uint32>(tiles), shift,
                            1u << width, static_cast<uint32>(bins)};
    Array<uint32> counts(static_cast<std::size_t>(tiles) << width), totals(1 << width);
    int32* to_keys = between[pass % 2 * 2];
    int32* to_rows = pass + 1 == passes ? order : static_cast<int32*>(between[pass % 2 * 2 + 1]);
    const auto pass_of = [&](auto first) {
      constexpr bool kFirst = decltype(first)::value;
      emulation::launch(tiles, kSortThreads,
                        [&] { count_digits<kItems, kFirst>(from_keys, counts, shape); });
      emulation::launch(1 << width, kSortThreads, [&] { scan_digits(counts, totals, shape); });
      emulation::launch(tiles, kSortThreads, [&] {
        scatter_digits<kItems, kFirst>(from_keys, from_rows, counts, totals, to_keys, to_rows,
                                       shape);
      });
    };
    pass == 0 ? pass_of(std::true_type()) : pass_of(std::false_type());
    shift += width;
    from_keys = to_keys, from_rows = to_rows;
  }
  const int ctas = (bins + kSortThreads) / kSortThreads;
  emulation::launch(ctas, kSortThreads, [&] { find_bounds<true>(from_keys, bounds, rows, bins); });
  int wrong = differences(order, wanted.order) + differences(bounds, wanted.bounds);
  // Bounds of keys that do not ascend ascend.
  emulation::launch(ctas, kSortThreads, [&] { find_bounds<false>(keys, bounds, rows, bins); });
  return wrong + !std::is_sorted(&bounds[0], &bounds[0] + bins + 1) + (bounds[bins] != rows);
}

// Reduces by a map of kVector columns; returns the results.
template <typename Map, int kLanes, bool kOrdered, typename... Fields>
Array<int32> reduced(int edges, int bins, int period, int columns, Sorted& sorted,
                     Fields... fields) {
  constexpr int kVector = Map::kVector, kGroups = kSegmentThreads / kLanes;
  SegmentShape shape = {};
  shape.columns = columns;
  shape.edges = edges;
  shape.bins = bins;
  shape.period = period;
  shape.items = 16;
  shape.workers = (edges + bins + shape.items - 1) / shape.items;
  shape.tiles = (columns + kLanes * kVector - 1) / (kLanes * kVector);
  Array<int32> out(static_cast<std::size_t>(bins / period) * (period - 2) * columns);
  Array<int32> heads(shape.workers * columns), tails(shape.workers * columns);
  const int ctas = (shape.workers + kGroups - 1) / kGroups;
  constexpr SegmentConfig config = {.lanes = kLanes, .unroll = 3, .ordered = kOrdered};
  emulation::launch(ctas * shape.tiles, kSegmentThreads, [&] {
    reduce_sorted<Sum, Map, int32, config>(sorted.order, sorted.bounds, heads, tails,
                                           static_cast<int32*>(out), shape, fields...);
  });
  emulation::launch(ctas, kSegmentThreads, [&] {
    combine_parts<Sum, int32, int32, kVector, kLanes>(sorted.bounds, heads, tails,
                                                      static_cast<int32*>(out), shape);
  });
  return out;
}

template <int kLanes, bool kOrdered>
int reduce(const std::string& ids, int edges, int segments, int batches, int columns) {
  const int period = segments + 2, bins = batches * period;
  Array<int32> rows = random_rows(static_cast<std::size_t>(edges) * columns);
  Array<int32> keys = keys_of(ids, edges, segments, batches);
  if (!kOrdered) std::sort(&keys[0], &keys[0] + edges);
  Sorted sorted = sorted_of(keys, bins);
  Array<int32> wanted = sums_of(keys, segments, batches, columns, [&](int edge, int column) {
    return rows[edge * columns + column];
  });
  const auto found = [&](auto bytes) {
    using Map = RowValues<int32, int32, decltype(bytes)::value>;
    return reduced<Map, kLanes, kOrdered>(edges, bins, period, columns, sorted,
                                          static_cast<const int32*>(rows),
                                          static_cast<int64>(columns));
  };
  Array<int32> out = columns % 4 == 0 ? found(std::integral_constant<int, 16>())
                                      : found(std::integral_constant<int, 4>());
  return differences(out, wanted);
}

// Orders and bounds that are none.
template <int kLanes, bool kOrdered>
int reduce_hostile() {
  for (int time = 0; time < 20; ++time) {
    const int edges = 1 + below(400), period = 2 + 1 + below(40), columns = 1 + below(5);
    const int bins = period * (1 + below(3));
    Array<int32> rows = random_rows(static_cast<std::size_t>(edges) * columns);
    Sorted sorted = {random_rows(edges), random_rows(bins + 1)};
    for (int i = 0; i <= bins && time % 2 == 0; ++i) sorted.bounds[i] = below(2 * edges);
    reduced<RowValues<int32, int32, 4>, kLanes, kOrdered>(edges, bins, period, columns, sorted,
                                                          static_cast<const int32*>(rows),
                                                          static_cast<int64>(columns));
  }
  return 0;
}

int reduce_few(const std::string& ids, int edges, int segments, int columns) {
  constexpr int kThreads = 128, kUnroll = 4;
  FewSegmentsShape shape = {};
  shape.columns = columns;
  shape.edges = edges;
  shape.bins = segments + 2;
  shape.block = 700;
  shape.log2_lanes = 2;
  const int blocks = (edges + static_cast<int>(shape.block) - 1) / static_cast<int>(shape.block);
  Array<int32> rows = random_rows(static_cast<std::size_t>(edges) * columns);
  Array<int32> keys = keys_of(ids, edges, segments, 1);
  Array<int32> parts(static_cast<std::size_t>(blocks) * segments * columns);
  Array<int32> out(static_cast<std::size_t>(segments) * columns);
  for (int tile = 0; tile < (columns + 3) / 4; ++tile) {
    emulation::block_row = tile;
    emulation::launch(blocks, kThreads, [&] {
      reduce_few<Sum, RowValues<int32, int32, 4>, kThreads, kUnroll>(
          keys, parts, shape, static_cast<const int32*>(rows), static_cast<int64>(columns));
    });
  }
  emulation::launch((out.size + 31) / 32, kCombineThreads, [&] {
    combine_blocks<Sum, int32, int32>(parts, out, static_cast<int64>(out.size), blocks);
  });
  Array<int32> wanted = sums_of(keys, segments, 1, columns, [&](int edge, int column) {
    return rows[edge * columns + column];
  });
  return differences(out, wanted);
}

int reduce_by_scan(const std::string& ids, int edges, int segments, int columns) {
  constexpr int kLanes = 4;
  ScannedShape shape = {};
  shape.columns = columns;
  shape.edges = edges;
  shape.segments = segments;
  shape.tiles = (columns + kLanes - 1) / kLanes;
  Array<int32> rows = random_rows(static_cast<std::size_t>(edges) * columns);
  Array<int32> keys = keys_of(ids, edges, segments, 2);
  Array<int32> out(static_cast<std::size_t>(2) * segments * columns);
  emulation::launch(2 * segments * shape.tiles, kScanThreads, [&] {
    reduce_scanned<Sum, RowValues<int32, int32, 4>, int32, kLanes>(
        keys, out, shape, static_cast<const int32*>(rows), static_cast<int64>(columns));
  });
  Array<int32> wanted = sums_of(keys, segments, 2, columns, [&](int edge, int column) {
    return rows[edge * columns + column];
  });
  return differences(out, wanted);
}

template <typename T, int kItems, int kWarps>
int top_k_of(int rows, int columns, int k) {
  Array<T> x(static_cast<std::size_t>(rows) * columns), values(rows * k), wanted(rows * k);
  Array<int32> found(rows * k), places(rows * k);
  // Few values, so that many are equal.
  for (std::size_t i = 0; i < x.size; ++i) x[i] = static_cast<T>(below(40) - 20);
  for (int row = 0; row < rows; ++row) {
    std::vector<int32> order(columns);
    std::iota(order.begin(), order.end(), 0);
    const T* const own = &x[static_cast<std::size_t>(row) * columns];
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return own[a] > own[b]; });
    for (int i = 0; i < k; ++i) {
      places[row * k + i] = order[i];
      wanted[row * k + i] = own[order[i]];
    }
  }
  const int groups = kTopKThreads / (32 * kWarps);
  emulation::launch((rows + groups - 1) / groups, kTopKThreads,
                    [&] { top_k<T, kItems, kWarps>(x, values, found, rows, columns, k); });
  return differences(values, wanted) + differences(found, places);
}

#ifdef GENERATED_MAP
int reduce_map(int edges, int segments) {
  constexpr int kColumns = 8, kRows = 50;
  Array<int32> keys = keys_of("random", edges, segments, 1);
  Array<int32> table = random_rows(kRows * kColumns), weights = random_rows(edges), index(edges);
  for (int i = 0; i < edges; ++i) index[i] = below(kRows + 6) - 3;
  Sorted sorted = sorted_of(keys, segments + 2);
  MapSizes<2> sizes = {{kColumns, 1}, {kRows, edges}};
  Array<int32> out = reduced<GeneratedMap, 2, true>(
      edges, segments + 2, segments + 2, kColumns, sorted, static_cast<const int32*>(table),
      static_cast<const int32*>(weights), static_cast<const int32*>(index), sizes);
  Array<int32> wanted = sums_of(keys, segments, 1, kColumns, [&](int edge, int column) {
    const int row = index[edge];
    const int32 read = row < 0 || row >= kRows ? 0 : table[row * kColumns + column];
    return lax::mul(read, weights[edge]);
  });
  return differences(out, wanted);
}
#endif

template <typename Call>
int with_lanes(int lanes, int is_ordered, Call call) {
  const auto with = [&](auto of) {
    return is_ordered ? call(of, std::true_type()) : call(of, std::false_type());
  };
  if (lanes == 1) return with(std::integral_constant<int, 1>());
  if (lanes == 4) return with(std::integral_constant<int, 4>());
  if (lanes == 16) return with(std::integral_constant<int, 16>());
  return with(std::integral_constant<int, 32>());
}

int wrong(const std::string& kind, char** arguments) {
  const auto at = [&](int i) { return std::atoi(arguments[i]); };
  if (kind == "sort") {
    return at(3) == 4 ? sort<4>(arguments[0], at(1), at(2)) : sort<12>(arguments[0], at(1), at(2));
  }
  if (kind == "sorted") {
    return with_lanes(at(5), at(6), [&](auto lanes, auto ordered) {
      return reduce<decltype(lanes)::value, decltype(ordered)::value>(arguments[0], at(1), at(2),
                                                                      at(3), at(4));
    });
  }
  if (kind == "hostile") {
    return with_lanes(at(0), at(1), [](auto lanes, auto ordered) {
      return reduce_hostile<decltype(lanes)::value, decltype(ordered)::value>();
    });
  }
  if (kind == "few") return reduce_few(arguments[0], at(1), at(2), at(3));
  if (kind == "scanned") return reduce_by_scan(arguments[0], at(1), at(2), at(3));
  if (kind == "top_k") {
    return at(1) <= 128 ? top_k_of<int32, 4, 1>(at(0), at(1), at(2)) +
                              top_k_of<float, 4, 1>(at(0), at(1), at(2))
                        : top_k_of<int16, 8, 4>(at(0), at(1), at(2));
  }
#ifdef GENERATED_MAP
  if (kind == "map") return reduce_map(at(0), at(1));
#endif
  std::fprintf(stderr, "no kind %s\n", kind.c_str());
  std::exit(2);
}

}  // namespace

int main(int, char** arguments) { std::printf("%d\n", wrong(arguments[1], arguments + 2)); }

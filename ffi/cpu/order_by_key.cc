// The custom call jax_tilekern_cpu_order_by_key: the order of rows by small keys, and where each
// bin of them begins.
//
// The operand has int32 keys. A key is the number of its bin, less one; lower keys are of the first
// bin, higher ones of the last. Results are the rows by ascending bin, and by number where bins are
// equal, and the bounds: for each bin the position where it begins, and the number of rows. Where
// bounds are the only result, keys ascend as they lie; the bounds of other keys have no meaning,
// but they ascend. The results do not depend on the number of threads.
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/call.h"
#include "cpu/product.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

// A radix sort counts and moves tiles of rows on several threads, a digit at a time, of which each
// value has a run of memory that it is written to.
constexpr int64_t kTileRows = 32 << 10;
constexpr int64_t kMostTiles = 64;
constexpr int kDigitBits = 10;
// Bounds of a task.
constexpr int64_t kTaskBounds = 16 << 10;

struct Item {
  uint32_t bin;
  int32_t row;
};

// Returns the first position from `first` to `last` whose key is not less. The positions of
// ascending keys ascend in any array.
int64_t Search(const int32_t* keys, int64_t first, int64_t last, int64_t key) {
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (keys[middle] < key) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

// The same in steps that double, for a position near `first`.
int64_t SearchNear(const int32_t* keys, int64_t first, int64_t last, int64_t key) {
  int64_t step = 1;
  for (; first + step <= last && keys[first + step - 1] < key; step *= 2) first += step;
  return Search(keys, first, std::min(first + step - 1, last), key);
}

void FindBounds(const Workers& workers, const int32_t* keys, int64_t rows, int64_t bins,
                int32_t* bounds) {
  workers.Run(CeilDiv(bins + 1, kTaskBounds), [&](int64_t task) {
    const int64_t begin = task * kTaskBounds, end = std::min(begin + kTaskBounds, bins + 1);
    int64_t place = Search(keys, 0, rows, begin - 1);
    const int64_t last = std::max(place, Search(keys, 0, rows, end - 1));
    for (int64_t bin = begin; bin < end;) {
      place = SearchNear(keys, place, last, bin - 1);
      // Bins that no key has begin where the next one does.
      const int64_t next = place < last ? std::min<int64_t>(int64_t{keys[place]} + 2, end) : end;
      const int64_t after = std::max(next, bin + 1);
      std::fill(bounds + bin, bounds + after, static_cast<int32_t>(place));
      bin = after;
    }
  });
  bounds[0] = 0;
  bounds[bins] = static_cast<int32_t>(rows);
}

class Sort {
 public:
  Sort(const Workers& workers, const int32_t* keys, int64_t rows, int64_t bins)
      : workers_(workers),
        keys_(keys),
        rows_(rows),
        bins_(bins),
        tiles_(std::clamp<int64_t>(rows / kTileRows, 1, kMostTiles)) {}

  void Run(int32_t* order, int32_t* bounds) const {
    int bits = 1;
    while (bits < 31 && bins_ > int64_t{1} << bits) ++bits;
    const int passes = static_cast<int>(CeilDiv(bits, kDigitBits));
    const auto bits_of = [&](int pass) { return bits / passes + (pass < bits % passes ? 1 : 0); };
    const auto key_at = [&](int64_t row) {
      const int64_t key = std::clamp<int64_t>(keys_[row], -1, bins_ - 2);
      return Item{static_cast<uint32_t>(key + 1), static_cast<int32_t>(row)};
    };
    if (passes == 1) {
      const std::vector<uint32_t> places =
          Pass(key_at, 0, bits, [&](uint32_t place, const Item& item) { order[place] = item.row; });
      // The first tile begins where a digit does.
      for (int64_t bin = 0; bin < bins_; ++bin) bounds[bin] = static_cast<int32_t>(places[bin]);
      bounds[bins_] = static_cast<int32_t>(rows_);
      return;
    }
    const std::unique_ptr<Item[]> items[2] = {Items(), passes > 2 ? Items() : nullptr};
    const std::unique_ptr<int32_t[]> sorted(new int32_t[rows_]);
    int shift = 0;
    for (int pass = 0; pass < passes; ++pass) {
      const Item* from = items[(pass + 1) % 2].get();
      Item* to = items[pass % 2].get();
      const auto item_at = [&](int64_t row) { return from[row]; };
      const auto move = [&](uint32_t place, const Item& item) { to[place] = item; };
      const auto finish = [&](uint32_t place, const Item& item) {
        order[place] = item.row;
        sorted[place] = static_cast<int32_t>(item.bin) - 1;
      };
      if (pass == 0) {
        Pass(key_at, shift, bits_of(pass), move);
      } else if (pass < passes - 1) {
        Pass(item_at, shift, bits_of(pass), move);
      } else {
        Pass(item_at, shift, bits_of(pass), finish);
      }
      shift += bits_of(pass);
    }
    FindBounds(workers_, sorted.get(), rows_, bins_, bounds);
  }

 private:
  std::unique_ptr<Item[]> Items() const { return std::unique_ptr<Item[]>(new Item[rows_]); }

  // Sorts by a digit: write(place, item) for each item. Returns where each digit begins.
  template <typename Read, typename Write>
  std::vector<uint32_t> Pass(const Read& read, int shift, int bits, const Write& write) const {
    const int64_t digits = int64_t{1} << bits;
    const auto mask = static_cast<uint32_t>(digits - 1);
    std::vector<uint32_t> places(tiles_ * digits);
    const auto for_each_row = [&](int64_t tile, const auto& body) {
      uint32_t* own = &places[tile * digits];
      const int64_t last = rows_ * (tile + 1) / tiles_;
      for (int64_t row = rows_ * tile / tiles_; row < last; ++row) {
        const Item item = read(row);
        body(own[item.bin >> shift & mask], item);
      }
    };
    workers_.Run(tiles_, [&](int64_t tile) {
      for_each_row(tile, [](uint32_t& count, const Item&) { ++count; });
    });
    std::vector<uint32_t> begins(digits);
    uint32_t place = 0;
    for (int64_t digit = 0; digit < digits; ++digit) {
      begins[digit] = place;
      for (int64_t tile = 0; tile < tiles_; ++tile) {
        place += std::exchange(places[tile * digits + digit], place);
      }
    }
    workers_.Run(tiles_, [&](int64_t tile) {
      for_each_row(tile, [&](uint32_t& next, const Item& item) { write(next++, item); });
    });
    return begins;
  }

  const Workers& workers_;
  const int32_t* const keys_;
  const int64_t rows_, bins_, tiles_;
};

int32_t* Integers(ffi::AnyBuffer buffer, int64_t count, const char* what) {
  if (TypeOf(buffer) != DType::kS32) Refuse(std::string(what) + " are not of int32");
  if (static_cast<int64_t>(buffer.element_count()) != count) {
    Refuse(std::to_string(buffer.element_count()) + " " + what + ", not " + std::to_string(count));
  }
  return static_cast<int32_t*>(buffer.untyped_data());
}

void RunCall(const Workers& workers, ffi::AnyBuffer keys, ffi::RemainingRets results) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (results.size() != 1 && results.size() != 2) {
    Refuse(std::to_string(results.size()) + " results are not the order and the bounds");
  }
  const auto result = [&](size_t i) {
    auto found = results.get<ffi::AnyBuffer>(i);
    if (!found.has_value()) Refuse("a result is not an array");
    return *found.value();
  };
  const ffi::AnyBuffer bounds_result = result(results.size() - 1);
  const auto rows = static_cast<int64_t>(keys.element_count());
  const auto bins = static_cast<int64_t>(bounds_result.element_count()) - 1;
  if (bins < 1) Refuse("there are no bins");
  if (rows > kMost || bins > kMost) Refuse("there are more than 2^31 - 1 rows or bins");
  const int32_t* from = Integers(keys, rows, "keys");
  int32_t* bounds = Integers(bounds_result, bins + 1, "bounds");
  if (results.size() == 1) return FindBounds(workers, from, rows, bins, bounds);
  int32_t* order = Integers(result(0), rows, "rows");
  Sort(workers, from, rows, bins).Run(order, bounds);
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer keys, ffi::RemainingRets results) {
  return Guarded("jax_tilekern_cpu_order_by_key", [&] { RunCall(WorkersOf(pool), keys, results); });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CpuOrderByKey, tilekern::cpu::Handle,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<xla::ffi::AnyBuffer>().RemainingRets());

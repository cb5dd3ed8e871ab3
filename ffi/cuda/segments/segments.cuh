// Shared definitions of the segment kernels: how values are combined, and what they are values of.
//
// A kernel reduces the values of *edges*, rows of its operands, to the segments of their keys. It
// gets them from a map, a functor that a plan generates or `RowValues` below:
//
//   struct Map {
//     using Value = float;               // what a value is reduced in
//     static constexpr int kVector = 4;  // adjacent columns of a lane
//     struct Place {...};                // where the rows of an edge lie
//     struct Row {...};                  // what a lane loads of the operands for an edge
//     Place place(uint32 edge) const;
//     Row load(const Place& place, int64 column) const;
//     void values(const Row& row, Value (&values)[kVector]) const;
//   };
//
// A key is the number of a bin, less one. The first and the last bin of a batch have what belongs
// to no segment, and those between are its segments.
#pragma once

#include "scalar_functions.cuh"
#include "vector_loads.cuh"

namespace tilekern {

struct Sum {
  template <typename T>
  static T neutral() {
    return T(0);
  }
  template <typename T>
  static T combined(T x, T y) {
    return lax::add(x, y);
  }
};

struct Product {
  template <typename T>
  static T neutral() {
    return T(1);
  }
  template <typename T>
  static T combined(T x, T y) {
    return lax::mul(x, y);
  }
};

template <typename T>
inline T highest() {
  if constexpr (kSame<T, double>) {
    return __longlong_as_double(0x7ff0000000000000ll);
  } else if constexpr (kSame<T, float>) {
    return __uint_as_float(0x7f800000u);
  } else if constexpr (lax::kIsSigned<T>) {
    // An operand of fewer bits than an int becomes one.
    return static_cast<T>(static_cast<lax::Unsigned<T>>(~lax::Unsigned<T>(0)) >> 1);
  } else {
    return static_cast<T>(~T(0));
  }
}

struct Maximum {
  template <typename T>
  static T neutral() {
    if constexpr (lax::kIsFloat<T>) {
      return -highest<T>();
    } else {
      return static_cast<T>(~highest<T>());
    }
  }
  template <typename T>
  static T combined(T x, T y) {
    return lax::max(x, y);
  }
};

struct Minimum {
  template <typename T>
  static T neutral() {
    return highest<T>();
  }
  template <typename T>
  static T combined(T x, T y) {
    return lax::min(x, y);
  }
};

// Sizes of the operands of a generated map.
template <int kOperands>
struct MapSizes {
  // Elements from one row to the next.
  int64 strides[kOperands];
  int64 rows[kOperands];
};

// Loads from a row of a gathered number; one out of bounds is zeros.
template <int kBytes, typename T>
inline Bits<kBytes> load_gathered(const T* data, int64 number, int64 stride, int64 rows,
                                  int64 column) {
  if (static_cast<uint64>(number) < static_cast<uint64>(rows)) {
    return load_reused<kBytes>(data + number * stride + column);
  }
  return {};
}

// The map that is the operand itself.
template <typename T, typename Computed, int kBytes>
struct RowValues {
  using Value = Computed;
  using Row = Bits<kBytes>;
  static constexpr int kVector = kBytes / static_cast<int>(sizeof(T));

  const T* data;
  int64 stride;

  using Place = uint32;

  Place place(uint32 edge) const { return edge; }
  Row load(Place edge, int64 column) const {
    return load_once<kBytes>(data + edge * stride + column);
  }
  void values(const Row& row, Value (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = element<T, Value>(row, i);
  }
};

template <typename Out, typename Value, int kVector>
inline void store_values(Out* out, const Value (&values)[kVector]) {
  struct alignas(kVector * sizeof(Out)) Vector {
    Out elements[kVector];
  } vector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) vector.elements[i] = rounded<Out>(values[i]);
  if constexpr (sizeof(Vector) == 16) {
    // Results are not read again soon.
    const uint4& bits = reinterpret_cast<const uint4&>(vector);
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out), "r"(bits.x), "r"(bits.y),
                 "r"(bits.z), "r"(bits.w)
                 : "memory");
    return;
  }
  *reinterpret_cast<Vector*>(out) = vector;
}

template <typename Operation, typename Value, int kVector>
class Reduced {
 public:
  Reduced() { reset(); }
  void reset() {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = Operation::template neutral<Value>();
  }
  void take(const Value (&other)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = Operation::combined(values[i], other[i]);
  }

  Value values[kVector];
};

}  // namespace tilekern

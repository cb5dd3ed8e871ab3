// A row-major array: a pointer with sizes. With TILEKERN_DEBUG, which cuda_kernel(debug=True)
// defines, every access is checked, and one out of bounds ends the kernel with a message.
#pragma once

#include "types.cuh"

namespace tilekern {

template <typename T, int kRank>
struct View {
  static_assert(kRank >= 1);

  T* data;
  int64 sizes[kRank];

  // Returns the element at one index per dimension.
  template <typename... Indices>
  T& operator()(Indices... indices) const {
    static_assert(sizeof...(Indices) == kRank, "a view takes an index for each dimension");
    const int64 at[kRank] = {static_cast<int64>(indices)...};
    int64 offset = 0;
    for (int i = 0; i < kRank; ++i) {
      check(i, at[i]);
      offset = offset * sizes[i] + at[i];
    }
    return data[offset];
  }

  // Returns the subarray at an index of the first dimension.
  View<T, kRank - 1> operator[](int64 index) const
    requires(kRank > 1)
  {
    check(0, index);
    View<T, kRank - 1> inner;
    int64 elements = 1;
    for (int i = 1; i < kRank; ++i) elements *= inner.sizes[i - 1] = sizes[i];
    inner.data = data + index * elements;
    return inner;
  }

  bool contains(int dimension, int64 index) const { return 0 <= index && index < sizes[dimension]; }

 private:
  void check([[maybe_unused]] int dimension, [[maybe_unused]] int64 index) const {
#ifdef TILEKERN_DEBUG
    if (contains(dimension, index)) return;
    printf(
        "index %lld of dimension %d is out of bounds: its size is %lld (block %u %u %u, "
        "thread %u %u %u)\n",
        index, dimension, sizes[dimension], blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
        threadIdx.y, threadIdx.z);
    // assert() calls this function, which NVRTC knows without a header.
    __assertfail("index out of bounds of a tilekern::View", __FILE__, __LINE__, "View", 1);
#endif
  }
};

}  // namespace tilekern

// Operands and results of lanes in shared memory, where lanes lie one behind the other in memory: a
// thread that walks along its own row would load a sector for each element.
#pragma once

#include "ptx.cuh"

namespace tilekern::lax {

// Elements between rows. Threads that read the same column access different banks.
constexpr int row_stride(int size) { return size | 1; }

// Calls copy(in_shared, in_global) for the elements of rows, neighbouring ones by neighbouring
// threads.
template <int kThreads, int kSize, typename T, typename Global, typename Copy>
inline void each_of_rows(T* in_shared, Global* in_global, int rows, const Copy& copy) {
  constexpr int kWarps = kThreads / 32;
  const int column = threadIdx.x % 32, first = threadIdx.x / 32;
  in_shared += first * row_stride(kSize) + column;
  in_global += first * kSize + column;
#pragma unroll 4
  for (int row = first; row < rows; row += kWarps) {
#pragma unroll
    for (int i = 0; i < kSize; i += 32) {
      if (i + column < kSize) copy(in_shared + i, in_global + i);
    }
    in_shared += kWarps * row_stride(kSize);
    in_global += kWarps * kSize;
  }
}

// Begins to copy rows to shared memory.
template <int kThreads, int kSize, typename T>
inline void load_rows(T* to, const T* from, int rows) {
  each_of_rows<kThreads, kSize>(to, from, rows, [](T* to, const T* from) {
    cp_async<sizeof(T)>(shared_address(to), from, true);
  });
}
inline void wait_for_rows() {
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

template <int kThreads, int kSize, typename T>
inline void store_rows(T* to, T* from, int rows) {
  each_of_rows<kThreads, kSize>(from, to, rows, [](T* from, T* to) { *to = *from; });
}

}  // namespace tilekern::lax

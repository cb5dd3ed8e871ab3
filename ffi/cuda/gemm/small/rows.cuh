// Copies of rows between global and shared memory, at any alignment.
//
// Rows start anywhere, but are copied by vectors of 16 bytes. A row therefore starts in shared
// memory at the same distance from a multiple of 16 bytes as in global memory, its shift.
#pragma once

#include "gemm/small/config.cuh"
#include "ptx.cuh"

namespace tilekern {

inline constexpr int kVectorBytes = 16;

template <SmallArrayShape array>
inline int shift_of(const char* address) {
  if constexpr (array.aligned) return 0;
  return static_cast<int>(reinterpret_cast<uint64>(address)) & (kVectorBytes - 1);
}

// Where a row begins in a tile, but for its shift.
template <SmallArrayShape array>
inline int row_start(int row) {
  int start = row * array.pitch;
  if constexpr (array.group_rows > 0) {
    start += static_cast<uint32>(row) / array.group_rows * kGroupPadding;
  }
  return start;
}

// Calls copy(source, tile, byte, shift, end) for every vector of rows in memory, and of a tile,
// that are shared by the threads: bytes `shift` to `end` of a row are those of the array.
template <int kThreads, SmallArrayShape array, typename Pointer, typename Copy>
inline void for_each_vector(uint32 tile, Pointer first, int rows, int row_bytes, Copy copy) {
  if constexpr (array.flat) {
    row_bytes += (rows - 1) * array.pitch;
    rows = 1;
  }
  const int thread = threadIdx.x % array.threads_per_row;
  const int first_row = threadIdx.x / array.threads_per_row;
  constexpr int kRowStep = kThreads / array.threads_per_row;
  Pointer row_in_memory = first + array.stride * first_row;
#pragma unroll 1
  for (int row = first_row; row < rows; row += kRowStep) {
    const int shift = shift_of<array>(row_in_memory), end = shift + row_bytes;
    const uint32 row_in_tile = tile + row_start<array>(row);
#pragma unroll 1
    for (int byte = thread * kVectorBytes; byte < end;
         byte += kVectorBytes * array.threads_per_row) {
      copy(row_in_memory - shift + byte, row_in_tile + byte, byte, shift, end);
    }
    row_in_memory += array.stride * kRowStep;
  }
}

// Copies rows to `tile` asynchronously, each with what comes before it up to a multiple of 16
// bytes.
template <int kThreads, SmallArrayShape array>
inline void load_rows(uint32 tile, const char* first, int rows, int row_bytes) {
  for_each_vector<kThreads, array>(
      tile, first, rows, row_bytes, [](const char* source, uint32 target, int byte, int, int end) {
        cp_async_partly(target, source, min_of(kVectorBytes, end - byte));
      });
}

// Copies kBytes at `byte` and advances it, if `wanted`.
template <int kBytes>
inline void store_bytes(char* target, uint32 source, int& byte, bool wanted) {
  using Vector = Select<kBytes == 8, uint2, Select<kBytes == 4, uint32, uint16>>;
  if (wanted) {
    *reinterpret_cast<Vector*>(target + byte) = load_shared_as<Vector>(source + byte);
    byte += kBytes;
  }
}

// Copies bytes `first` to `last` of aligned 16 bytes, both multiples of kElement, by as few powers
// of two as possible: of increasing size until `first` is aligned, and then of decreasing size.
template <int kElement>
inline void store_part(char* target, uint32 source, int first, int last) {
  if constexpr (kElement <= 2) {
    store_bytes<2>(target, source, first, first & 2 && first + 2 <= last);
  }
  if constexpr (kElement <= 4) {
    store_bytes<4>(target, source, first, first & 4 && first + 4 <= last);
  }
  store_bytes<8>(target, source, first, first + 8 <= last);
  if constexpr (kElement <= 4) store_bytes<4>(target, source, first, first + 4 <= last);
  if constexpr (kElement <= 2) store_bytes<2>(target, source, first, first + 2 <= last);
}

// Copies rows of elements of kElement bytes from `tile` to global memory.
template <int kElement, int kThreads, SmallArrayShape array>
inline void store_rows(uint32 tile, char* first, int rows, int row_bytes) {
  for_each_vector<kThreads, array>(
      tile, first, rows, row_bytes, [](char* target, uint32 source, int byte, int shift, int end) {
        if (byte >= shift && byte + kVectorBytes <= end) {
          *reinterpret_cast<uint4*>(target) = load_shared_as<uint4>(source);
        } else {
          store_part<kElement>(target, source, max_of(shift - byte, 0),
                               min_of(kVectorBytes, end - byte));
        }
      });
}

}  // namespace tilekern

// Arrays and random numbers of the programs.
#pragma once

#include <cstring>
#include <memory>
#include <random>

#include "cuda.h"
#include "kernels.h"

namespace emulation {

inline std::mt19937 random_bits(1);

inline int below(long long count) { return static_cast<int>(random_bits() % count); }

// An allocation of its own, so that a sanitizer sees an access out of bounds.
template <typename T>
struct Array {
  explicit Array(std::size_t size) : size(size), data(new T[size]) {
    std::memset(static_cast<void*>(data.get()), 0x55, size * sizeof(T));
  }
  T& operator[](std::size_t i) { return data[i]; }
  operator T*() { return data.get(); }
  std::size_t size;
  std::unique_ptr<T[]> data;
};

}  // namespace emulation

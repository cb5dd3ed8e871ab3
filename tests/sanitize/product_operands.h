// Operands of products, of every type, in memory that ends where they end.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "elements.h"

struct Types {
  Type lhs, rhs, out;

  std::string Text() const { return std::string(lhs.name) + " x " + rhs.name + " -> " + out.name; }
};

inline constexpr Types kTypes[] = {
    {kF32, kF32, kF32},   {kF64, kF64, kF64}, {kBF16, kBF16, kF32}, {kBF16, kBF16, kBF16},
    {kF16, kF16, kF16},   {kF16, kF16, kF32}, {kE4M3, kE5M2, kF32}, {kE5M2, kE5M2, kBF16},
    {kE4M3, kE4M3, kF16}, {kS8, kS8, kS32}};

// Memory of exactly as many elements, and the integers that they stand for: small ones, so that
// every sum is exact in any order.
struct Operand {
  std::vector<double> values;
  std::unique_ptr<char[]> memory;

  Operand(const Type& type, int64_t count, std::mt19937& random);
};

// What results are filled with beforehand.
inline constexpr char kUntouched = 0x55;

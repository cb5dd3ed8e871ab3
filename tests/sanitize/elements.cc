#include "elements.h"

#include <cmath>
#include <cstring>

namespace {

// Bits of a float format of `exponent` and `mantissa` bits, rounded to nearest even. The exponent
// is in range, or the value is zero.
uint64_t FloatBits(double value, int exponent, int mantissa) {
  const uint64_t sign = std::signbit(value) ? uint64_t{1} << (exponent + mantissa) : 0;
  if (value == 0) return sign;
  int power;
  double fraction = std::frexp(std::abs(value), &power);  // in [0.5, 1)
  fraction = std::nearbyint(std::ldexp(fraction, mantissa + 1));
  if (fraction == std::ldexp(1.0, mantissa + 1)) {
    fraction /= 2;
    ++power;
  }
  const auto biased = static_cast<uint64_t>(power - 1 + (1 << (exponent - 1)) - 1);
  const auto bits = static_cast<uint64_t>(fraction) - (uint64_t{1} << mantissa);
  return sign | biased << mantissa | bits;
}

}  // namespace

void Write(const Type& type, double value, char* to) {
  uint64_t bits = 0;
  switch (type.ffi) {
    case XLA_FFI_DataType_F32:
      bits = FloatBits(value, 8, 23);
      break;
    case XLA_FFI_DataType_F64:
      bits = FloatBits(value, 11, 52);
      break;
    case XLA_FFI_DataType_BF16:
      bits = FloatBits(value, 8, 7);
      break;
    case XLA_FFI_DataType_F16:
      bits = FloatBits(value, 5, 10);
      break;
    case XLA_FFI_DataType_F8E4M3FN:
      bits = FloatBits(value, 4, 3);
      break;
    case XLA_FFI_DataType_F8E5M2:
      bits = FloatBits(value, 5, 2);
      break;
    default:
      bits = static_cast<uint64_t>(static_cast<int64_t>(value));
  }
  std::memcpy(to, &bits, type.bytes);  // little-endian, as every machine with these kernels is
}

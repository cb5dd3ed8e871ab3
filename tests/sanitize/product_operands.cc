#include "product_operands.h"

Operand::Operand(const Type& type, int64_t count, std::mt19937& random)
    : values(count), memory(new char[count * type.bytes]) {
  for (int64_t i = 0; i < count; ++i) {
    // All of int8, the extremes above all; for the rest what 8-bit floats hold exactly.
    const int drawn = static_cast<int>(random() % 256) - 128;
    values[i] = type.ffi != XLA_FFI_DataType_S8 ? drawn & 1 : drawn % 3 == 0 ? -128 : drawn;
    if (type.ffi != XLA_FFI_DataType_S8 && drawn < 0) values[i] = -values[i];
    if (type.ffi != XLA_FFI_DataType_S8 && drawn % 16 == 0) values[i] = 2;
    Write(type, values[i], &memory[i * type.bytes]);
  }
}

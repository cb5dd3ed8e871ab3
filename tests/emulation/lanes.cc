// Kernels of lanes, one lane after the other, on a CPU.
//
//   lanes kernel input output
//
// `generated.h` has the kernels, and a table of them. The input file has a size in bytes for each
// buffer, negative for one that the kernel writes, and the bytes of the others; the output file has
// those that it wrote. Every buffer is an allocation of its own, so that a sanitizer sees an access
// out of bounds.
#include <cstdio>
#include <memory>
#include <utility>

// Its macros are words of the standard library.
#include "lanes.h"
//
#include "kernels.h"
//
#include "generated.h"

int main(int, char** arguments) {
  const Kernel& kernel = kernels[std::atoi(arguments[1])];
  std::FILE* const input = std::fopen(arguments[2], "rb");
  std::FILE* const output = std::fopen(arguments[3], "wb");
  std::vector<std::unique_ptr<char[]>> buffers;
  std::vector<std::pair<char*, long long>> written;
  std::vector<void*> pointers;
  long long size;
  while (std::fread(&size, sizeof size, 1, input) == 1) {
    const std::size_t bytes = size < 0 ? -size : size;
    buffers.emplace_back(new char[bytes]);
    char* const data = buffers.back().get();
    std::memset(data, 0x55, bytes);
    if (size < 0) {
      written.emplace_back(data, -size);
    } else if (std::fread(data, 1, bytes, input) != bytes) {
      return 1;
    }
    pointers.push_back(data);
  }
  for (long long lane = 0; lane < kernel.lanes; ++lane) {
    blockIdx.x = static_cast<unsigned>(lane);
    kernel.run(pointers.data());
  }
  for (const auto& [data, bytes] : written) std::fwrite(data, 1, bytes, output);
  return std::fclose(output);
}

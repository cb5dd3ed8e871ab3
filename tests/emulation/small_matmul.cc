// A product of small matrices, on an emulated kernel.
//
//   small_matmul grid threads shared_bytes lhs rhs out
//
// KERNEL is the kernel. The last three arguments are files: the operands, and the result, which
// exists with the size that it has afterwards. Prints 0.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "kernels.h"

using namespace tilekern;

namespace {

std::vector<char> contents(const char* file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Copy {
  explicit Copy(const char* file) {
    const std::vector<char> bytes = contents(file);
    size = bytes.size();
    // Nothing but these bytes is there to be read: what is around them fails the checks.
    data = static_cast<char*>(std::aligned_alloc(256, (size + 255) / 256 * 256));
    std::memcpy(data, bytes.data(), size);
  }
  char* data;
  std::size_t size;
};

}  // namespace

int main(int, char** arguments) {
  shared_size = std::atoi(arguments[3]);
  const Copy lhs(arguments[4]), rhs(arguments[5]), out(arguments[6]);
  arrays[0] = {lhs.data, lhs.data + lhs.size};
  arrays[1] = {rhs.data, rhs.data + rhs.size};
  emulation::launch(std::atoi(arguments[1]), std::atoi(arguments[2]), [&] {
    std::memset(shared_bytes, 255, emulation::running->index == 0 ? sizeof shared_bytes : 0);
    __syncthreads();
    KERNEL(lhs.data, rhs.data, out.data);
  });
  std::ofstream(arguments[6], std::ios::binary).write(out.data, out.size);
  std::printf("0\n");
}

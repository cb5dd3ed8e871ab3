#include "cpu/scratch.h"

#include <memory>
#include <new>

namespace tilekern::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Free {
  void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
};

struct Buffer {
  std::unique_ptr<std::byte, Free> memory;
  size_t bytes = 0;
};

}  // namespace

void* Scratch(ScratchUse use, size_t bytes) {
  thread_local Buffer buffers[3];
  Buffer& buffer = buffers[static_cast<int>(use)];
  if (buffer.bytes < bytes) {
    buffer.memory.reset();
    buffer.bytes = 0;
    buffer.memory.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
    buffer.bytes = bytes;
  }
  return buffer.memory.get();
}

}  // namespace tilekern::cpu

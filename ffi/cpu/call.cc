#include "cpu/call.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <functional>
#include <sstream>
#include <utility>

namespace tilekern::cpu {
namespace {

struct Type {
  DType type;
  ffi::DataType ffi;
  const char* name;
};

// The entries have the order of DType.
constexpr Type kTypes[kNumDTypes] = {
    {DType::kF32, ffi::DataType::F32, "f32"},
    {DType::kF64, ffi::DataType::F64, "f64"},
    {DType::kBF16, ffi::DataType::BF16, "bf16"},
    {DType::kF16, ffi::DataType::F16, "f16"},
    {DType::kF8E4M3FN, ffi::DataType::F8E4M3FN, "f8e4m3fn"},
    {DType::kF8E5M2, ffi::DataType::F8E5M2, "f8e5m2"},
    {DType::kS8, ffi::DataType::S8, "s8"},
    {DType::kS16, ffi::DataType::S16, "s16"},
    {DType::kS32, ffi::DataType::S32, "s32"},
    {DType::kS64, ffi::DataType::S64, "s64"},
    {DType::kU8, ffi::DataType::U8, "u8"},
    {DType::kU16, ffi::DataType::U16, "u16"},
    {DType::kU32, ffi::DataType::U32, "u32"},
    {DType::kU64, ffi::DataType::U64, "u64"},
    {DType::kC64, ffi::DataType::C64, "c64"},
    {DType::kC128, ffi::DataType::C128, "c128"},
};

// glibc returns freed memory of 32 MiB and more to the system, and less of it where the end of its
// heap is free.
constexpr size_t kNewResultBytes = 4 << 20;

}  // namespace

const char* Name(DType type) { return kTypes[static_cast<int>(type)].name; }

void Refuse(const std::string& what) { throw std::invalid_argument(what); }

DType TypeOf(ffi::AnyBuffer buffer) {
  for (const Type& type : kTypes) {
    if (type.ffi == buffer.element_type()) return type.type;
  }
  // The message has a number, because the headers name only the types that they define.
  Refuse("no kernel for XLA's type " + std::to_string(static_cast<int>(buffer.element_type())));
}

RealNumbers RealNumbersOf(ffi::AnyBuffer buffer) {
  const DType type = TypeOf(buffer);
  const auto count = static_cast<int64_t>(buffer.element_count());
  if (type == DType::kC64) return {DType::kF32, 2 * count};
  if (type == DType::kC128) return {DType::kF64, 2 * count};
  return {type, count};
}

std::string ToString(ffi::Span<const int64_t> values) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < values.size(); ++i) text << (i == 0 ? "" : ", ") << values[i];
  text << "]";
  return text.str();
}

int64_t CheckedMultiply(int64_t a, int64_t b, const char* what) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) Refuse(std::string(what) + " overflows 64 bits");
  return product;
}

int64_t CheckedAdd(int64_t a, int64_t b, const char* what) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) Refuse(std::string(what) + " overflows 64 bits");
  return sum;
}

int64_t CheckedCount(ffi::Span<const int64_t> sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) {
    if (size < 0) Refuse("sizes " + ToString(sizes) + " has a negative size");
    count = CheckedMultiply(count, size, "the number of elements");
  }
  return count;
}

Workers WorkersOf(ffi::ThreadPool& pool) {
  return Workers(pool.num_threads(),
                 [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
}

void AdviseNewResult([[maybe_unused]] ffi::AnyBuffer result) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (result.size_bytes() < kNewResultBytes) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto data = reinterpret_cast<uintptr_t>(result.untyped_data());
  const uintptr_t first = (data + page - 1) / page * page;
  // A failure costs time alone.
  madvise(reinterpret_cast<void*>(first), data + result.size_bytes() - first, MADV_HUGEPAGE);
#endif
}

}  // namespace tilekern::cpu

// Shared code of the custom calls' handlers: element types, refusals, and XLA's thread pool.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

#include "cpu/dtype.h"
#include "cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace tilekern::cpu {

namespace ffi = xla::ffi;

// Returns XLA's short name of a type.
const char* Name(DType type);

// Throws an exception that makes the call an error.
[[noreturn]] void Refuse(const std::string& what);

// Returns the type of a buffer's elements; refuses types that no CPU kernel reads.
DType TypeOf(ffi::AnyBuffer buffer);

// The real numbers of a buffer, which are two for each complex one.
struct RealNumbers {
  DType type;
  int64_t count;
};
RealNumbers RealNumbersOf(ffi::AnyBuffer buffer);

std::string ToString(ffi::Span<const int64_t> values);

// Multiplies; an overflow of 64 bits is an error that names `what`.
int64_t CheckedMultiply(int64_t a, int64_t b, const char* what);
int64_t CheckedAdd(int64_t a, int64_t b, const char* what);

// Returns the number of elements of a dense array; refuses negative sizes.
int64_t CheckedCount(ffi::Span<const int64_t> sizes);

Workers WorkersOf(ffi::ThreadPool& pool);

// Asks for huge pages for a large result, whose memory may be new at each call: writing it then
// causes a page fault for each 2 MiB in place of each 4 KiB.
void AdviseNewResult(ffi::AnyBuffer result);

// Runs a handler's body, and converts its exceptions to FFI errors.
template <typename Body>
ffi::Error Guarded(const char* target, const Body& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(std::string(target) + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(target) + ": out of memory for temporaries");
  }
}

}  // namespace tilekern::cpu

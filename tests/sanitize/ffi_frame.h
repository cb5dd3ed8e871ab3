// Stands in for XLA: attributes, buffers, a thread pool and the call frame that brings them to a
// handler. Every array is a heap allocation of exactly its size, so that a sanitizer sees the
// first byte that is read past its end.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

// An attribute: a tree of what FFI has.
struct Attribute {
  enum Kind { kNumber, kText, kNumbers, kBytes, kReal, kMembers };

  Kind kind = kNumber;
  int64_t number = 0;
  std::string text;
  std::vector<int64_t> numbers;
  std::vector<uint8_t> bytes;
  std::map<std::string, Attribute> members;

  static Attribute Number(int64_t value);
  static Attribute Text(std::string value);
  static Attribute Numbers(std::vector<int64_t> values);
  static Attribute Bytes(std::vector<uint8_t> values);
  static Attribute Real();  // a double, which no handler of the package reads
  static Attribute Members(std::map<std::string, Attribute> values);
};

// Attributes in the layout of the C API.
class EncodedAttributes {
 public:
  explicit EncodedAttributes(const std::map<std::string, Attribute>& attributes);
  EncodedAttributes(const EncodedAttributes&) = delete;
  EncodedAttributes& operator=(const EncodedAttributes&) = delete;

  const XLA_FFI_Attrs& get() const { return attrs_; }

 private:
  void* Encode(const Attribute& attribute);
  void* Copy(const void* data, size_t bytes);
  XLA_FFI_ByteSpan* Span(const std::string& text);

  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<std::unique_ptr<EncodedAttributes>> nested_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
  XLA_FFI_Attrs attrs_;
};

// An array that a handler is given.
struct FrameBuffer {
  XLA_FFI_DataType type;
  void* data;
  std::vector<int64_t> dims;
};

// How scheduled tasks run: on threads of their own, at once on the caller's, or only after the
// handler has returned, as in a pool that was busy all along.
enum class Pool { kThreads, kInline, kLate };

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

// Calls a handler's execute stage; returns its error's message, or nothing.
std::string CallHandler(Handler* handler, std::vector<FrameBuffer> operands,
                        std::vector<FrameBuffer> results,
                        const std::map<std::string, Attribute>& attributes, Pool pool,
                        int64_t threads);

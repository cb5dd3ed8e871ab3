#include "ffi_frame.h"

#include <cstring>
#include <thread>
#include <utility>

// The C API leaves this to the runtime.
struct XLA_FFI_Error {
  std::string message;
};

namespace {

// And this, under a name that differs between its versions.
struct Context {
  Pool pool;
  int64_t threads;
  std::vector<std::thread> running;
  std::vector<std::pair<XLA_FFI_Task*, void*>> late;
};

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  auto& context = *reinterpret_cast<Context*>(args->ctx);
  switch (context.pool) {
    case Pool::kThreads:
      context.running.emplace_back(args->task, args->data);
      break;
    case Pool::kInline:
      args->task(args->data);
      break;
    case Pool::kLate:
      context.late.emplace_back(args->task, args->data);
      break;
  }
  return nullptr;
}

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = reinterpret_cast<Context*>(args->ctx)->threads;
  return nullptr;
}

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api api = {};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                       XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = CreateError;
    api.XLA_FFI_Error_Destroy = DestroyError;
    api.XLA_FFI_ThreadPool_Schedule = Schedule;
    api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
    return api;
  }();
  return &api;
}

// The buffers of one side in the layout of the C API.
template <typename Type>
struct Side {
  explicit Side(std::vector<FrameBuffer>& given, Type type) : types(given.size(), type) {
    for (FrameBuffer& buffer : given) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, buffer.type, buffer.data,
                         static_cast<int64_t>(buffer.dims.size()), buffer.dims.data()});
    }
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  }

  std::vector<Type> types;
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
};

}  // namespace

Attribute Attribute::Number(int64_t value) {
  Attribute attribute;
  attribute.number = value;
  return attribute;
}

Attribute Attribute::Text(std::string value) {
  Attribute attribute;
  attribute.kind = kText;
  attribute.text = std::move(value);
  return attribute;
}

Attribute Attribute::Numbers(std::vector<int64_t> values) {
  Attribute attribute;
  attribute.kind = kNumbers;
  attribute.numbers = std::move(values);
  return attribute;
}

Attribute Attribute::Bytes(std::vector<uint8_t> values) {
  Attribute attribute;
  attribute.kind = kBytes;
  attribute.bytes = std::move(values);
  return attribute;
}

Attribute Attribute::Real() {
  Attribute attribute;
  attribute.kind = kReal;
  return attribute;
}

Attribute Attribute::Members(std::map<std::string, Attribute> values) {
  Attribute attribute;
  attribute.kind = kMembers;
  attribute.members = std::move(values);
  return attribute;
}

// A std::map is in the order of names that FFI promises its handlers.
EncodedAttributes::EncodedAttributes(const std::map<std::string, Attribute>& attributes) {
  for (const auto& [name, attribute] : attributes) {
    names_.push_back(Span(name));
    values_.push_back(Encode(attribute));
  }
  attrs_ = {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(values_.size()),
            types_.data(),
            names_.data(),
            values_.data()};
}

void* EncodedAttributes::Copy(const void* data, size_t bytes) {
  memory_.emplace_back(new char[bytes]);
  if (bytes > 0) std::memcpy(memory_.back().get(), data, bytes);
  return memory_.back().get();
}

XLA_FFI_ByteSpan* EncodedAttributes::Span(const std::string& text) {
  const XLA_FFI_ByteSpan span = {static_cast<char*>(Copy(text.data(), text.size())), text.size()};
  return static_cast<XLA_FFI_ByteSpan*>(Copy(&span, sizeof span));
}

void* EncodedAttributes::Encode(const Attribute& attribute) {
  const auto scalar = [&](XLA_FFI_DataType type, const void* value) {
    types_.push_back(XLA_FFI_AttrType_SCALAR);
    const XLA_FFI_Scalar scalar = {type, Copy(value, 8)};
    return Copy(&scalar, sizeof scalar);
  };
  const auto array = [&](XLA_FFI_DataType type, size_t size, const void* data, size_t bytes) {
    types_.push_back(XLA_FFI_AttrType_ARRAY);
    const XLA_FFI_Array array = {type, size, Copy(data, bytes)};
    return Copy(&array, sizeof array);
  };
  switch (attribute.kind) {
    case Attribute::kNumber:
      return scalar(XLA_FFI_DataType_S64, &attribute.number);
    case Attribute::kReal:
      return scalar(XLA_FFI_DataType_F64, &attribute.number);
    case Attribute::kNumbers:
      return array(XLA_FFI_DataType_S64, attribute.numbers.size(), attribute.numbers.data(),
                   attribute.numbers.size() * sizeof(int64_t));
    case Attribute::kBytes:
      return array(XLA_FFI_DataType_U8, attribute.bytes.size(), attribute.bytes.data(),
                   attribute.bytes.size());
    case Attribute::kText:
      types_.push_back(XLA_FFI_AttrType_STRING);
      return Span(attribute.text);
    case Attribute::kMembers:
      break;
  }
  types_.push_back(XLA_FFI_AttrType_DICTIONARY);
  nested_.push_back(std::make_unique<EncodedAttributes>(attribute.members));
  return &nested_.back()->attrs_;
}

std::string CallHandler(Handler* handler, std::vector<FrameBuffer> operands,
                        std::vector<FrameBuffer> results,
                        const std::map<std::string, Attribute>& attributes, Pool pool,
                        int64_t threads) {
  Context context = {pool, threads, {}, {}};
  Side<XLA_FFI_ArgType> args(operands, XLA_FFI_ArgType_BUFFER);
  Side<XLA_FFI_RetType> rets(results, XLA_FFI_RetType_BUFFER);
  const EncodedAttributes attrs(attributes);

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(&context);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.buffers.size()),
                args.types.data(), args.pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.buffers.size()),
                rets.types.data(), rets.pointers.data()};
  frame.attrs = attrs.get();
  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));

  // A task that runs late must not touch what belonged to the call.
  for (const auto& [task, data] : context.late) task(data);
  for (std::thread& thread : context.running) thread.join();
  return error ? "error: " + error->message : std::string();
}

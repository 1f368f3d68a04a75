#include "remat/known_bytes.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "remat/operators.h"

namespace memsave_ext::remat {
namespace {

class Writer {
 public:
  template <typename T>
  void operator()(const T& value) {
    static_assert(std::is_arithmetic_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void operator()(const std::string& text) {
    (*this)(static_cast<uint32_t>(text.size()));
    bytes_ += text;
  }
  void operator()(const Operator* op) {
    const auto [found, is_new] = numbers_.try_emplace(op, static_cast<int32_t>(numbers_.size()));
    (*this)(found->second);
    if (!is_new) return;
    (*this)(op == nullptr ? std::string() : op->name.name);
    (*this)(op == nullptr ? std::string() : op->name.overload_name);
  }
  template <typename List, typename Each>
  void list(const List& values, const Each& each) {
    (*this)(static_cast<uint32_t>(values.size()));
    for (const auto& value : values) each(value);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
  std::unordered_map<const Operator*, int32_t> numbers_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  void operator()(T& value) {
    static_assert(std::is_arithmetic_v<T>);
    std::memcpy(&value, next(sizeof(T)).data(), sizeof(T));
  }
  void operator()(std::string& text) {
    uint32_t size = 0;
    (*this)(size);
    text = next(size);
  }
  void operator()(const Operator*& op) {
    int32_t number = 0;
    (*this)(number);
    if (number == static_cast<int32_t>(operators_.size())) {
      c10::OperatorName name("", "");
      (*this)(name.name);
      (*this)(name.overload_name);
      operators_.push_back(name.name.empty() ? nullptr : Operator::named(name));
    }
    op = operators_.at(number);
  }
  template <typename List, typename Each>
  void list(List& values, const Each& each) {
    uint32_t size = 0;
    (*this)(size);
    TORCH_CHECK(size <= bytes_.size(), "no bytes of a step");
    values.resize(size);
    for (auto& value : values) each(value);
  }
  void end() const { TORCH_CHECK(bytes_.empty(), "no bytes of a step"); }

 private:
  std::string_view next(size_t size) {
    TORCH_CHECK(size <= bytes_.size(), "no bytes of a step");
    const auto part = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return part;
  }

  std::string_view bytes_;
  std::vector<const Operator*> operators_;
};

// What both do, in one order. `Step` is const for a writer.
template <typename Stream, typename Step>
void stream(Stream& stream, Step& step) {
  const auto number = [&](auto& value) { stream(value); };
  const auto numbers = [&](auto& values) { stream.list(values, number); };
  stream.list(step.keys, number);
  stream.list(step.calls, number);
  stream(step.before);
  stream(step.missing);
  stream(step.others);
  auto& trace = step.trace;
  stream(trace.forward);
  stream.list(trace.contents, [&](auto& content) {
    stream(content.bytes);
    stream(content.call);
    stream(content.saved);
    stream(content.let_go);
    stream(content.opened);
    stream(content.closed);
    stream(content.must_be_kept);
    stream(content.decided);
    stream(content.emptied);
    stream(content.op);
    stream(content.module);
  });
  stream.list(trace.calls, [&](auto& call) {
    stream(call.seconds);
    numbers(call.reads);
    numbers(call.makes);
    numbers(call.writes);
    stream(call.temporary);
    stream(call.was_repeated);
    stream(call.op);
    stream(call.moment);
    stream(call.module);
  });
  stream.list(trace.moments, [&](auto& moment) {
    stream(moment.now);
    stream(moment.peak);
  });
  stream.list(trace.on_context, [&](auto& kept) {
    stream(kept.bytes);
    stream(kept.from);
    stream(kept.until);
  });
  stream.list(trace.left, [&](auto& left) {
    stream(left.first);
    stream(left.second);
  });
}

}  // namespace

std::string to_bytes(const Known& step) {
  Writer writer;
  stream(writer, step);
  return writer.take();
}

std::shared_ptr<Known> known_from_bytes(std::string_view bytes) {
  Reader reader(bytes);
  auto step = std::make_shared<Known>();
  stream(reader, *step);
  reader.end();
  return step;
}

}  // namespace memsave_ext::remat

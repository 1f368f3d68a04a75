#include "remat/proof.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "locks.h"
#include "remat/again.h"
#include "remat/pause.h"
#include "remat/random.h"

namespace memsave_ext::remat {
namespace {

uint64_t stirred(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

// Four chains of multiplications, so that a word does not wait for the one before it.
uint64_t hash_of(const void* memory, size_t bytes) {
  constexpr size_t kChains = 4;
  const char* at = static_cast<const char*>(memory);
  uint64_t chains[kChains] = {1, 2, 3, 4};
  uint64_t words[kChains];
  for (; bytes >= sizeof(words); bytes -= sizeof(words), at += sizeof(words)) {
    std::memcpy(words, at, sizeof(words));
    for (size_t i = 0; i < kChains; ++i) chains[i] = stirred(chains[i], words[i]);
  }
  uint64_t hash = bytes;
  for (; bytes > 0; --bytes, ++at) hash = stirred(hash, static_cast<unsigned char>(*at));
  for (const uint64_t chain : chains) hash = stirred(hash, chain);
  return hash | 1;
}

// The bytes of the storage from a tensor's first one to its last, as a tensor. `before`: so many
// bytes before the first one, too.
at::Tensor bytes_of(const at::Tensor& tensor, int64_t before = 0) {
  const checkpoint::ByteRange range = Geometry::of(tensor).range();
  const auto options = at::TensorOptions().dtype(at::kByte).device(tensor.device());
  Geometry geometry = Geometry::of(at::empty({0}, options));
  geometry.sizes = {range.begin == range.end ? 0 : range.end - range.begin + before};
  geometry.offset = range.begin == range.end ? 0 : range.begin - before;
  return geometry.view(tensor.storage());
}

// Returns a tensor with the same values that lies in the same way in memory of its own.
at::Tensor copy_of_tensor(const at::Tensor& tensor) {
  constexpr int64_t kAligned = 64;  // results may depend on where vectors begin
  const checkpoint::ByteRange range = Geometry::of(tensor).range();
  const int64_t before = range.begin == range.end ? 0 : range.begin % kAligned;
  const at::Tensor from = bytes_of(tensor, before);
  at::Tensor to = at::empty(from.sizes(), from.options());
  to.copy_(from);
  Geometry geometry = Geometry::of(tensor);
  geometry.offset = before / static_cast<int64_t>(tensor.itemsize());
  return geometry.view(to.storage());
}

// Calls `change` for each tensor of an argument and puts what it returns in its place.
template <typename Change>
c10::IValue changed(const c10::IValue& argument, const Change& change) {
  if (argument.isTensor() && argument.toTensor().defined()) return change(argument.toTensor());
  if (argument.isTensorList()) {
    std::vector<at::Tensor> list = argument.toTensorVector();
    for (at::Tensor& tensor : list) tensor = change(tensor);
    return list;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list = argument.toOptionalTensorList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::optional<at::Tensor> tensor = list.get(i);
      if (tensor && tensor->defined()) list.set(i, change(*tensor));
    }
    return list;
  }
  return argument;
}

template <typename Values>
std::vector<at::Tensor> tensors_of(const Values& values) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) {
    for_tensors(value, [&](const at::Tensor& tensor, int64_t) {
      if (tensor.defined()) tensors.push_back(tensor);
    });
  }
  return tensors;
}

std::vector<uint64_t> bits_of_all(const std::vector<at::Tensor>& tensors) {
  std::vector<uint64_t> bits;
  bits.reserve(tensors.size());
  for (const auto& tensor : tensors) bits.push_back(bits_of(tensor));
  return bits;
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.device() != b.device()) return false;
  const auto begin = [](const at::Tensor& tensor) {
    return static_cast<const char*>(tensor.storage().data()) + Geometry::of(tensor).range().begin;
  };
  const auto end = [](const at::Tensor& tensor) {
    return static_cast<const char*>(tensor.storage().data()) + Geometry::of(tensor).range().end;
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

bool any_share_memory(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::any_of(a.begin(), a.end(), [&](const at::Tensor& one) {
    return std::any_of(b.begin(), b.end(),
                       [&](const at::Tensor& other) { return share_memory(one, other); });
  });
}

// Adds a number, a text or a list of these to a key. False where it is something else.
bool add_value(uint64_t& key, const c10::IValue& value) {
  if (value.isNone()) {
    key = stirred(key, 1);
  } else if (value.isBool()) {
    key = stirred(key, 2 + static_cast<uint64_t>(value.toBool()));
  } else if (value.isInt()) {
    key = stirred(key, static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble() || value.isComplexDouble() || value.isDevice() || value.isString()) {
    key = stirred(key, c10::IValue::hash(value));
  } else if (value.isList()) {
    const auto list = value.toListRef();
    key = stirred(key, list.size());
    return std::all_of(list.begin(), list.end(),
                       [&](const c10::IValue& item) { return add_value(key, item); });
  } else {
    // A generator's state is part of the call; of a Function, what else it is given is its own.
    return value.isGenerator() || value.isCapsule();
  }
  return true;
}

// Adds how the tensors of an argument lie.
void add_tensors(uint64_t& key, const c10::IValue& argument) {
  for_tensors(argument, [&](const at::Tensor& tensor, int64_t element) {
    if (!tensor.defined()) return;
    key = stirred(key, static_cast<uint64_t>(element + 2));
    key = stirred(key, static_cast<uint64_t>(tensor.device().type()));  // each has its own kernels
    key = stirred(key, static_cast<uint64_t>(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes()) key = stirred(key, static_cast<uint64_t>(size));
    for (const int64_t stride : tensor.strides()) key = stirred(key, static_cast<uint64_t>(stride));
  });
}

Lock& functions_mutex() {
  static auto& mutex = *new Lock(LockOrder::kOperators);
  return mutex;
}

struct Functions {
  std::unordered_set<uint64_t> seen;                   // by FunctionKey::arguments
  std::unordered_map<uint64_t, ArgumentBits> written;  // by FunctionKey::name
};

Functions& functions() {
  static auto& all = *new Functions();
  return all;
}

// Of the Function whose apply() runs: several libraries have one of the same name, and that is all
// that is reported of it. 0 where it is called in another way.
uint64_t hash_of_class() {
  namespace py = pybind11;
  const py::gil_scoped_acquire gil;
  PyObject* const frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
  if (frame == nullptr) return 0;
  const py::object kind = py::handle(frame).attr("f_locals").attr("get")("cls");
  if (!PyType_Check(kind.ptr())) return 0;
  const auto module = static_cast<uint64_t>(py::hash(py::str(kind.attr("__module__"))));
  return stirred(module, static_cast<uint64_t>(py::hash(kind.attr("__qualname__"))));
}

// Whether Python was interrupted, which raises that again once it can.
bool passes_on(PyObject* type) {
  const pybind11::gil_scoped_acquire gil;
  if (type == nullptr || PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt) == 0) {
    return false;
  }
  PyErr_SetInterrupt();
  return true;
}

}  // namespace

bool has_bits(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.is_non_overlapping_and_dense();
}

uint64_t bits_of(const at::Tensor& tensor) {
  const Pause pause;
  const at::NoGradGuard no_grad;
  at::Tensor bytes = bytes_of(tensor);
  if (!bytes.is_cpu()) bytes = bytes.cpu();
  return hash_of(bytes.const_data_ptr(), static_cast<size_t>(bytes.numel()));
}

std::optional<uint64_t> key_of_arguments(c10::ArrayRef<const c10::IValue> arguments) {
  uint64_t key = arguments.size();
  for (const auto& argument : arguments) {
    if (!holds_tensors(argument)) {
      if (!add_value(key, argument)) return std::nullopt;
      continue;
    }
    add_tensors(key, argument);
  }
  return key;
}

FunctionKey FunctionKey::of(std::string_view name, c10::ArrayRef<const c10::IValue> arguments) {
  FunctionKey key{stirred(std::hash<std::string_view>()(name), hash_of_class()), 0};
  key.arguments = key.name;
  for (const auto& argument : arguments) add_tensors(key.arguments, argument);
  return key;
}

std::optional<ArgumentBits> written_by(const FunctionKey& key) {
  const std::lock_guard<Lock> lock(functions_mutex());
  const auto found = functions().written.find(key.name);
  if (found != functions().written.end()) return found->second;
  const bool is_known = functions().seen.count(key.arguments) > 0;
  return is_known ? std::optional<ArgumentBits>(ArgumentBits()) : std::nullopt;
}

void note_function(const FunctionKey& key, const ArgumentBits& written) {
  const std::lock_guard<Lock> lock(functions_mutex());
  functions().seen.insert(key.arguments);
  if (written.any()) functions().written[key.name] |= written;
}

Proof::Proof(uint64_t key, c10::ArrayRef<const c10::IValue> arguments)
    : key_(key),
      arguments_(arguments.begin(), arguments.end()),
      generators_(std::make_shared<const checkpoint::RngState>(devices_of(arguments))),
      before_(bits_of_all(tensors_of(arguments_))) {}

std::vector<at::Tensor> Proof::changed_arguments() const {
  std::vector<at::Tensor> changed;
  const std::vector<at::Tensor> given = tensors_of(arguments_);
  for (size_t i = 0; i < given.size(); ++i) {
    if (bits_of(given[i]) != before_[i]) changed.push_back(given[i]);
  }
  return changed;
}

bool Proof::succeeds(Call& call, const std::vector<c10::IValue>& results) const {
  const Pause pause;
  const at::NoGradGuard no_grad;
  std::vector<c10::IValue> stack;
  std::vector<at::Tensor> copies;
  try {
    for (const auto& argument : arguments_) {
      stack.push_back(changed(argument, [&](const at::Tensor& tensor) {
        return copies.emplace_back(copy_of_tensor(tensor));
      }));
    }
  } catch (const std::exception&) {  // there is no memory for it
    return false;
  }
  bool is_proved = false;
  const Operator& op = *call.op;
  try {
    is_proved = is_same(call, tensors_of(arguments_), tensors_of(results), copies, stack);
  } catch (const c10::OutOfMemoryError&) {
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  } catch (const python_error& error) {
    if (passes_on(error.type)) return false;  // which says nothing of the operator
  } catch (const pybind11::error_already_set& error) {
    if (passes_on(error.type().ptr())) return false;
  } catch (const std::exception&) {
  }
  if (is_proved) {
    op.proved(key_);
  } else {
    op.has_failed = true;
  }
  return is_proved;
}

bool Proof::is_same(Call& call, const std::vector<at::Tensor>& given,
                    const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& copies,
                    std::vector<c10::IValue>& stack) const {
  const Operator& op = *call.op;
  const bool draws = !generators_->is_present();
  if (any_share_memory(given, first)) return false;
  {
    const AgainScope again;
    const checkpoint::RngGuard same_numbers(*generators_);
    std::optional<RandomGuard> random;
    if (call.random) random.emplace(*call.random, op, stack);
    op.call(stack);
  }
  const std::vector<at::Tensor> second = tensors_of(stack);
  if (first.size() != second.size()) return false;
  for (size_t i = 0; i < first.size(); ++i) {
    if (!has_bits(first[i]) || !has_bits(second[i])) return false;
    const Geometry geometry = Geometry::of(first[i]);
    const bool lies_alike =
        second[i].dtype() == geometry.dtype && second[i].sizes() == first[i].sizes() &&
        second[i].strides() == first[i].strides() && second[i].storage_offset() == geometry.offset;
    if (!lies_alike || bits_of(first[i]) != bits_of(second[i])) return false;
  }
  // A result of the second run in memory of the first one's is a cache's.
  if (any_share_memory(first, second) || any_share_memory(copies, second)) return false;
  if (bits_of_all(copies) != before_ || bits_of_all(given) != before_) return false;
  if (draws && !call.random) {
    op.draws = true;
    call.random = Random{std::nullopt, generators_};
  }
  return true;
}

}  // namespace memsave_ext::remat

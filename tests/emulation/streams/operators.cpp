// torch's operators on the device: those of the CPU, on the same memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>

#include "ATen/cuda/CUDAGeneratorImpl.h"
#include "device.h"

namespace emulated {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

Use use_of(const Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {nullptr, 0, writes};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.const_data_ptr(), static_cast<size_t>(last + 1) * tensor.element_size(), writes};
}

std::atomic<bool> refuses_waits = false;

namespace {

void wait_for_result() {
  if (refuses_waits) failed("the host waits for a result");
  synchronize(current_stream());
}

Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

Tensor empty_strided_on_device(at::IntArrayRef sizes, at::IntArrayRef strides,
                               at::ScalarType type) {
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
}

// The seed of a CPU generator that draws from where the device's is, which moves on.
std::function<uint64_t()> next_numbers(const at::Generator& given) {
  at::Generator generator = given.defined() ? given : at::cuda::detail::getDefaultCUDAGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const auto from = generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(4);
  return [from] {
    const uint64_t seed = from.seed_.ptr != nullptr ? *from.seed_.ptr : from.seed_.val;
    const uint64_t offset = from.offset_.ptr != nullptr
                                ? *from.offset_.ptr + from.offset_intragraph_
                                : from.offset_.val;
    return seed * 1000003 + offset;
  };
}

// Sets the CPU's default generator for operators that are given none.
class DefaultGenerator {
 public:
  explicit DefaultGenerator(uint64_t seed) : lock_(mutex), outer_(generator_.get_state()) {
    generator_.set_current_seed(seed);
  }
  ~DefaultGenerator() { generator_.set_state(outer_); }

 private:
  static inline std::mutex mutex;
  const std::lock_guard<std::mutex> lock_;
  at::Generator generator_ = at::detail::getDefaultCPUGenerator();
  Tensor outer_;
};

// A call of an operator, whose arguments are on the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<IValue> arguments)
      : op_(op), arguments_(std::move(arguments)) {
    const auto& of = op.schema().arguments();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* alias = of[i].alias_info();
      host_.push_back(argument(arguments_[i], alias != nullptr && alias->isWrite()));
      if (alias != nullptr && alias->isWrite() && is_empty(arguments_[i])) {
        host_.back() = at::empty({0}, host_.back().toTensor().options());
      }
      if (of[i].name() == "generator") generator_ = i;
    }
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    const bool given = generator_ && arguments_[*generator_].isGenerator();
    numbers_ = next_numbers(given ? arguments_[*generator_].toGenerator() : at::Generator());
  }

  void run(Stack& stack) {
    Stack results = compute();
    for (size_t i = 0; i < arguments_.size(); ++i) resize(i);
    const auto& of = op_.schema().returns();
    bool waits = false;
    for (size_t i = 0; i < results.size(); ++i) {
      if (const auto* alias = of[i].alias_info()) {
        stack.push_back(same_as(*alias));
      } else {
        waits = waits || !(results[i].isTensor() || results[i].isTensorList());
        stack.push_back(result(results[i]));
      }
    }
    queue(current_stream(), c10::toString(op_.operator_name()), uses_, again());
    if (waits) wait_for_result();
  }

 private:
  IValue argument(const IValue& value, bool writes) {
    const auto use = [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.has_storage()) uses_.push_back(use_of(tensor, writes));
      return on_host(tensor);
    };
    if (value.isTensor()) return use(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(use(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(use(*tensor)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(at::kCPU);
    return value;
  }

  static bool is_empty(const IValue& value) {
    return value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 0;
  }

  // What is to be written was empty, and is now as large as its values.
  void resize(size_t i) {
    if (!is_empty(arguments_[i]) || is_empty(host_[i])) return;
    const Tensor tensor = arguments_[i].toTensor(), values = host_[i].toTensor();
    tensor.resize_(values.sizes());
    const Tensor seen = on_host(tensor);
    seen.copy_(values);
    uses_.push_back(use_of(tensor, true));
    host_[i] = seen;
  }

  Stack compute() const {
    Stack stack = host_;
    std::optional<DefaultGenerator> numbers;
    if (numbers_) numbers.emplace(numbers_());
    if (generator_) stack[*generator_] = IValue();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  }

  // The argument that is returned.
  IValue same_as(const c10::AliasInfo& alias) const {
    const auto& of = op_.schema().arguments();
    for (size_t i = 0; alias.isWrite() && i < of.size(); ++i) {
      if (of[i].alias_info() && of[i].alias_info()->beforeSets() == alias.beforeSets()) {
        return arguments_[i];
      }
    }
    TORCH_CHECK(false, op_.operator_name(), " makes a view, which is not emulated");
  }

  IValue result(const IValue& value) {
    const auto moved = [&](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      const auto type = tensor.scalar_type();
      Tensor made = empty_strided_on_device(tensor.sizes(), tensor.strides(), type);
      made_.push_back(on_host(made));
      made_.back().copy_(tensor);
      uses_.push_back(use_of(made, true));
      return made;
    };
    if (value.isTensor()) return moved(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(moved(tensor));
    return list;
  }

  std::function<void()> again() const {
    return [call = *this] {
      const at::AutoDispatchBelowAutograd guard;
      auto made = call.made_.begin();
      const auto copy = [&](const Tensor& tensor) {
        if (tensor.defined()) Tensor(*made++).copy_(tensor);
      };
      const Stack results = call.compute();
      for (size_t i = 0; i < results.size(); ++i) {
        if (call.op_.schema().returns()[i].alias_info() != nullptr) continue;
        if (results[i].isTensor()) copy(results[i].toTensor());
        if (!results[i].isTensorList()) continue;
        for (const Tensor& tensor : results[i].toTensorVector()) copy(tensor);
      }
    };
  }

  c10::OperatorHandle op_;
  std::vector<IValue> arguments_;
  Stack host_;
  std::vector<Use> uses_;
  std::vector<Tensor> made_;           // new results, as the host sees them
  std::optional<size_t> generator_;    // the argument
  std::function<uint64_t()> numbers_;  // of what draws
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, torch::jit::pop(*stack, op.schema().arguments().size()));
  call.run(*stack);
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(type), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return empty_strided_on_device(sizes, strides, c10::dtype_or_default(type));
}

// The host waits as CUDA lets it: not for copies on the device, nor for those that need not block
// between it and memory that was allocated for transfers.
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  const auto copy = [to = on_host(self), from = on_host(from)] {
    const at::AutoDispatchBelowAutograd guard;
    Tensor(to).copy_(from);
  };
  copy();
  queue(current_stream(), "copy_", {use_of(self, true), use_of(from, false)}, copy);
  const Tensor& on_cpu = self.is_cuda() ? from : self;
  if (on_cpu.is_cuda()) return self;
  if (!(non_blocking && is_pinned(on_cpu.const_data_ptr()))) wait_for_result();
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  used_on(self.storage().data(), stream.id());
}

// What UntypedStorage.resize_ does, for which torch would have to be built with CUDA.
void resize_storage(const Tensor& tensor, int64_t bytes) {
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
}

TORCH_LIBRARY(emulated, library) { library.def("resize_storage(Tensor tensor, int bytes) -> ()"); }

TORCH_LIBRARY_IMPL(emulated, CUDA, library) { library.impl("resize_storage", resize_storage); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("resize_", at::native::resize_);
  library.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    return at::native::set_(self, std::move(source));
  });
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace emulated

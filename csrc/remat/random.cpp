#include "remat/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "remat/fakes.h"

namespace memsave_ext::remat {
namespace {

at::Generator clone_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.clone();
}

bool all_on_cpu(c10::ArrayRef<const c10::IValue> arguments) {
  return std::all_of(arguments.begin(), arguments.end(), [](const c10::IValue& value) {
    if (value.isTensor()) return !value.toTensor().defined() || value.toTensor().is_cpu();
    return !value.isDevice() || value.toDevice().is_cpu();
  });
}

// Whether one is on a device whose generator nobody here restores.
bool any_on_others(c10::ArrayRef<const c10::IValue> arguments) {
  const auto is_other = [](const at::Device& device) {
    return !device.is_cpu() && !device.is_cuda();
  };
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::IValue& value) {
    bool any = value.isDevice() && is_other(value.toDevice());
    for_tensors(value, [&](const at::Tensor& tensor, int64_t) {
      any = any || (tensor.defined() && is_other(tensor.device()));
    });
    return any;
  });
}

}  // namespace

checkpoint::CudaDevices devices_of(c10::ArrayRef<const c10::IValue> arguments) {
  checkpoint::CudaDevices devices;
  for (const auto& value : arguments) {
    if (value.isDevice()) devices.add(value.toDevice());
    for_tensors(value, [&](const at::Tensor& tensor, int64_t) { devices.add(tensor); });
  }
  return devices;
}

namespace {

template <typename T>
void pack(const void* from, int64_t count, uint8_t* to) {
  const T* values = static_cast<const T*>(from);
  for (int64_t begin = 0; begin < count; begin += 8) {
    const int64_t n = std::min<int64_t>(8, count - begin);
    unsigned byte = 0;
    for (int64_t i = 0; i < n; ++i) byte |= static_cast<unsigned>(values[begin + i] != 0) << i;
    *to++ = static_cast<uint8_t>(byte);
  }
}

template <typename T>
void unpack(const uint8_t* from, int64_t count, T one, void* to) {
  T* values = static_cast<T*>(to);
  for (int64_t begin = 0; begin < count; begin += 8) {
    const int64_t n = std::min<int64_t>(8, count - begin);
    const unsigned byte = *from++;
    for (int64_t i = 0; i < n; ++i) values[begin + i] = (byte >> i & 1) != 0 ? one : T{0};
  }
}

// Calls `body` with an unsigned integer of `itemsize` bytes.
template <typename Body>
void with_width(size_t itemsize, const Body& body) {
  switch (itemsize) {
    case 1:
      return body(uint8_t{});
    case 2:
      return body(uint16_t{});
    case 4:
      return body(uint32_t{});
    case 8:
      return body(uint64_t{});
    default:
      TORCH_INTERNAL_ASSERT(false, "remat: a mask of ", itemsize, " bytes an element");
  }
}

}  // namespace

std::optional<Random> Random::of(const Operator& op, c10::ArrayRef<const c10::IValue> arguments) {
  if (any_on_others(arguments)) return std::nullopt;
  if (op.generator && *op.generator < arguments.size()) {
    const c10::IValue& generator = arguments[*op.generator];
    if (generator.isGenerator() && generator.toGenerator().defined()) {
      // A CUDA graph in capture would not know the generator's copy.
      if (!all_on_cpu(arguments) && checkpoint::GraphRng::current()) return std::nullopt;
      return Random{clone_of(generator.toGenerator()), nullptr};
    }
    if (all_on_cpu(arguments)) {
      return Random{clone_of(at::detail::getDefaultCPUGenerator()), nullptr};
    }
  }
  return Random{std::nullopt, std::make_shared<const checkpoint::RngState>(devices_of(arguments))};
}

RandomGuard::RandomGuard(const Random& random, const Operator& op,
                         std::vector<c10::IValue>& arguments) {
  if (random.generator) {
    arguments[*op.generator] = clone_of(*random.generator);
  } else {
    defaults_.emplace(*random.defaults);
  }
}

at::Tensor pack_mask(const at::Tensor& values) {
  const int64_t count = values.numel();
  at::Tensor bits = at::empty({(count + 7) / 8}, at::kByte);
  if (is_fake(values.storage())) return bits;
  with_width(values.itemsize(), [&](auto zero) {
    pack<decltype(zero)>(values.const_data_ptr(), count, bits.mutable_data_ptr<uint8_t>());
  });
  return bits;
}

void unpack_mask(const at::Tensor& bits, caffe2::TypeMeta dtype, const c10::Storage& to) {
  if (is_fake(to)) return;
  const at::Tensor value = at::ones({}, at::TensorOptions().dtype(dtype));
  with_width(dtype.itemsize(), [&](auto one) {
    std::memcpy(&one, value.const_data_ptr(), sizeof(one));
    const auto count = static_cast<int64_t>(to.nbytes() / sizeof(one));
    unpack(bits.const_data_ptr<uint8_t>(), count, one, to.mutable_data());
  });
}

}  // namespace memsave_ext::remat

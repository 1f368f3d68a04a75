#include "checkpoint/mismatch.h"

#include <sstream>

#include "checkpoint/call.h"

namespace memsave_ext {

namespace py = pybind11;

namespace {

constexpr const char* kTip =
    "Tip: pass `debug=True` to memsave_ext.checkpoint(...), or use "
    "torch.utils.checkpoint.set_checkpoint_debug_enabled(True), to see the operators of both runs. "
    "Common causes: the function depends on a global, a cache or a random number that is not "
    "torch's; "
    "a different autocast or grad mode is set inside it; it changes its own inputs.";

// As torch prints it: {'shape': torch.Size([2]), 'dtype': torch.float32, 'device':
// device(type='cpu')}
std::string describe(c10::IntArrayRef sizes, c10::ScalarType dtype, c10::Device device) {
  std::ostringstream text;
  text << "{'shape': torch.Size(" << sizes << "), 'dtype': torch."
       << c10::getDtypeNames(dtype).first << ", 'device': device(type='"
       << c10::DeviceTypeName(device.type(), /*lower_case=*/true) << "'";
  if (device.has_index()) text << ", index=" << static_cast<int>(device.index());
  text << ")}";
  return text.str();
}

}  // namespace

c10::SmallVector<int64_t, 4> describe_sizes(const at::Tensor& tensor) {
  if (tensor.is_nested()) return {};  // it has none in one piece
  return c10::SmallVector<int64_t, 4>(tensor.sizes());
}

c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>());
  }
  return tensor.storage().getWeakStorageImpl();
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

bool same_metadata(const Slot& slot, const at::Tensor& tensor) {
  return slot.dtype == tensor.scalar_type() && slot.device == tensor.device() &&
         (tensor.is_nested() || tensor.sizes().equals(slot.sizes));
}

bool is_storage(const Slot& slot, const at::Tensor& tensor) {
  return tensor.has_storage() &&
         slot.storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
}

std::string describe_difference(size_t index, const Slot& slot, const at::Tensor& tensor) {
  return "tensor at position " + std::to_string(index) +
         ":\nsaved metadata: " + describe(slot.sizes, slot.dtype, slot.device) +
         "\nrecomputed metadata: " +
         describe(describe_sizes(tensor), tensor.scalar_type(), tensor.device()) + "\n";
}

std::string describe_versions(uint32_t in_forward, uint32_t in_recompute) {
  return "modified by an inplace operation: version " + std::to_string(in_forward) +
         " in the forward, " + std::to_string(in_recompute) + " in the recompute";
}

std::string describe_mutation(size_t index, const Slot& slot, const at::Tensor& tensor) {
  return "tensor at position " + std::to_string(index) + ": " +
         describe(slot.sizes, slot.dtype, slot.device) + ", " +
         describe_versions(slot.version, version_of(tensor)) + "\n";
}

std::string difference_message(const std::string& differences) {
  return "torch.utils.checkpoint: Recomputed values for the following tensors have different "
         "metadata than during the forward pass.\n" +
         differences + ".\n" + kTip;
}

std::string mutation_message(const std::string& mutations) {
  return "memsave_ext: tensors from outside the checkpointed function, which it uses in both runs, "
         "have changed between forward and recompute.\n" +
         mutations +
         "The recompute would give gradients of another function. Change them after backward, or "
         "give the function a clone of them; let an optimizer without in_backward step a parameter "
         "that a region reads without a gradient.";
}

std::string more_saved_message() {
  return std::string(
             "torch.utils.checkpoint: trying to save more tensors during recomputation than during "
             "the original forward pass.\n") +
         kTip;
}

std::string fewer_saved_message(size_t saved, size_t recomputed) {
  return "torch.utils.checkpoint: A different number of tensors was saved during the original "
         "forward and recomputation.\nNumber of tensors saved during forward: " +
         std::to_string(saved) +
         "\nNumber of tensors saved during recomputation: " + std::to_string(recomputed) + ".\n" +
         kTip;
}

void throw_checkpoint_error(const std::string& message, const py::object& on_error) {
  const py::object type = py::module_::import("memsave_ext.checkpointing").attr("CheckpointError");
  const py::object text = on_error.is_none() ? py::cast(message) : on_error(message);
  PyErr_SetObject(type.ptr(), text.ptr());
  throw_python_error();
}

}  // namespace memsave_ext

#include "checkpoint/outside.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "checkpoint/errors.h"

namespace memsave_ext {

namespace py = pybind11;

namespace {

// Wrapper subclasses, such as DTensor, have no memory of their own.
bool is_wrapper(const at::Tensor& tensor) {
  return !tensor.has_storage() || tensor.layout() != at::kStrided ||
         tensor.key_set().has(c10::DispatchKey::Python);
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return is_wrapper(tensor) ? nullptr : tensor.storage().unsafeGetStorageImpl();
}

void walk(const std::vector<PyObject*>& roots, TensorWalk& tensors) {
  for (PyObject* root : roots) tensors.visit(root);
}

// `before` is the version in the forward, or nothing where another tensor was there.
ChangedTensor changed_tensor(PyObject* object, const std::string& name,
                             std::optional<uint32_t> before) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const auto description =
      call_errors("describe_change", py::handle(object), name, before, version_of(tensor));
  const auto range = is_wrapper(tensor) ? ByteRange{0, 0} : ByteRange::of(tensor);
  return {tensor.unsafeGetTensorImpl(), storage_of(tensor), range, py::str(description)};
}

}  // namespace

OutsideTensors::Noted OutsideTensors::Noted::of(const at::Tensor& tensor) {
  return {tensor.unsafeGetTensorImpl(),
          is_wrapper(tensor) ? weak_storage(at::Tensor()) : weak_storage(tensor),
          version_of(tensor), false};
}

bool OutsideTensors::Noted::is(const at::Tensor& other) const {
  return tensor == other.unsafeGetTensorImpl() &&
         (is_wrapper(other) || storage._unsafe_get_target() == storage_of(other));
}

bool OutsideTensors::Noted::is_as_it_was(const at::Tensor& other) const {
  return is(other) && version == version_of(other);
}

void OutsideTensors::note(const std::vector<PyObject*>& roots) {
  TensorWalk tensors(
      [&](PyObject* tensor) { noted_.push_back(Noted::of(THPVariable_Unpack(tensor))); });
  walk(roots, tensors);
}

void OutsideTensors::leave_out_own_changes(const std::vector<PyObject*>& roots) {
  size_t index = 0;
  TensorWalk tensors([&](PyObject* object) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (index == noted_.size()) {  // it was made by the forward
      noted_.push_back(Noted::of(tensor));
      same_places_ = false;
    }
    if (!noted_[index].is_as_it_was(tensor)) noted_[index].changed_by_forward = true;
    ++index;
  });
  walk(roots, tensors);
  same_places_ = same_places_ && index == noted_.size();
}

std::vector<ChangedTensor> OutsideTensors::find_changed(const std::vector<PyObject*>& roots) const {
  std::vector<ChangedTensor> changed;
  bool same_places = same_places_;
  size_t index = 0;
  TensorWalk tensors([&](PyObject* object) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    const bool known = same_places && index < noted_.size();
    const Noted* noted = known ? &noted_[index++] : nullptr;
    if (noted != nullptr && (noted->changed_by_forward || noted->is_as_it_was(tensor))) return;
    if (noted == nullptr || !noted->is(tensor)) {
      const auto same = std::find_if(noted_.begin(), noted_.end(),
                                     [&](const Noted& other) { return other.is(tensor); });
      noted = same == noted_.end() ? nullptr : &*same;
    }
    if (noted != nullptr) {
      if (noted->changed_by_forward || noted->is_as_it_was(tensor)) return;
      changed.push_back(changed_tensor(object, tensors.name(), noted->version));
      return;
    }
    // FSDP and offloading put other tensors in a parameter's place: these are not changes.
    if (!known || is_wrapper(tensor) || tensor.is_meta() || tensor.numel() == 0) return;
    const Noted& before = noted_[index - 1];
    const auto* storage = before.storage._unsafe_get_target();
    if (storage == nullptr || storage == storage_of(tensor)) return;
    changed.push_back(changed_tensor(object, tensors.name(), std::nullopt));
  });
  walk(roots, tensors);
  return changed;
}

namespace {

thread_local ReadObserver* observer = nullptr;  // the innermost of this thread

// Operators that read a tensor's shape alone.
bool reads_no_values(std::string_view name) {
  const auto ends_with = [&](std::string_view end) {
    return name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
  };
  return name.rfind("aten::new_", 0) == 0 || ends_with("_like");
}

bool writes(const at::RecordFunction& operator_, size_t argument) {
  const auto schema = operator_.operator_schema();
  if (!schema || argument >= schema->arguments().size()) return false;
  const auto* alias = schema->arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

}  // namespace

py::list as_list(const std::vector<Read>& reads) {
  py::list list;
  for (const auto& [name, change, position, metadata] : reads) {
    const std::vector<int64_t> shape(metadata.sizes.begin(), metadata.sizes.end());
    list.append(py::make_tuple(name, change, position, shape, metadata.dtype));
  }
  return list;
}

ReadObserver::ReadObserver(std::vector<ChangedTensor> changed, const Pending* region)
    : changed_(std::move(changed)),
      region_(region),
      active_(!changed_.empty() || (region != nullptr && region->any_stepped())) {
  if (!active_) return;
  outer_ = observer;
  if (outer_ == nullptr) {
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_operator)
                                               .needsInputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }
  observer = this;
}

ReadObserver::~ReadObserver() {
  if (!active_) return;
  observer = outer_;
  if (outer_ == nullptr) at::removeCallback(callback_);
}

std::unique_ptr<at::ObserverContext> ReadObserver::on_operator(
    const at::RecordFunction& operator_) {
  for (ReadObserver* active = observer; active != nullptr; active = active->outer_) {
    const auto inputs = operator_.inputs();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].isTensor()) {
        active->look(operator_, i, inputs[i].toTensor());
      } else if (inputs[i].isTensorList()) {
        for (const at::Tensor& tensor : inputs[i].toTensorVector()) {
          active->look(operator_, i, tensor);
        }
      } else if (inputs[i].isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& tensor : inputs[i].toOptionalTensorVector()) {
          if (tensor) active->look(operator_, i, *tensor);
        }
      }
    }
  }
  return nullptr;
}

void ReadObserver::look(const at::RecordFunction& operator_, size_t argument,
                        const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto* storage = storage_of(tensor);
  const std::string* change = nullptr;
  for (const auto& changed : changed_) {
    const bool same = storage == nullptr ? changed.tensor == tensor.unsafeGetTensorImpl()
                                         : changed.storage == storage &&
                                               changed.range.overlaps(ByteRange::of(tensor));
    if (same) change = &changed.description;
  }
  const auto position = region_ == nullptr ? std::nullopt : region_->stepped(tensor);
  if (change == nullptr && !position) return;
  if (reads_no_values(operator_.name()) || writes(operator_, argument)) return;
  reads_.push_back({operator_.name(), change == nullptr ? std::string() : *change, position,
                    Metadata::of(tensor)});
}

}  // namespace memsave_ext

#include "checkpoint/outside.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/hash.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "checkpoint/call.h"
#include "checkpoint/rules.h"

namespace memsave_ext::checkpoint {

namespace py = pybind11;

namespace {

// Looked up once. Never freed: they outlive the interpreter's last region.
struct Types {
  PyTypeObject* module;
  PyTypeObject* norm;  // torch's norms
  PyTypeObject* partial;
  PyTypeObject* namespace_;
  PyObject *forward, *parameters, *buffers, *modules, *training, *dataclass_fields, *func, *args,
      *keywords;
  PyObject* module_attributes;  // a set of attribute names that every torch module has

  static const Types& get() {
    // With the GIL. A static would be locked while it is made, and whoever waits for that has the
    // GIL, which Python code in the constructor may have given up.
    static const Types* types = nullptr;
    if (types == nullptr) types = new Types();
    return *types;
  }

 private:
  Types() {
    const auto type = [](const char* module, const char* name) {
      py::object found = py::module_::import(module).attr(name);
      return reinterpret_cast<PyTypeObject*>(found.release().ptr());
    };
    module = type("torch.nn", "Module");
    norm = type("torch.nn.modules.batchnorm", "_NormBase");
    const py::object any_module = py::module_::import("torch.nn").attr("Module")();
    module_attributes = py::set(any_module.attr("__dict__")).release().ptr();
    partial = type("functools", "partial");
    namespace_ = type("types", "SimpleNamespace");
    forward = PyUnicode_InternFromString("forward");
    parameters = PyUnicode_InternFromString("_parameters");
    buffers = PyUnicode_InternFromString("_buffers");
    modules = PyUnicode_InternFromString("_modules");
    training = PyUnicode_InternFromString("training");
    dataclass_fields = PyUnicode_InternFromString("__dataclass_fields__");
    func = PyUnicode_InternFromString("func");
    args = PyUnicode_InternFromString("args");
    keywords = PyUnicode_InternFromString("keywords");
  }
};

// Whether it can hold no tensor.
bool is_plain(PyObject* object) {
  return object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
         PyUnicode_Check(object);
}

bool is_module(PyObject* object) { return PyType_IsSubtype(Py_TYPE(object), Types::get().module); }

// A norm in training only writes its buffers; in recomputes it has others (norms.py).
bool reads_its_buffers(PyObject* module, PyObject* dict) {
  return !PyType_IsSubtype(Py_TYPE(module), Types::get().norm) ||
         PyDict_GetItemWithError(dict, Types::get().training) == Py_False;
}

bool is_dataclass(PyObject* object) {
  PyObject* mro = Py_TYPE(object)->tp_mro;
  if (mro == nullptr) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); ++i) {
    PyObject* dict = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i))->tp_dict;
    if (dict != nullptr && PyDict_Contains(dict, Types::get().dataclass_fields) == 1) return true;
  }
  return false;
}

// Whether it is a class with attributes alone.
bool is_record(PyObject* object) {
  return Py_TYPE(object) == Types::get().namespace_ || is_dataclass(object);
}

bool is_generator(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPGeneratorClass));
}

// Whether a function looks at a global of this kind, one of its own file where it is a function.
bool is_looked_at(PyObject* object, PyObject* globals) {
  if (PyModule_Check(object) || PyType_Check(object) || PyCFunction_Check(object)) return false;
  if (PyFunction_Check(object)) return PyFunction_GET_GLOBALS(object) == globals;
  return THPVariable_Check(object) || is_module(object) || PyTuple_Check(object) ||
         PyList_Check(object) || PyDict_Check(object) || PyMethod_Check(object) ||
         Py_TYPE(object) == Types::get().partial || is_record(object) || is_generator(object);
}

// Asked where something differs alone, as it takes long. Attributes' names are a code's, too.
bool reads_global(PyCodeObject* code, PyObject* name) {
  return registered("checkpoint_rules")
      .attr("reads_global")(py::handle(reinterpret_cast<PyObject*>(code)), py::handle(name))
      .cast<bool>();
}

// torch's read nothing but arguments and what their modules have.
bool is_torchs(PyObject* function) {
  PyObject* module = PyFunction_GET_MODULE(function);
  Py_ssize_t size = 0;
  const char* name = module == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(module, &size);
  if (name == nullptr) PyErr_Clear();
  return name != nullptr && std::string_view(name, size).substr(0, 6) == "torch.";
}

py::object dict_of(PyObject* object) {
  auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
  if (!dict) PyErr_Clear();  // a class with slots has no dict
  return dict;
}

// Calls use(name, value) for the attributes of a record: those in its dict, and a dataclass's in
// slots. The record holds the values.
template <typename Use>
void for_each_attribute(PyObject* record, const Use& use) {
  PyObject *name, *value;
  Py_ssize_t position = 0;
  if (const py::object dict = dict_of(record)) {
    if (PyDict_GET_SIZE(dict.ptr()) > rules().largest) return;
    while (PyDict_Next(dict.ptr(), &position, &name, &value)) use(name, value);
  }
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(record));
  const auto fields =
      py::reinterpret_steal<py::object>(PyObject_GetAttr(type, Types::get().dataclass_fields));
  if (!fields) return PyErr_Clear();
  position = 0;
  while (PyDict_Next(fields.ptr(), &position, &name, &value)) {
    const auto slot = py::reinterpret_steal<py::object>(PyObject_GetAttr(type, name));
    if (!slot || Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) {
      PyErr_Clear();
      continue;
    }
    const auto held = py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(record, name));
    held ? use(name, held.ptr()) : PyErr_Clear();  // it may not be set
  }
}

// Wrapper subclasses, such as DTensor, have no memory of their own.
bool is_wrapper(const at::Tensor& tensor) {
  return !tensor.has_storage() || tensor.layout() != at::kStrided ||
         tensor.key_set().has(c10::DispatchKey::Python);
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return is_wrapper(tensor) ? nullptr : tensor.storage().unsafeGetStorageImpl();
}

WeakStorage weak_storage_of(const at::Tensor& tensor) {
  return weak_storage(is_wrapper(tensor) ? at::Tensor() : tensor);
}

void walk(const std::vector<PyObject*>& roots, TensorWalk& tensors) {
  for (PyObject* root : roots) tensors.visit(root);
}

// Of what lies in a storage of its own; 0 otherwise.
size_t layout_in_storage(const at::Tensor& tensor) {
  return is_wrapper(tensor) ? 0 : layout_of(tensor);
}

// `before` is the version in the forward, or nothing where another tensor was there, which
// `is_view` says shared its memory.
void add_change(PyObject* object, const std::string& name, std::optional<uint32_t> before,
                bool by_forward, bool is_view, std::vector<ChangedTensor>& changed) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const py::object change =
      registered("checkpoint_rules")
          .attr("change")(py::handle(object), name, before, version_of(tensor), by_forward);
  if (change.is_none()) return;
  const auto range = is_wrapper(tensor) ? ByteRange{0, 0} : ByteRange::of(tensor);
  const bool has_same_values = before == version_of(tensor) && !by_forward;
  changed.push_back({tensor.unsafeGetTensorImpl(), weak_storage_of(tensor), range, py::str(change),
                     has_same_values, is_view ? std::optional(layout_of(tensor)) : std::nullopt});
}

thread_local ReadObserver* observer = nullptr;  // the innermost of this thread

// Operators that read a tensor's shape alone.
bool reads_no_values(std::string_view name) {
  return begins_with_any(name, rules().shape_alone_beginnings) ||
         ends_with_any(name, rules().shape_alone_endings);
}

bool writes(const at::RecordFunction& operator_, size_t argument) {
  const auto schema = operator_.operator_schema();
  if (!schema || argument >= schema->arguments().size()) return false;
  const auto* alias = schema->arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

// Adds what an output holds: objects that live as long as it does.
void add_inside(PyObject* object, std::vector<PyObject*>& found) {
  if (PyTuple_Check(object) || PyList_Check(object)) {
    PyObject** items = PySequence_Fast_ITEMS(object);
    found.insert(found.end(), items, items + PySequence_Fast_GET_SIZE(object));
  } else if (PyDict_Check(object)) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value)) found.push_back(value);
  } else if (PyAnySet_Check(object)) {
    for (const py::handle item : py::reinterpret_borrow<py::object>(object)) {
      found.push_back(item.ptr());
    }
  } else if (is_record(object)) {
    for_each_attribute(object, [&](PyObject*, PyObject* value) { found.push_back(value); });
  }
}

}  // namespace

void for_each_tensor(PyObject* output, const std::function<void(PyObject*)>& use) {
  std::vector<PyObject*> pending = {output};
  std::unordered_set<PyObject*> seen;
  while (!pending.empty()) {
    PyObject* object = pending.back();
    pending.pop_back();
    if (THPVariable_Check(object)) {
      use(object);
    } else if (!is_plain(object) && seen.insert(object).second) {
      add_inside(object, pending);
    }
  }
}

void TensorWalk::visit(PyObject* object, PyObject* key, Py_ssize_t index,
                       std::optional<size_t> place) {
  if (object == nullptr || path_.size() > rules().deepest) return;
  path_.push_back({key, index, place ? *place : place_inside(key, index)});
  if (THPVariable_Check(object)) {
    visitor_(object);
  } else {
    visit_inside(object);
  }
  path_.pop_back();
}

size_t TensorWalk::place_inside(PyObject* key, Py_ssize_t index) {
  if (path_.empty()) return ++roots_;
  if (key == nullptr) return c10::get_hash(path_.back().place, index);
  // Others' hashes are the user's code.
  const bool is_plain_key = PyUnicode_CheckExact(key) || PyLong_CheckExact(key);
  return is_plain_key ? c10::get_hash(path_.back().place, PyObject_Hash(key))
                      : c10::get_hash(path_.back().place, static_cast<const void*>(key));
}

void TensorWalk::visit_inside(PyObject* object) {
  if (is_plain(object)) return;
  // Once each: objects that lead to each other would be visited along every path.
  if (!visited_.emplace(object, path_.back().place).second) return;
  const Types& types = Types::get();
  if (PyTuple_Check(object) || PyList_Check(object)) return visit_sequence(object);
  if (PyDict_Check(object)) return visit_dict(object);
  if (is_module(object)) return visit_module(object);
  if (PyFunction_Check(object)) return visit_function(object);
  if (PyMethod_Check(object)) {
    visit(PyMethod_GET_SELF(object));
    return visit(PyMethod_GET_FUNCTION(object));
  }
  if (Py_TYPE(object) == types.partial) {
    for (PyObject* name : {types.func, types.args, types.keywords}) {
      const auto part = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
      if (!part) throw py::error_already_set();
      visit(part.ptr());
    }
    return;
  }
  if (is_record(object)) {
    for_each_attribute(object, [&](PyObject* name, PyObject* value) { visit(value, name); });
  } else if (generators_ != nullptr && is_generator(object)) {
    generators_->push_back(reinterpret_cast<THPGenerator*>(object)->cdata);
  }
}

void TensorWalk::visit_sequence(PyObject* object) {
  if (PySequence_Fast_GET_SIZE(object) > rules().largest) return;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    visit(PySequence_Fast_GET_ITEM(object, i), nullptr, i);
  }
}

void TensorWalk::visit_dict(PyObject* dict) {
  if (PyDict_GET_SIZE(dict) <= rules().largest) visit_values(dict);
}

void TensorWalk::visit_values(PyObject* dict) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) visit(value, key);
}

void TensorWalk::visit_module(PyObject* module) {
  const py::object dict = dict_of(module);
  if (!dict) return;
  for (PyObject* name : {Types::get().parameters, Types::get().modules}) {
    PyObject* members = PyDict_GetItemWithError(dict.ptr(), name);
    if (members != nullptr && PyDict_Check(members)) visit_values(members);
  }
  PyObject* buffers = PyDict_GetItemWithError(dict.ptr(), Types::get().buffers);
  if (buffers != nullptr && PyDict_Check(buffers) && reads_its_buffers(module, dict.ptr())) {
    is_buffer_ = true;
    visit_values(buffers);
    is_buffer_ = false;
  }
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict.ptr(), &position, &name, &value)) {
    if (!is_plain(value) && PySet_Contains(Types::get().module_attributes, name) == 0) {
      visit(value, name);
    }
  }
  // Its class's, where it has no other one: that is among its attributes.
  const auto forward = py::reinterpret_steal<py::object>(
      PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(module)), Types::get().forward));
  if (!forward) PyErr_Clear();
  if (forward && PyFunction_Check(forward.ptr()) && !is_torchs(forward.ptr())) {
    visit(forward.ptr());
  }
}

void TensorWalk::visit_function(PyObject* function) {
  auto* code = reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(function));
  if (PyObject* cells = PyFunction_GET_CLOSURE(function)) {
    const auto names = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_freevars"));
    if (!names) throw py::error_already_set();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(cells); ++i) {
      visit_named(PyCell_GET(PyTuple_GET_ITEM(cells, i)), PyTuple_GET_ITEM(names.ptr(), i),
                  nullptr);
    }
  }
  visit(PyFunction_GET_DEFAULTS(function));
  visit(PyFunction_GET_KW_DEFAULTS(function));
  visit_globals(code, PyFunction_GET_GLOBALS(function));
}

// Also those that are named in what the function defines: comprehensions, lambdas.
void TensorWalk::visit_globals(PyCodeObject* code, PyObject* globals) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(code->co_names); ++i) {
    PyObject* name = PyTuple_GET_ITEM(code->co_names, i);
    PyObject* value = PyDict_GetItemWithError(globals, name);
    if (value != nullptr && !is_plain(value) && is_looked_at(value, globals))
      visit_named(value, name, code);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(code->co_consts); ++i) {
    PyObject* constant = PyTuple_GET_ITEM(code->co_consts, i);
    if (PyCode_Check(constant)) visit_globals(reinterpret_cast<PyCodeObject*>(constant), globals);
  }
}

void TensorWalk::visit_named(PyObject* object, PyObject* name, PyCodeObject* code) {
  if (object == nullptr || is_plain(object)) return;
  const size_t place = place_inside(name, -1);
  const auto seen = visited_.find(object);
  const auto before = names_(object, place, seen == visited_.end() ? place : seen->second);
  if (!before || (code != nullptr && !reads_global(code, name))) return visit(object, name);
  // Within such an object what has been visited stays so: names that lead to each other would be
  // followed along every path.
  if (of_another_ > 0) return visit(object, name, -1, before);
  std::unordered_map<PyObject*, size_t> visited;
  visited.swap(visited_);
  ++of_another_;
  visit(object, name, -1, before);
  --of_another_;
  visited.swap(visited_);
}

std::string TensorWalk::name() const {
  std::string name;
  for (const auto& [key, index, place] : path_) {
    if (index >= 0) name += "[" + std::to_string(index) + "]";
    if (key == nullptr) continue;
    if (!name.empty()) name += ".";
    name += py::str(key).cast<std::string>();
  }
  return name;
}

OutsideTensors::Noted OutsideTensors::Noted::of(const at::Tensor& tensor, size_t place) {
  return {tensor.unsafeGetTensorImpl(),
          weak_storage_of(tensor),
          layout_in_storage(tensor),
          version_of(tensor),
          tensor.requires_grad(),
          place,
          false};
}

bool OutsideTensors::Noted::is(const at::Tensor& other) const {
  return tensor == other.unsafeGetTensorImpl() &&
         (is_wrapper(other) ||
          (storage._unsafe_get_target() == storage_of(other) && layout == layout_of(other)));
}

bool OutsideTensors::Noted::is_as_it_was(const at::Tensor& other) const {
  // What autograd saves depends on what needs a gradient.
  return is(other) && version == version_of(other) && requires_grad == other.requires_grad();
}

const OutsideTensors::Noted* OutsideTensors::Cursor::at(size_t place) {
  if (next_ == noted_.size() || noted_[next_].place != place) {
    const auto found = std::find_if(noted_.begin(), noted_.end(),
                                    [&](const Noted& noted) { return noted.place == place; });
    if (found == noted_.end()) return nullptr;
    next_ = found - noted_.begin();
  }
  return &noted_[next_++];
}

const OutsideTensors::Noted* OutsideTensors::find(const at::Tensor& tensor,
                                                  const Noted* there) const {
  if (there != nullptr && there->is(tensor)) return there;
  const auto found = std::find_if(noted_.begin(), noted_.end(),
                                  [&](const Noted& noted) { return noted.is(tensor); });
  return found == noted_.end() ? nullptr : &*found;
}

TensorWalk::NameVisitor OutsideTensors::note_names() {
  names_.clear();
  return [this](PyObject* object, size_t place, size_t first) -> std::optional<size_t> {
    names_.push_back({place, object, first});
    return std::nullopt;
  };
}

std::vector<at::Generator> OutsideTensors::note(const std::vector<PyObject*>& roots) {
  std::vector<at::Generator> generators;
  TensorWalk tensors(
      [&](PyObject* tensor) {
        noted_.push_back(Noted::of(THPVariable_Unpack(tensor), tensors.place()));
        devices_.add(THPVariable_Unpack(tensor));
      },
      note_names(), &generators);
  walk(roots, tensors);
  return generators;
}

void OutsideTensors::leave_out_changes_of_forward(const std::vector<PyObject*>& roots) {
  Cursor before(noted_);
  size_t same_until = 0;  // most forwards change nothing
  std::vector<Noted> now;
  TensorWalk tensors(
      [&](PyObject* object) {
        const at::Tensor& tensor = THPVariable_Unpack(object);
        const Noted* const there = before.at(tensors.place());
        const Noted* const same = find(tensor, there);
        const bool is_same = same != nullptr && same == there && same->is_as_it_was(tensor);
        if (is_same && now.empty() && same == &noted_[same_until]) return void(++same_until);
        if (now.empty()) now.assign(noted_.begin(), noted_.begin() + same_until);
        now.push_back(Noted::of(tensor, tensors.place()));
        now.back().changed_by_forward =
            same == nullptr ? there != nullptr : !same->is_as_it_was(tensor);
      },
      note_names());
  walk(roots, tensors);
  if (now.empty()) {
    noted_.erase(noted_.begin() + same_until, noted_.end());
  } else {
    noted_ = std::move(now);
  }
}

OutsideTensors::Changes OutsideTensors::find_changed(const std::vector<PyObject*>& roots) const {
  std::vector<ChangedTensor> changed;
  std::vector<at::Generator> generators;
  Cursor before(noted_);
  size_t next = 0;  // most names come in the order in which they were noted
  // A variable and a global of one name have the same place.
  const auto was_another = [&](PyObject* object, size_t place, size_t) {
    const auto is_same = [&](const Name& name) {
      return name.place == place && name.object == object;
    };
    std::optional<size_t> first;
    if (next < names_.size() && is_same(names_[next])) {
      ++next;
      return first;
    }
    for (size_t i = 0; i < names_.size(); ++i) {
      if (names_[i].place != place) continue;
      if (is_same(names_[i])) {
        next = i + 1;
        return std::optional<size_t>();
      }
      if (!first) first = names_[i].first;
    }
    return first;
  };
  const auto compare = [&](PyObject* object, const TensorWalk& tensors) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    const Noted* const there = before.at(tensors.place());
    const auto add = [&](std::optional<uint32_t> version, bool by_forward, bool is_view = false) {
      add_change(object, tensors.name(), version, by_forward, is_view, changed);
    };
    if (there != nullptr && there->changed_by_forward) {
      if (tensors.is_buffer()) add(there->version, true);
      return;
    }
    const bool is_there = there != nullptr && there->is(tensor);
    const Noted* const same = find(tensor, there);
    if (same != nullptr && (is_there || !tensors.is_of_another())) {
      if (!same->changed_by_forward && !same->is_as_it_was(tensor)) add(same->version, false);
      return;
    }
    if (there == nullptr || is_wrapper(tensor)) return;
    const auto* storage = there->storage._unsafe_get_target();
    if (storage == nullptr) return;
    const bool is_view = storage == storage_of(tensor);
    if (!is_view || there->layout != layout_of(tensor)) add(std::nullopt, false, is_view);
  };
  TensorWalk tensors([&](PyObject* object) { compare(object, tensors); }, was_another, &generators);
  walk(roots, tensors);
  return {std::move(changed), std::move(generators)};
}

bool OutsideTensors::has(const at::Tensor& tensor) const {
  if (is_wrapper(tensor)) return false;
  const auto* storage = storage_of(tensor);
  return std::any_of(noted_.begin(), noted_.end(), [storage](const Noted& noted) {
    return !noted.changed_by_forward && noted.storage._unsafe_get_target() == storage;
  });
}

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
    const bool same = storage == nullptr
                          ? changed.tensor == tensor.unsafeGetTensorImpl()
                          : changed.storage._unsafe_get_target() == storage &&
                                (changed.layout ? *changed.layout == layout_of(tensor)
                                                : changed.range.overlaps(ByteRange::of(tensor)));
    const bool matters = !changed.has_same_values || at::GradMode::is_enabled();
    if (same && matters) change = &changed.description;
  }
  const auto position = region_ == nullptr ? std::nullopt : region_->stepped(tensor);
  if (change == nullptr && !position) return;
  if (reads_no_values(operator_.name()) || writes(operator_, argument)) return;
  reads_.push_back({operator_.name(), change == nullptr ? std::string() : *change, position,
                    Metadata::of(tensor)});
}

}  // namespace memsave_ext::checkpoint

#include "remat/modules.h"

namespace memsave_ext::remat {
namespace {

namespace py = pybind11;

// Of the function through which torch calls each module. Kept for good, as torch's modules are.
const PyObject* code_of_calls() {
  static const PyObject* const code = py::object(py::module_::import("torch.nn")
                                                     .attr("Module")
                                                     .attr("_wrapped_call_impl")
                                                     .attr("__code__"))
                                          .release()
                                          .ptr();
  return code;
}

PyFrameObject* as_frame(py::handle frame) { return reinterpret_cast<PyFrameObject*>(frame.ptr()); }

py::object code_of(py::handle frame) {
  return py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(as_frame(frame))));
}

py::object caller_of(py::handle frame) {
  return py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyFrame_GetBack(as_frame(frame))));
}

}  // namespace

Modules::~Modules() {
  const py::gil_scoped_acquire gil;
  places_.clear();
  model_ = {};
}

int32_t Modules::running() {
  const py::gil_scoped_acquire gil;
  if (model_) number_all();
  const PyObject* const calls = code_of_calls();
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (; frame; frame = caller_of(frame)) {
    if (code_of(frame).ptr() != calls) continue;
    const int32_t number = called_by(frame);
    if (number != kNoModule) return number;
  }
  return kNoModule;
}

// The number of the module whose call this frame is; kNoModule where it is none of the model's.
int32_t Modules::called_by(py::handle frame) const {
  const py::object module = frame.attr("f_locals")["self"];
  const auto found = numbers_.find(module.ptr());
  if (found == numbers_.end()) return kNoModule;
  // Another one may have the address of a module that is gone.
  return places_[found->second].module().is(module) ? found->second : kNoModule;
}

std::vector<std::string> Modules::names() {
  const py::gil_scoped_acquire gil;
  if (model_) number_all();
  std::vector<std::string> names;
  for (const Place& place : places_) {
    if (place.parent == kNoModule) {
      names.emplace_back();
      continue;
    }
    const std::string& parent = names[place.parent];
    const auto key = py::str(place.key).cast<std::string>();
    names.push_back(parent.empty() ? key : parent + "." + key);
  }
  return names;
}

void Modules::number_all() {
  const py::object model = std::exchange(model_, {});
  number(model, py::none(), kNoModule);
}

void Modules::number(py::handle module, py::handle key, int32_t parent) {
  const auto number = static_cast<int32_t>(places_.size());
  if (!numbers_.emplace(module.ptr(), number).second) return;
  places_.push_back({py::reinterpret_borrow<py::object>(key), parent, py::weakref(module)});
  const py::object parts = module.attr("_modules");
  if (PyDict_Check(parts.ptr())) {
    PyObject *name = nullptr, *part = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(parts.ptr(), &position, &name, &part)) {
      if (part != Py_None) this->number(part, name, number);
    }
    return;
  }
  for (const py::handle item : parts.attr("items")()) {  // of a scripted module
    const auto pair = py::reinterpret_borrow<py::tuple>(item);
    if (!pair[1].is_none()) this->number(pair[1], pair[0], number);
  }
}

}  // namespace memsave_ext::remat

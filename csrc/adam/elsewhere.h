// States that lie elsewhere between steps: memsave_ext/adam/elsewhere.py.
#pragma once

#include <c10/core/SafePyObject.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "adam/parameter.h"
#include "adam/snapshot.h"

namespace memsave_ext::adam {

// Whether some of the parameter's state may lie elsewhere.
inline bool lies_elsewhere(const Parameter& parameter) {
  const Group& group = *parameter.group;
  if (!group.place) return false;
  return std::any_of(std::begin(kStateNames), std::end(kStateNames), [&](const StateName& of) {
    const at::Tensor& tensor = parameter.state.*of.tensor;
    if (!tensor.defined() || of.tensor == &State::step) return false;
    return tensor.device() != parameter.local.device() ||
           static_cast<int64_t>(tensor.nbytes()) >= group.smallest_elsewhere;
  });
}

// While it lives, the parameter has its state here.
class Fetched {
 public:
  // Takes the GIL.
  explicit Fetched(Parameter& parameter) : parameter_(parameter), there_(parameter.state) {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::handle place = parameter.group->place->ptr(getPyInterpreter());
    const auto device =
        pybind11::reinterpret_steal<pybind11::object>(THPDevice_New(parameter.local.device()));
    pybind11::object fetched = place.attr("fetch")(dict_of(there_), device);
    read_state(pybind11::object(fetched.attr("state")).ptr(), parameter.state);
    fetched_.emplace(fetched.release().ptr(), getPyInterpreter());
  }
  ~Fetched() { parameter_.state = std::move(there_); }
  Fetched(const Fetched&) = delete;
  Fetched& operator=(const Fetched&) = delete;

  // Takes the GIL.
  void write_back() const {
    const pybind11::gil_scoped_acquire gil;
    pybind11::handle(fetched_->ptr(getPyInterpreter())).attr("write_back")();
  }

 private:
  Parameter& parameter_;
  State there_;
  std::optional<c10::SafePyObject> fetched_;
};

}  // namespace memsave_ext::adam

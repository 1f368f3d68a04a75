// Which of a model's modules runs, as the frames of Python tell it: nothing is put into a module.
#pragma once

#include <c10/util/flat_hash_map.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace memsave_ext::remat {

constexpr int32_t kNoModule = -1;

// Numbers a model's modules in the order of named_modules(), where a number is asked for first.
class Modules {
 public:
  // Called with the GIL, which the others take.
  explicit Modules(pybind11::object model) : model_(std::move(model)) {}
  ~Modules();
  Modules(const Modules&) = delete;
  Modules& operator=(const Modules&) = delete;

  // The innermost whose call this thread is in; kNoModule where it is in none.
  int32_t running();
  // By number, the model's own empty.
  std::vector<std::string> names();

 private:
  void number_all();
  void number(pybind11::handle module, pybind11::handle key, int32_t parent);
  int32_t called_by(pybind11::handle frame) const;

  pybind11::object model_;  // null once its modules are numbered
  ska::flat_hash_map<const PyObject*, int32_t> numbers_;
  struct Place {
    pybind11::object key;  // in the parent
    int32_t parent;        // its number
    pybind11::weakref module;
  };
  std::vector<Place> places_;
};

}  // namespace memsave_ext::remat

#include "adam/format_names.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "vector/dtype.h"

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

py::object option_of(const ParamRow& row) {
  return *row.name == 0 ? py::object(py::none()) : py::str(row.name);
}

}  // namespace

at::ScalarType scalar_type(Element element) {
  static_assert(Element::kFloat == static_cast<Element>(at::kFloat));
  TORCH_INTERNAL_ASSERT(element != Element::kNone);
  return static_cast<at::ScalarType>(element);
}

ParamFormat param_format_named(const py::handle& bf16) {
  const auto name = bf16.is_none() ? std::string() : bf16.cast<std::string>();
  for (int i = 0; i < kParamFormats; ++i) {
    if (name == kParamRows[i].name && bf16.is_none() == name.empty()) return ParamFormat{i};
  }
  throw py::value_error("bf16");
}

StateFormat state_format_named(const py::handle& state_dtype) {
  if (state_dtype.is_none()) return StateFormat::kAsParam;
  const bool is_dtype = THPDtype_Check(state_dtype.ptr());
  const auto type =
      is_dtype ? reinterpret_cast<THPDtype*>(state_dtype.ptr())->scalar_type : at::kByte;
  if (is_dtype && type == at::kFloat) return StateFormat::kAsParam;  // like None
  const auto name = is_dtype ? std::string() : state_dtype.cast<std::string>();
  for (int i = 0; i < kStateFormats; ++i) {
    const StateRow& known = kStateRows[i];
    if (!known.is_option || in_blocks(StateFormat{i}) == is_dtype) continue;
    if (is_dtype ? type == scalar_type(known.moments) : name == known.name) return StateFormat{i};
  }
  throw py::value_error("state_dtype");
}

py::list combinations() {
  py::list all;
  for (int i = 0; i < kCombinations; ++i) {
    const Combination c = Combination::at(i);
    if (!c.exists()) continue;
    all.append(py::make_tuple(vector::scalar_type_of(c.param), option_of(row(c.format)),
                              row(c.states).name, row(c.rule).name, c.closes));
  }
  return all;
}

}  // namespace memsave_ext::adam

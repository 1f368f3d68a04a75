#include "adam/format_names.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "vector/dtype.h"

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

py::object element_type(Element element) {
  return element == Element::kNone ? py::object(py::none()) : py::cast(scalar_type(element));
}

py::object option_of(const ParamRow& row) {
  return *row.name == 0 ? py::object(py::none()) : py::str(row.name);
}

py::object option_of(const StateRow& row) {
  switch (row.option) {
    case Option::kNone:
      break;
    case Option::kDtype:
      return element_type(row.moments);
    case Option::kName:
      return py::str(row.name);
  }
  return py::none();
}

py::list listed(DTypes dtypes) {
  py::list list;
  for (int i = 0; i < vector::kDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (dtypes & bit(dtype)) list.append(vector::scalar_type_of(dtype));
  }
  return list;
}

}  // namespace

at::ScalarType scalar_type(Element element) {
  static_assert(Element::kFloat == static_cast<Element>(at::kFloat));
  TORCH_INTERNAL_ASSERT(element != Element::kNone);
  return static_cast<at::ScalarType>(element);
}

ParamFormat param_format_named(const py::handle& bf16) {
  const auto name = bf16.is_none() ? std::string() : bf16.cast<std::string>();
  for (const ParamRow& known : kParamRows) {
    if (name == known.name && bf16.is_none() == name.empty()) return known.format;
  }
  throw py::value_error("bf16");
}

StateFormat state_format_named(const py::handle& state_dtype) {
  if (state_dtype.is_none()) return StateFormat::kAsParam;
  const bool is_dtype = THPDtype_Check(state_dtype.ptr());
  if (is_dtype) {
    const auto type = reinterpret_cast<THPDtype*>(state_dtype.ptr())->scalar_type;
    if (type == at::kFloat) return StateFormat::kAsParam;  // like None
    for (const StateRow& known : kStateRows) {
      if (known.option == Option::kDtype && type == scalar_type(known.moments)) return known.format;
    }
  } else {
    const auto name = state_dtype.cast<std::string>();
    for (const StateRow& known : kStateRows) {
      if (known.option == Option::kName && name == known.name) return known.format;
    }
  }
  throw py::value_error("state_dtype");
}

py::dict describe_formats() {
  py::list params, states, rules, combinations;
  for (const ParamRow& made : kParamRows) {
    params.append(py::make_tuple(option_of(made), element_type(made.low_part), made.at_random));
  }
  for (const StateRow& made : kStateRows) {
    states.append(py::make_tuple(made.name, option_of(made), element_type(made.moments),
                                 listed(made.params), made.at_random, made.amsgrad,
                                 made.codes.block, made.codes.bits, made.codes.ratio));
  }
  for (const RuleRow& made : kRuleRows) {
    rules.append(py::make_tuple(made.name, made.moments, made.folds));
  }
  for (int i = 0; i < kCombinations; ++i) {
    const Combination c = Combination::at(i);
    if (!c.exists()) continue;
    combinations.append(py::make_tuple(vector::scalar_type_of(c.param), option_of(row(c.format)),
                                       row(c.states).name, row(c.rule).name, c.closes));
  }
  py::dict all;
  all["params"] = params;
  all["states"] = states;
  all["rules"] = rules;
  all["combinations"] = combinations;
  return all;
}

}  // namespace memsave_ext::adam

// Names that Python uses, in place of numbers: those of rows, and of enums.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <iterator>
#include <string_view>

#include "adam/formats.h"

namespace memsave_ext::adam {

constexpr const char* name_of(const char* name) { return name; }
template <typename Row>
constexpr const char* name_of(const Row& row) {
  return row.name;
}

// Returns the enumerator whose place in `names`, which may be rows, has this name.
template <typename Enum, typename Names>
Enum named(const Names& names, std::string_view name, const char* what) {
  for (size_t i = 0; i < std::size(names); ++i) {
    if (name == name_of(names[i])) return static_cast<Enum>(i);
  }
  C10_THROW_ERROR(ValueError, c10::str(what, " ", name));
}

inline at::ScalarType scalar_type(Element element) {  // `element` must not be kNone
  static_assert(Element::kFloat == static_cast<Element>(at::kFloat));
  TORCH_INTERNAL_ASSERT(element != Element::kNone);
  return static_cast<at::ScalarType>(element);
}

}  // namespace memsave_ext::adam

// The rules of memsave_ext/checkpoint/rules.py, which the package hands over when it is imported.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace memsave_ext::checkpoint {

constexpr size_t kMostAutocastDevices = 8;

struct Rules {
  size_t deepest = 0;
  Py_ssize_t largest = 0;
  std::vector<std::string> shape_alone_beginnings, shape_alone_endings, fills_after_saving;
  std::vector<c10::DeviceType> autocast_devices;
};

inline Rules& rules() {
  static auto& all = *new Rules();  // regions outlive static destruction
  return all;
}

inline void give_rules(const pybind11::object& module) {
  using Texts = std::vector<std::string>;
  Rules& to = rules();
  to.deepest = module.attr("DEEPEST").cast<size_t>();
  to.largest = module.attr("LARGEST").cast<Py_ssize_t>();
  to.shape_alone_beginnings = module.attr("SHAPE_ALONE_BEGINNINGS").cast<Texts>();
  to.shape_alone_endings = module.attr("SHAPE_ALONE_ENDINGS").cast<Texts>();
  to.fills_after_saving = module.attr("FILLS_AFTER_SAVING").cast<Texts>();
  to.autocast_devices.clear();
  for (const auto& name : module.attr("AUTOCAST_DEVICES").cast<Texts>()) {
    to.autocast_devices.push_back(c10::Device(name).type());
  }
  TORCH_CHECK(to.autocast_devices.size() <= kMostAutocastDevices);
}

inline bool begins_with_any(std::string_view name, const std::vector<std::string>& beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(), [&](std::string_view beginning) {
    return name.substr(0, beginning.size()) == beginning;
  });
}

inline bool ends_with_any(std::string_view name, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(), [&](std::string_view end) {
    return name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
  });
}

}  // namespace memsave_ext::checkpoint

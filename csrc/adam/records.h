// What is remembered of states from step to step beside their tensors. The tensors are the keys,
// because hooks are removed, parameters are swapped and states are loaded.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "adam/ops.h"
#include "adam/rows.h"

namespace memsave_ext::adam {

class Records {
 public:
  // As adam_step(). First drops stale low parts.
  void step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

  // Begins a step of one parameter in rows, with the same care for param_low_part.
  std::unique_ptr<StepInRows> step_in_rows(const Parameter& parameter);

  // Zeroes a low part where the parameter has been written to since its last step and the low part
  // has not: it does not belong to the parameter's values any more. Both: local; it may be
  // undefined.
  void drop_stale_low_part(const at::Tensor& param, const at::Tensor& low_part) const;

 private:
  struct Versions {
    c10::weak_intrusive_ptr<c10::StorageImpl> low_part;  // keeps the address from being reused
    uint32_t of_param, of_low_part;
  };
  // Identifies a tensor: its storage and its offset there.
  using Place = std::pair<const c10::StorageImpl*, int64_t>;
  struct PlaceHash {
    size_t operator()(const Place& place) const {
      return std::hash<const void*>()(place.first) ^ static_cast<size_t>(place.second);
    }
  };

  static Place place_of(const at::Tensor& tensor);
  // Remembers the versions that a step has left.
  void note(const Parameter& parameter);

  std::unordered_map<Place, Versions, PlaceHash> versions_;  // by place of param_low_part
};

}  // namespace memsave_ext::adam

// What is known of states from step to step beyond their tensors. By the tensors: hooks go,
// parameters are swapped, and states are loaded.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "adam/step.h"

namespace memsave_ext::adam {

class Records {
 public:
  // As step_all(). What param_rest keeps of a parameter is dropped where the parameter has been
  // written to since its last step, and the rest has not been.
  void step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

  // Whether gradients are folded into its moments, which are packed then.
  bool is_folded(const State& state) const;
  // How many are.
  int64_t folded() const { return static_cast<int64_t>(folded_.size()); }
  void forget_folded() { folded_.clear(); }

 private:
  struct Versions {
    c10::weak_intrusive_ptr<c10::StorageImpl> rest;  // so that its address is nobody else's
    uint32_t of_param, of_rest;
  };
  // Of a tensor in a storage.
  using Place = std::pair<const c10::StorageImpl*, int64_t>;
  struct PlaceHash {
    size_t operator()(const Place& place) const {
      return std::hash<const void*>()(place.first) ^ static_cast<size_t>(place.second);
    }
  };

  static Place place_of(const at::Tensor& tensor);
  void drop_stale_rest(const Parameter& parameter) const;
  void note(const Parameter& parameter);

  std::unordered_map<Place, at::Tensor, PlaceHash> folded_;  // by exp_avg_sq, which is the value
  std::unordered_map<Place, Versions, PlaceHash> versions_;  // by param_rest
};

}  // namespace memsave_ext::adam

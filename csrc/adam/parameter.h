// A parameter on its way from the hook to the operator that steps it. Of a DTensor kernels step
// this process's local tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adam/state.h"
#include "adam/tensors.h"

namespace memsave_ext::adam {

class Backward;

// The processes over which a DTensor is split. Those of two are the same where `number` is.
struct Sharding {
  int64_t number = 0;  // 0: the whole parameter is in each process
  int64_t shards = 1;
};

// What a hook keeps about its parameter. It has no pointer to it: torch swaps tensors only where
// nothing else refers to them. Fields are read and written with the collector's mutex held, except
// `made_dict` and `reduced_by_ddp`, which are set from Python, and `has_local_gradient`, which the
// hook sets.
struct Entry {
  uint64_t snapshot = 0;  // number of the last used snapshot that has the parameter
  size_t position = 0;    // of the parameter in that snapshot
  // Number of the last step that the parameter took part in; 0 where there is none. Its gradient
  // may still be queued.
  uint64_t step = 0;
  uint64_t measured = 0;               // number of the last step whose norm pass measured it, or 0
  const Backward* waits_in = nullptr;  // the backward that has queued its gradient, or null
  bool made_dict = false;              // the hook's installation made the dict of Python hooks
  // DistributedDataParallel reduces the gradient and then hands it over; the hook itself only sets
  // has_local_gradient.
  bool reduced_by_ddp = false;
  bool has_local_gradient = false;   // it has one that DDP has not begun to reduce
  std::optional<Sharding> sharding;  // of a DTensor, once it has been asked for
};

// Returns the parameter's name for error messages.
std::string name_of(const Entry& entry, const at::Tensor& param);

struct Parameter {
  at::Tensor tensor;  // as it is in param_groups
  at::Tensor local;   // what is stepped: the local part of a DTensor, else `tensor`
  State state;        // of `local`; undefined where it has none yet
  const Group* group = nullptr;
  uint32_t position = 0;         // among the optimizer's parameters
  std::shared_ptr<Entry> entry;  // of its hook; null without a hook
  // A new state that is not in the optimizer's yet: a dict, of DTensors for a DTensor. Or null.
  std::shared_ptr<c10::SafePyObject> fresh;
  State before_fresh;  // `state` before that

  // Of `local`. Set by prepare(), for the next step; undefined for one in rows.
  at::Tensor grad;
};

// Whether `local` is a part of a DTensor.
inline bool is_dtensor(const Parameter& parameter) {
  return !parameter.local.is_same(parameter.tensor);
}

// Returns how a DTensor is split. Takes the GIL where it does not know.
Sharding sharding_of(const Parameter& parameter);

// A new state and its parameter.
struct FreshState {
  at::Tensor param;
  std::shared_ptr<c10::SafePyObject> state;
};

// Moves a state that is not in the optimizer's yet to `taken`, where the parameter has one.
void take_fresh(Parameter& parameter, std::vector<FreshState>& taken);

// Readies a parameter for a step with this gradient, and has its state made where it has none.
// Throws, and changes nothing, where the step cannot be made.
void prepare(Parameter& parameter, at::Tensor grad);

// Undoes prepare(), for a parameter that is not stepped after all.
void forget_prepared(Parameter& parameter);

}  // namespace memsave_ext::adam

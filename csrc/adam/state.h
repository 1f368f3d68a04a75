// The optimizer's state of a parameter: tensors that are kept between steps. An optimizer that is
// stepped by its own step() keeps its states itself, and these are undefined.
#pragma once

#include <ATen/core/Tensor.h>

#include "adam/kernels.h"

namespace memsave_ext::adam {

// What steps an optimizer's parameters.
enum class Algorithm {
  kAdam,
  kOwn,  // an optimizer that is not this package's: its own step(), in Python
};

// A parameter group's options, as they are during one step.
struct Group {
  Algorithm algorithm = Algorithm::kAdam;
  uint32_t position = 0;  // among the optimizer's groups
  Options options{};
  at::Tensor lr;  // of float; undefined where lr is a number or on the CPU, and in options
  bool step_on_device = false;                      // capturable or fused
  ParamFormat bf16 = ParamFormat::kPlain;           // of bfloat16 parameters
  StateFormat state_dtype = StateFormat::kAsParam;  // kAsParam: the parameter's type decides
  double max_grad_norm = 0;                         // of each parameter's gradient; 0: no clipping
};

// As torch keeps it: step is a scalar, on the CPU or the parameter's device. The scales are defined
// with moments in blocks alone; `moments`, in place of exp_avg and exp_avg_sq, where is_joint();
// param_low_part with ParamFormats that have one.
struct State {
  at::Tensor step, exp_avg, exp_avg_sq, max_exp_avg_sq, moments, exp_avg_scale, exp_avg_sq_scale,
      param_low_part;

  bool defined() const { return step.defined(); }

  // exp_avg, with exp_avg_sq where both are in one.
  const at::Tensor& first() const { return moments.defined() ? moments : exp_avg; }
};

struct StateName {
  const char* name;
  at::Tensor State::* tensor;
};

// The tensors of a state, in the order and under the names of the optimizer's state, which
// checkpoints have: param_rest is the parameter's low part.
inline constexpr StateName kStateNames[] = {
    {"step", &State::step},
    {"exp_avg", &State::exp_avg},
    {"exp_avg_sq", &State::exp_avg_sq},
    {"max_exp_avg_sq", &State::max_exp_avg_sq},
    {"moments", &State::moments},
    {"exp_avg_scale", &State::exp_avg_scale},
    {"exp_avg_sq_scale", &State::exp_avg_sq_scale},
    {"param_rest", &State::param_low_part},
};

// Returns a state of zeros. Without a state_dtype, moments are float for 16-bit parameters and of
// the parameter's type for others. Moments are in blocks only from kSmallestOfBlocks elements on,
// of a DTensor `whole` in the largest shard. `param` is its local part, else `whole` itself.
State make_state(const at::Tensor& param, const at::Tensor& whole, const Group& group);

constexpr int64_t kSmallestOfBlocks = 4096;

// Return how a parameter and its checked state are stored.
ParamFormat param_format(const at::Tensor& param, const Group& group);
StateFormat state_format(const at::Tensor& param, const State& state, const Group& group);

// Throws where a parameter cannot be stepped with this state.
void check_state(const at::Tensor& param, const State& state, const Group& group);

}  // namespace memsave_ext::adam

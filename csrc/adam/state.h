// What is kept of each parameter between steps, as tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "adam/kernels.h"

namespace memsave_ext::adam {

// A parameter group's options as they are during one step.
struct Group {
  Options options{};
  at::Tensor lr;  // where it lies on the parameters' device; else it is in options
  bool step_on_device = false;
  ParamFormat bf16 = ParamFormat::kPlain;           // of bfloat16 parameters
  StateFormat state_dtype = StateFormat::kAsParam;  // or kFloat, as the parameter's type says
  double max_grad_norm = 0;                         // of each parameter; 0: not clipped
};

// As torch keeps it: step is a scalar, on the CPU or the parameter's device. The scales belong to
// 8-bit moments, param_rest to ParamFormats that have one; undefined otherwise.
struct State {
  at::Tensor step, exp_avg, exp_avg_sq, max_exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, param_rest;

  bool defined() const { return step.defined(); }
};

struct StateName {
  const char* name;
  at::Tensor State::* tensor;
};

// In the order and under the names of the optimizer's state.
inline constexpr StateName kStateNames[] = {
    {"step", &State::step},
    {"exp_avg", &State::exp_avg},
    {"exp_avg_sq", &State::exp_avg_sq},
    {"max_exp_avg_sq", &State::max_exp_avg_sq},
    {"exp_avg_scale", &State::exp_avg_scale},
    {"exp_avg_sq_scale", &State::exp_avg_sq_scale},
    {"param_rest", &State::param_rest},
};

// Zeros. The moments in float for types of 16 bits, else in the parameter's, where the group does
// not say otherwise; 8 bits only from kSmallestOfBlocks elements on.
State make_state(const at::Tensor& param, const Group& group);

constexpr int64_t kSmallestOfBlocks = 4096;

// How a checked state is stored.
ParamFormat param_format(const at::Tensor& param, const Group& group);
StateFormat state_format(const at::Tensor& param, const State& state, const Group& group);

// Throws where a parameter cannot be stepped with this state.
void check_state(const at::Tensor& param, const State& state, const Group& group);

}  // namespace memsave_ext::adam

// The optimizer's state of a parameter: tensors that are kept between steps. An optimizer that is
// stepped by its own step() keeps its states itself, and these are undefined.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "adam/kernels.h"

namespace memsave_ext::adam {

// What steps an optimizer's parameters.
enum class Algorithm {
  kRule,  // a Rule, by kernels
  kOwn,   // an optimizer that is not this package's: its own step(), in Python
};

// A parameter group's options, as they are during one step.
struct Group {
  Algorithm algorithm = Algorithm::kRule;
  uint32_t position = 0;                    // among the optimizer's groups
  std::shared_ptr<c10::SafePyObject> dict;  // the group itself; null for the operator's
  Options options{};
  at::Tensor lr;  // of float; undefined where lr is a number or on the CPU, and in options
  ParamFormat bf16 = ParamFormat::kPlain;           // of bfloat16 parameters
  StateFormat state_dtype = StateFormat::kAsParam;  // kAsParam: the parameter's type decides
  double max_grad_norm = 0;                         // of each parameter's gradient; 0: no clipping
  // Where states lie between steps, a Place of memsave_ext/adam/place.py; null: beside the
  // parameters. On their device they do not where they have fewer bytes.
  std::shared_ptr<c10::SafePyObject> place;
  int64_t smallest_elsewhere = 0;
};

// As torch keeps it, the moments that the rule has: SGD's is momentum_buffer. step is a scalar, on
// the CPU or the parameter's device. The scales are defined with moments in blocks alone;
// `moments`, in place of exp_avg and exp_avg_sq, where is_joint(); param_low_part where the
// ParamFormat has one.
struct State {
  at::Tensor step, exp_avg, exp_avg_sq, max_exp_avg_sq, moments, exp_avg_scale, exp_avg_sq_scale,
      momentum_buffer, momentum_buffer_scale, param_low_part;

  bool defined() const { return step.defined() || first().defined() || param_low_part.defined(); }

  // The first moment, with the second where both are in one.
  const at::Tensor& first() const {
    if (moments.defined()) return moments;
    return momentum_buffer.defined() ? momentum_buffer : exp_avg;
  }
  const at::Tensor& first_scale() const {
    return momentum_buffer.defined() ? momentum_buffer_scale : exp_avg_scale;
  }
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
    {"momentum_buffer", &State::momentum_buffer},
    {"momentum_buffer_scale", &State::momentum_buffer_scale},
    {"param_rest", &State::param_low_part},
};

// Return how a parameter and its checked state are stored.
ParamFormat param_format(const at::Tensor& param, const Group& group);
StateFormat state_format(const at::Tensor& param, const State& state, const Group& group);

// Throws where this build has no kernels for a device.
void check_device(c10::Device device);

// Throws where the gradient is not strided, for example sparse. rule: whose error it is.
void check_dense(const at::Tensor& grad, Rule rule = Rule::kAdam);

// Whether kernels can step a parameter with this gradient and state. `grad` is undefined where its
// rows come one after the other. Throws where there is no memory that they could read.
bool can_step(const at::Tensor& param, const at::Tensor& grad, const State& state,
              const Group& group);

// Throws the error that memsave_ext/adam/states.py has for a parameter that kernels cannot step.
// Takes the GIL.
[[noreturn]] void throw_misfit(const at::Tensor& param, const at::Tensor& grad, const State& state,
                               const Group& group);

// Returns the tensors that are defined, by their names. Needs the GIL.
pybind11::dict dict_of(const State& state);

// Reads the tensors of a dict of the optimizer's state; of DTensors the local ones. Needs the GIL.
void read_state(PyObject* dict, State& state);

}  // namespace memsave_ext::adam

// Every difference between the supported torch (2.11 to 2.15) and Python (3.10 to 3.13) versions.
//
// Internals of torch that look the same in all of them, by who relies on them. Look there first
// where a new version compiles and fails.
// - remat/block: thread-local RecordFunction callbacks, with inputs and outputs, nested
//   as operators are dispatched; autograd's keys are excluded below autograd.
// - remat/operators, recompute: OperatorHandle::callBoxed, schemas' alias_info, at::Tag, and
//   hasKernelForDispatchKey.
// - remat/content, block, saved: VariableVersion, weak references to a StorageImpl, and
//   make_tensor<TensorImpl>(VIEW, storage, keys, dtype).
// - checkpoint/hooks: set_default_engine_stub, get_default_saved_variable_hooks, and the
//   stack of SavedTensorDefaultHooks.
// - remat, adam, memory: get_current_graph_task_id().
#pragma once

#include <Python.h>
#include <torch/version.h>

// Whether Engine has get_node_creation_hooks, which an engine that wraps another must forward.
#define MEMSAVE_EXT_HAS_NODE_CREATION_HOOKS (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15)

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13
#include <torch/csrc/autograd/node.h>
#else
#include <torch/csrc/autograd/function.h>

#include <memory>
#endif

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace memsave_ext {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;

template <typename T, typename... Args>
c10::intrusive_ptr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}
#else
using NodePtr = std::shared_ptr<torch::autograd::Node>;

// deleteNode frees long chains of nodes without recursion.
template <typename T, typename... Args>
std::shared_ptr<T> make_node(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

// Where the captured state of a CUDA generator draws from: an at::CUDAGeneratorState, of which only
// builds with CUDA have the header. From torch 2.12 on it has such a place for each capture.
template <typename State, typename Scalar>
auto set_captured_place(State& state, unsigned long long capture, const Scalar& seed,
                        const Scalar& offset, uint64_t place)
    -> decltype(void(state.capture_states_)) {
  auto& captured = state.capture_states_[capture];
  using Captured = typename std::remove_reference_t<decltype(captured)>::element_type;
  captured = c10::make_intrusive<Captured>();
  captured->rng_state_seed_extragraph_ = seed;
  captured->rng_state_offset_extragraph_ = offset;
  captured->offset_intragraph_ = place;
}

template <typename State, typename Scalar>
auto set_captured_place(State& state, unsigned long long, const Scalar& seed, const Scalar& offset,
                        uint64_t place) -> decltype(void(state.capturing_)) {
  state.capturing_ = true;
  state.seed_extragraph_ = seed;
  state.offset_extragraph_ = offset;
  state.offset_intragraph_ = place;
}

// The instruction a frame is at. It tells two calls on one line apart where Python reports it.
inline int frame_instruction(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

// The line of that instruction.
inline int instruction_line(PyCodeObject* code, int instruction) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyCode_Addr2Line(code, instruction);
#else
  (void)code;
  return instruction;
#endif
}

}  // namespace memsave_ext

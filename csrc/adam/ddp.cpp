#include "adam/ddp.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "adam/backward.h"
#include "adam/given.h"
#include "adam/stepper.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

// The reducer registers its hook on the accumulator as a LambdaPostHook.
bool is_reduced_by_ddp(const NodePtr& accumulator) {
  if (!accumulator) return false;
  for (const auto& hook : accumulator->post_hooks()) {
    if (dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get())) return true;
  }
  return false;
}

void hand_to_ddp(const Stepper& stepper, const py::list& params, bool enabled) {
  for (const py::handle param : params) {
    if (const auto entry = stepper.entry_of(param)) entry->reduced_by_ddp = enabled;
  }
}

std::shared_ptr<Backward> begin_reduced(Stepper& stepper, const py::list& params) {
  std::vector<std::shared_ptr<Entry>> entries;
  std::vector<Tensor> tensors;
  for (const py::handle param : params) {
    entries.push_back(stepper.entry_of(param));
    tensors.push_back(THPVariable_Unpack(param.ptr()));
  }
  const OpenBlocks& blocks = stepper.blocks();
  if (blocks.any(Block::kKeep)) throw_error("keeps_reduced");
  if (blocks.any(Block::kDrop)) return nullptr;
  const py::gil_scoped_release no_gil;
  auto backward = stepper.backwards().begin(stepper);
  if (blocks.any(Block::kAccumulate) || (backward && backward->action() == GradientAction::kKeep)) {
    throw_error("accumulates_reduced");
  }
  const std::lock_guard<std::mutex> lock(stepper.mutex());
  stepper.open_step().check(Event::kUseGradient);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i]) continue;
    stepper.open_step().check_use(*entries[i], tensors[i]);
    entries[i]->has_local_gradient = false;
  }
  return backward;
}

void step_reduced(const Stepper& stepper, const std::shared_ptr<Backward>& backward,
                  const py::list& params, const py::list& grads) {
  if (!backward) return;  // see begin_reduced()
  std::vector<std::shared_ptr<Entry>> entries;
  std::vector<Tensor> of_entries;
  for (size_t i = 0; i < py::len(grads); ++i) {
    if (auto entry = stepper.entry_of(params[i])) {
      entries.push_back(std::move(entry));
      of_entries.push_back(THPVariable_Unpack(grads[i].ptr()));
    }
  }
  const py::gil_scoped_release no_gil;
  backward->step_reduced(entries, of_entries);
}

}  // namespace memsave_ext::adam

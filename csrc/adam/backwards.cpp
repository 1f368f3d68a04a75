#include "adam/backwards.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "adam/backward.h"
#include "adam/given.h"
#include "adam/stepper.h"

namespace memsave_ext::adam {

// Locks only the weak pointer that it returns: a strong one to another backward could be the last,
// and destroy it with the mutex held.
std::shared_ptr<Backward> Backwards::current() const {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  for (const auto& [of_task, backward] : by_task_) {
    if (of_task == task) return backward.lock();
  }
  return nullptr;
}

std::shared_ptr<Backward> Backwards::begin(Stepper& stepper) {
  const int64_t graph_task = torch::autograd::get_current_graph_task_id();
  if (graph_task == -1) return nullptr;
  {
    const std::lock_guard<std::mutex> lock(stepper.mutex());
    if (auto backward = current()) return backward;
  }
  const GradientAction action = stepper.next_action();
  std::shared_ptr<Backward> backward;
  while (!backward) {
    std::shared_ptr<Snapshot> taken, other;  // declared here so that none dies with the mutex held
    uint64_t ended;
    {
      const std::lock_guard<std::mutex> lock(stepper.mutex());
      taken = snapshot_.lock();  // of a backward that runs, an outer one for example
      ended = ended_;
    }
    if (!taken) taken = stepper.take_snapshot();
    if (!taken) return nullptr;
    const std::lock_guard<std::mutex> lock(stepper.mutex());
    if (auto of_another_devices_thread = current()) return of_another_devices_thread;
    other = snapshot_.lock();
    if (other) {  // another thread's backward has begun meanwhile: both share its snapshot
      taken.swap(other);
    } else if (ended != ended_) {  // one has ended, and `taken` may lack the states that it made
      continue;
    } else {
      use_snapshot(taken);
    }
    backward = std::make_shared<Backward>(stepper.shared_from_this(), taken, action);
    ++running_;
    by_task_.erase(std::remove_if(by_task_.begin(), by_task_.end(),
                                  [](const auto& of) { return of.second.expired(); }),
                   by_task_.end());
    by_task_.emplace_back(graph_task, backward);
  }
  // The callback has the only lasting reference: where the graph task fails, the backward is
  // destroyed unfinished.
  torch::autograd::Engine::get_default_engine().queue_callback([backward] { backward->finish(); });
  return backward;
}

void Backwards::end_one() {
  ++ended_;
  // Backwards that still run may have states in it that are not published yet.
  if (--running_ == 0) snapshot_.reset();
}

void Backwards::check_none(const char* call) const {
  if (running_ > 0) throw_error("backward_runs", call);
}

void Backwards::use_snapshot(const std::shared_ptr<Snapshot>& snapshot) {
  snapshot_ = snapshot;
  snapshot->number = ++snapshots_;
  for (size_t i = 0; i < snapshot->parameters.size(); ++i) {
    const auto& entry = snapshot->parameters[i].entry;
    if (!entry) continue;
    entry->snapshot = snapshot->number;
    entry->position = i;
  }
}

}  // namespace memsave_ext::adam

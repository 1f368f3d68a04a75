#include "memory/active.h"

#include "locks.h"

#ifndef _WIN32
#include <pthread.h>
#endif

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <utility>

namespace memsave_ext::memory {
namespace py = pybind11;
namespace {

struct ByDevice {
  bool operator()(c10::Device a, c10::Device b) const {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  }
};

std::vector<Listener*> active;
auto& moved = *new std::map<c10::Device, int64_t, ByDevice>();  // bytes that lie elsewhere
std::atomic<int> active_count{0};
std::atomic<int> stack_count{0};
// Called with the GIL; null without. It is leaked at exit, when Python may be gone.
std::atomic<py::object*> recompute_listener{nullptr};

bool watching() { return active_count.load(std::memory_order_relaxed) > 0; }

void set_counts() {
  active_count = static_cast<int>(active.size());
  stack_count = static_cast<int>(std::count_if(active.begin(), active.end(),
                                               [](Listener* one) { return one->takes_stacks(); }));
}

// The moment for this listener; asked for once for all of them.
const Moment& moment_for(const Listener& listener, Moment& moment) {
  if (moment.time == 0 && listener.hears_moments()) moment = Moment::now();
  return moment;
}

void observe_recompute(checkpoint::Again what, bool begins) {
  const Moment moment = Moment::now();
  {
    const std::lock_guard<Lock> lock(tracking_mutex());
    for (Listener* listener : active) listener->recompute(moment, what, begins);
  }
  if (recompute_listener.load(std::memory_order_relaxed) != nullptr) {
    const py::gil_scoped_acquire gil;
    const py::error_scope raised;  // a recompute may end with an exception
    try {
      if (const py::object* listener = recompute_listener)
        (*listener)(what == checkpoint::Again::kRegion, begins);
    } catch (py::error_already_set& error) {
      // Destructors call this. An interrupt comes again, where Python can raise it.
      if (error.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();
      } else {
        error.discard_as_unraisable("memsave_ext: a listener to recomputes");
      }
    }
  }
}

void set_observer() {
  const bool observed = recompute_listener.load() != nullptr ||
                        std::any_of(active.begin(), active.end(),
                                    [](Listener* one) { return one->hears_recomputes(); });
  checkpoint::recompute_observer = observed ? &observe_recompute : nullptr;
}

void lock_all() {
  tracking_mutex().lock();
  large_memory_mutex().lock();
}

void unlock_all() {
  large_memory_mutex().unlock();
  tracking_mutex().unlock();
}

}  // namespace

void survive_forks() {
#ifndef _WIN32
  static const int installed = pthread_atfork(lock_all, unlock_all, [] {
    active.clear();
    set_counts();
    checkpoint::recompute_observer = nullptr;
    unlock_all();
  });
  (void)installed;
#endif
}

Lock& tracking_mutex() {
  static auto* mutex = new Lock(LockOrder::kTracking);  // outlives every thread that frees memory
  return *mutex;
}

Lock& large_memory_mutex() {
  static auto* mutex = new Lock(LockOrder::kLargeMemory);
  return *mutex;
}

Moment Moment::now() {
  Moment moment{static_cast<int32_t>(at::RecordFunction::currentThreadId()), 0,
                std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::steady_clock::now().time_since_epoch())
                    .count(),
                kNotInBackward};
  if (torch::autograd::get_current_graph_task_id() == -1) return moment;
  moment.node = kNoNode;
  const auto node = torch::autograd::get_current_node();
  // AccumulateGrad has the largest sequence number; it belongs to no forward.
  if (node != nullptr && node->sequence_nr() != std::numeric_limits<uint64_t>::max()) {
    moment.node = static_cast<int64_t>(node->sequence_nr());
    moment.node_thread = static_cast<int32_t>(node->thread_id());
  }
  return moment;
}

void add_active(Listener* listener) {
  survive_forks();
  active.push_back(listener);
  set_counts();
  set_observer();
}

void remove_active(Listener* listener) {
  active.erase(std::remove(active.begin(), active.end(), listener), active.end());
  set_counts();
  set_observer();
}

void listen_to_recomputes(std::optional<py::object> listener) {
  py::object* before =
      recompute_listener.exchange(listener ? new py::object(std::move(*listener)) : nullptr);
  {
    const std::lock_guard<Lock> lock(tracking_mutex());
    set_observer();
  }
  delete before;
}

bool any_active(c10::DeviceType type) {
  return std::any_of(active.begin(), active.end(),
                     [&](Listener* one) { return one->device().type() == type; });
}

void report_allocated(c10::Device device, void* ptr, int64_t size, std::optional<int64_t> total) {
  if (!watching() || paused_depth > 0) return;
  std::shared_ptr<const Origin> origin;
  if (stack_count.load(std::memory_order_relaxed) > 0)
    origin = device.is_cpu() ? origin_here() : origin_of_operator();
  TrackingLock lock;
  Moment moment{};
  for (Listener* listener : active) {
    if (listener->device() != device) continue;
    listener->allocated(moment_for(*listener, moment), ptr, size, total, origin, lock);
  }
}

void report_freed(c10::Device device, void* ptr, std::optional<int64_t> total) {
  if (!watching()) return;
  // What is freed counts also while allocations do not: Python's garbage collector may do it at any
  // time. The allocator's total then has what does not count.
  if (paused_depth > 0) total.reset();
  const std::lock_guard<Lock> lock(tracking_mutex());
  Moment moment{};
  for (Listener* listener : active) {
    if (listener->device() != device) continue;
    listener->freed(moment_for(*listener, moment), ptr, total);
  }
}

int64_t moved_bytes(c10::Device device) { return moved[device]; }

void report_moved(c10::Device device, int64_t bytes) {
  const std::lock_guard<Lock> lock(tracking_mutex());
  const int64_t now = moved[device] += bytes;
  Moment moment{};
  for (Listener* listener : active) {
    if (listener->device() != device) continue;
    listener->moved(moment_for(*listener, moment), now);
  }
}

}  // namespace memsave_ext::memory

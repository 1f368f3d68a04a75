#include "memory/active.h"

#ifndef _WIN32
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "checkpoint/recomputing.h"
#include "memory/pause.h"

namespace memsave_ext::memory {
namespace py = pybind11;
namespace {

std::vector<Log*> active;
std::vector<Count*> counts;
std::atomic<int> active_count{0};
std::atomic<int> stack_count{0};
// Called with the GIL; null without. It is leaked at exit, when Python may be gone.
std::atomic<py::object*> recompute_listener{nullptr};

bool watching() { return active_count.load(std::memory_order_relaxed) > 0 && paused_depth == 0; }

void set_counts() {
  active_count = static_cast<int>(active.size() + counts.size());
  stack_count = static_cast<int>(
      std::count_if(active.begin(), active.end(), [](const Log* log) { return log->stacks(); }));
}

void observe_recompute(checkpoint::Again what, bool begins) {
  const EventContext context = EventContext::now();
  const Phase phase =
      what == checkpoint::Again::kRegion ? Phase::kRecompute : Phase::kRematerialize;
  {
    const std::lock_guard<std::mutex> lock(tracking_mutex());
    for (Log* log : active) {
      if (begins)
        log->threads().begin_recompute(context, phase);
      else
        log->threads().end_recompute(context);
    }
  }
  if (recompute_listener.load(std::memory_order_relaxed) != nullptr) {
    const py::gil_scoped_acquire gil;
    const py::error_scope raised;  // a recompute may end with an exception
    if (const py::object* listener = recompute_listener)
      (*listener)(what == checkpoint::Again::kRegion, begins);
  }
}

void set_observer() {
  const bool observed = !active.empty() || recompute_listener.load() != nullptr;
  checkpoint::recompute_observer = observed ? &observe_recompute : nullptr;
}

// Installs fork handlers. Without them, a child that is forked while another thread holds the mutex
// would wait for it forever. What the child allocates is not tracked.
void survive_forks() {
#ifndef _WIN32
  static const int installed =
      pthread_atfork([] { tracking_mutex().lock(); }, [] { tracking_mutex().unlock(); },
                     [] {
                       active.clear();
                       counts.clear();
                       set_counts();
                       checkpoint::recompute_observer = nullptr;
                       tracking_mutex().unlock();
                     });
  (void)installed;
#endif
}

}  // namespace

std::mutex& tracking_mutex() {
  static auto* mutex = new std::mutex;  // outlives every thread that frees memory
  return *mutex;
}

void add_active(Log* log) {
  survive_forks();
  active.push_back(log);
  set_counts();
  set_observer();
}

void add_active(Count* count) {
  survive_forks();
  counts.push_back(count);
  set_counts();
}

void remove_active(Count* count) {
  counts.erase(std::remove(counts.begin(), counts.end(), count), counts.end());
  set_counts();
}

void remove_active(Log* log) {
  active.erase(std::remove(active.begin(), active.end(), log), active.end());
  set_counts();
  set_observer();
}

void listen_to_recomputes(std::optional<py::object> listener) {
  py::object* before =
      recompute_listener.exchange(listener ? new py::object(std::move(*listener)) : nullptr);
  {
    const std::lock_guard<std::mutex> lock(tracking_mutex());
    set_observer();
  }
  delete before;
}

bool any_active(c10::DeviceType type) {
  const auto is_of_type = [&](const auto* one) { return one->device().type() == type; };
  return std::any_of(active.begin(), active.end(), is_of_type) ||
         std::any_of(counts.begin(), counts.end(), is_of_type);
}

void report_allocated(c10::Device device, void* ptr, int64_t size, std::optional<int64_t> total) {
  if (!watching()) return;
  EventContext context = EventContext::now();
  if (stack_count.load(std::memory_order_relaxed) > 0) {
    context.origin = device.is_cpu() ? origin_here() : origin_of_operator();
  }
  TrackingLock lock;
  for (Log* log : active)
    if (log->device() == device) log->allocated(context, ptr, size, total, lock);
  for (Count* count : counts)
    if (count->device() == device) count->allocated(ptr, size);
}

void report_freed(c10::Device device, void* ptr, std::optional<int64_t> total) {
  if (!watching()) return;
  const EventContext context = EventContext::now();
  const std::lock_guard<std::mutex> lock(tracking_mutex());
  for (Log* log : active)
    if (log->device() == device) log->freed(context, ptr, total);
  for (Count* count : counts)
    if (count->device() == device) count->freed(ptr);
}

}  // namespace memsave_ext::memory

#include "memory/tracker.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>

#include "memory/active.h"
#include "memory/cpu_allocator.h"
#include "memory/cuda_reports.h"
#include "memory/stacks.h"

namespace memsave_ext::memory {

Tracker::Tracker(at::Device device, std::vector<int32_t> parents, bool stacks, int64_t max_events)
    : log_(device, std::move(parents), stacks, max_events) {}

Tracker::~Tracker() {
  TrackingLock lock;
  if (!running_) return;
  remove_active(&log_);
  if (log_.device().is_cpu() && !any_active(c10::DeviceType::CPU)) unwatch_cpu_allocator();
}

void Tracker::start(std::optional<int64_t> total) {
  TORCH_INTERNAL_ASSERT(!running_);  // memsave_ext/memory/tracking.py refuses it
  TrackingLock lock;
  if (log_.device().is_cpu())
    watch_cpu_allocator();
  else
    watch_cuda_reports();
  if (log_.takes_stacks()) watch_operators(takes_stacks_of_operators());
  log_.threads().clear();
  log_.begin_part(total);
  add_active(&log_);
  running_ = true;
}

void Tracker::stop() {
  TORCH_INTERNAL_ASSERT(running_);
  TORCH_CHECK(log_.device().is_cpu() || watches_cuda_reports(),
              "memory tracking of a CUDA device cannot stop: it was not started on this thread");
  TrackingLock lock;
  log_.look(lock);
  remove_active(&log_);
  log_.threads().clear();
  running_ = false;
  if (log_.takes_stacks()) unwatch_operators(takes_stacks_of_operators());
  if (!log_.device().is_cpu())
    unwatch_cuda_reports();
  else if (!any_active(c10::DeviceType::CPU))
    unwatch_cpu_allocator();
}

void Tracker::enter_module(int32_t module) {
  const EventContext context = EventContext::now();
  TrackingLock lock;
  if (!log_.threads().inside_module(context)) log_.look(lock);
  log_.threads().enter_module(context, module, at::sequence_number::peek());
}

void Tracker::exit_module(int32_t module) {
  const EventContext context = EventContext::now();
  TrackingLock lock;
  log_.threads().exit_module(context, module, at::sequence_number::peek());
}

bool Tracker::inside_module() const {
  TrackingLock lock;
  return log_.threads().inside_module(EventContext::now());
}

void Tracker::begin_optimizer() {
  TrackingLock lock;
  log_.look(lock);
  const EventContext context = EventContext::now();
  log_.threads().begin_optimizer(context);
  log_.mark_phase(context);
}

void Tracker::end_optimizer(bool step) {
  TrackingLock lock;
  log_.look(lock);
  const EventContext context = EventContext::now();
  log_.threads().end_optimizer(context);
  log_.mark_phase(context);
  if (step) log_.end_step();
}

void Tracker::end_step() {
  TrackingLock lock;
  log_.look(lock);
  log_.end_step();
}

void Tracker::label(const std::vector<at::Tensor>& tensors, int64_t category,
                    const std::vector<int32_t>& names) {
  TORCH_CHECK(names.size() == tensors.size(), "one name for each tensor");
  TrackingLock lock;
  for (size_t i = 0; i < tensors.size(); ++i)
    log_.label(tensors[i], static_cast<Category>(category), names[i]);
}

int64_t Tracker::live() {
  TrackingLock lock;
  look_if_running(lock);
  return log_.live();
}

int64_t Tracker::peak() {
  TrackingLock lock;
  return log_.peak();
}

void Tracker::reset_peak() {
  TrackingLock lock;
  look_if_running(lock);
  log_.reset_peak();
}

std::shared_ptr<Record> Tracker::record() {
  const PauseTracking paused;
  TrackingLock lock;
  look_if_running(lock);
  return std::make_shared<Record>(log_);
}

void Tracker::look_if_running(TrackingLock& lock) {
  if (running_) log_.look(lock);
}

}  // namespace memsave_ext::memory

// A log that can be started and stopped, with the methods that the Python hooks call.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/log.h"
#include "memory/record.h"

namespace memsave_ext::memory {

class Tracker {
 public:
  Tracker(at::Device device, std::vector<int32_t> parents, bool stacks, int64_t max_events);
  ~Tracker();
  Tracker(const Tracker&) = delete;
  Tracker& operator=(const Tracker&) = delete;

  // `total`: live bytes by the allocator's own count (CUDA); nullopt on the CPU.
  void start(std::optional<int64_t> total);
  void stop();

  void enter_module(int32_t module);
  void exit_module(int32_t module);
  void begin_optimizer();
  // `step`: whether a training step ends with it.
  void end_optimizer(bool step);
  void end_step();
  bool inside_module() const;
  void label(const std::vector<at::Tensor>& tensors, int64_t category,
             const std::vector<int32_t>& names);

  int64_t live();
  int64_t peak();
  void reset_peak();
  std::shared_ptr<Record> record();

 private:
  // What is freed once tracking has ended does not count.
  void look_if_running(TrackingLock& lock);
  bool takes_stacks_of_operators() const { return !log_.device().is_cpu(); }

  Log log_;
  bool running_ = false;
};

}  // namespace memsave_ext::memory

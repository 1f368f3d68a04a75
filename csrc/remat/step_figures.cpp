#include <utility>

#include "remat/step.h"

namespace memsave_ext::remat {

bool Step::is_newly_short() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return plan_ != nullptr && least_ > bytes_ && !std::exchange(followed_->told, true);
}

int64_t Step::before() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return before_;
}

std::vector<int64_t> Step::curve() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return curve_;
}

int64_t Step::peak() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peak_;
}

int64_t Step::budget() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

int64_t Step::least() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return least_;
}

std::optional<Plan> Step::plan() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return plan_ == nullptr ? std::nullopt : std::optional(*plan_);
}

Trace Step::trace() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return trace_;
}

std::shared_ptr<const Known> Step::followed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return followed_;
}

}  // namespace memsave_ext::remat

#include "store/store.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "locks.h"

namespace memsave_ext::store {
namespace {

Lock trash_mutex{LockOrder::kTrash};
auto& trash = *new std::vector<std::shared_ptr<Away>>();  // outlives static destruction
std::atomic<bool> any_trash{false};

// What was copied before counts so much less with each copy.
constexpr double kForgotten = 0.99;

}  // namespace

void discard(std::shared_ptr<Away> away) {
  if (!away) return;
  away->cancel();
  const std::lock_guard<Lock> lock(trash_mutex);
  trash.push_back(std::move(away));
  any_trash = true;
}

void empty_trash() {
  if (!any_trash.load(std::memory_order_relaxed)) return;
  std::vector<std::shared_ptr<Away>> gone;
  {
    const std::lock_guard<Lock> lock(trash_mutex);
    gone.swap(trash);
    any_trash = false;
  }
  for (const auto& away : gone) {
    try {
      (void)away->take_source();  // one that waits is not copied any more
    } catch (const std::exception&) {
      // The device has failed, of which others will tell: destructors call this.
    }
  }
}

void Meter::add(int64_t bytes, double seconds) {
  const std::lock_guard<Lock> lock(mutex_);
  bytes_ = kForgotten * bytes_ + static_cast<double>(bytes);
  seconds_ = kForgotten * seconds_ + seconds;
}

double Meter::bytes_per_second() const {
  const std::lock_guard<Lock> lock(mutex_);
  return bytes_ / std::max(seconds_, 1e-9);
}

}  // namespace memsave_ext::store

// What a step does with a plan: it chooses one of the step that it repeats, and decides by it.
#include <algorithm>
#include <utility>

#include "remat/step.h"

namespace memsave_ext::remat {

Choice Step::decide(Content& content) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_) return {bytes_ > 0 ? Drops::kUntilFull : Drops::kCheap, true};
  const int32_t number = number_of(content);
  trace_.contents[number].saved = true;
  keys_.push_back(hash_);
  if (keys_.size() == 1) before_ = shared_->count.before();
  const bool follows = followed_ && keys_.size() <= followed_->keys.size() &&
                       followed_->keys[keys_.size() - 1] == hash_;
  if (!follows) find();
  if (plan_ == nullptr) return {bytes_ > 0 ? Drops::kUntilFull : Drops::kCheap, true};
  // What the running operator reads is not in the hash yet: there may be a content more.
  const auto position = static_cast<size_t>(number);
  const Drops none = budget_.is_limit() ? Drops::kUntilFull : Drops::kNothing;
  if (position >= plan_->decisions.size()) return {none, true};
  const Decision decision = plan_->decisions[position];
  if (decision == Decision::kKeep) return {none, true};
  return {Drops::kEverything, decision == Decision::kDrop};
}

void Step::must_keep(const Content& content) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!finished_) trace_.contents[content.number].must_be_kept = true;
}

bool Step::may_drop_later() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return plan_ == nullptr && bytes_ > 0;
}

// Finds a step like this one, as far as it has come, and follows a plan of it.
void Step::find() {
  // The calls of a process's first step are slow. Where nothing is promised, and times are
  // measured, a second one is awaited.
  const bool waits = !budget_.is_limit() && !budget_.device.is_meta();
  follow(shared_->find(keys_, before_, missing_, waits ? 2 : 1, budget_.is_limit()));
}

// Chooses the plan of `known` for this budget; null: there is no step like this one.
void Step::follow(std::shared_ptr<Known> known) {
  followed_ = std::move(known);
  plan_ = nullptr;
  bytes_ = budget_.bytes;
  least_ = 0;
  if (!followed_) return;
  if (!budget_.is_limit()) {
    plan_ = &best_value(followed_->trace, followed_->plans);
    return;
  }
  const int64_t more = before_ - followed_->before;
  const auto& plans = followed_->plans;
  if (budget_.share > 0) {
    const int64_t activations = plans.front().peak + more - before_;
    bytes_ = before_ + missing_ + static_cast<int64_t>(budget_.share * double(activations));
  }
  least_ = plans.back().peak + more;
  plan_ = &plans.back();
  for (const Plan& plan : plans) {
    if (plan.peak + more > bytes_) continue;
    plan_ = &plan;
    break;
  }
}

int64_t Step::excess() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (plan_ != nullptr || bytes_ == 0) return 0;
  // Room for the next operator, and for backward, whose operators add a gradient for each input.
  constexpr int64_t kOperators = 3;
  const int64_t most = bytes_ - kOperators * most_added_;
  const int64_t live = shared_->count.live();
  // Freeing a tenth more than necessary keeps the searches for what to drop few.
  return live <= most ? 0 : live - most + bytes_ / 10;
}

std::vector<std::shared_ptr<Content>> Step::candidates() {
  std::vector<std::shared_ptr<Content>> found;
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::lock_guard<std::mutex> contents(contents_mutex());
  for (const auto& weak : contents_) {
    auto content = weak.lock();
    if (content && content->is_alone && content->decided && !content->dropped) {
      found.push_back(std::move(content));
    }
  }
  return found;
}

void Step::check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool refused = budget_.strict && plan_ != nullptr && least_ > bytes_;
  TORCH_CHECK_WITH(OutOfMemoryError, !refused, "remat: out of memory. The budget is ", bytes_,
                   " bytes, and a step of these shapes needs at least ", least_,
                   " (strict=True). Use a larger budget or a smaller batch.");
}

}  // namespace memsave_ext::remat

#include "remat/move.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "locks.h"
#include "remat/fakes.h"
#include "remat/memory.h"
#include "remat/pause.h"

namespace memsave_ext::remat {

template <typename Wait>
void Mover::wait_for(const Wait& wait) {
  if (store_->uses_streams()) return wait();
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  const double begin = now();
  wait();
  const double time = now() - begin;
  const std::lock_guard<Lock> lock(contents_mutex());
  figures_.waited += time;
}

void Mover::want(const std::shared_ptr<Content>& content, int32_t lingers_from) {
  wanted_.emplace_back(content, lingers_from);
}

void Mover::begin() {
  std::vector<std::pair<std::weak_ptr<Content>, int32_t>> wanted;
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    wanted.swap(wanted_);
  }
  for (const auto& [weak, lingers_from] : wanted) {
    const std::shared_ptr<Content> content = weak.lock();
    if (!content) continue;
    c10::intrusive_ptr<c10::StorageImpl> held;
    std::optional<c10::Stream> made_on;
    {
      const std::lock_guard<Lock> lock(contents_mutex());
      const bool is_needed = content->holders > 0 || content->pins > 0;
      if (!is_needed || content->state() != State::kKept || !content->held) continue;
      // It was written since, and is an error for backward, or what is needed of it was copied.
      const bool is_as_decided = !content->overwritten && !content->copied;
      if (is_as_decided && static_cast<int64_t>(content->held->nbytes()) == content->bytes) {
        held = content->held;
        made_on = content->made_on;
      }
    }
    std::shared_ptr<store::Away> away;
    std::string failure;
    const Pause pause;
    try {
      if (held) wait_for([&] { away = store_->put(std::move(held), made_on, limit_); });
    } catch (const std::exception& error) {
      failure = error.what();
    }
    const std::lock_guard<Lock> lock(contents_mutex());
    if (!failure.empty()) figures_.failure = std::move(failure);
    if (!away) {
      tally_.changed(*content, Verdict::kNotMoved);
      figures_.not_moved += content->bytes;
    } else if (content->state() == State::kKept && content->held) {
      content->become(State::kLeaving);
      content->away = away;
      leaving_.push_back({weak, std::move(away), lingers_from, content->bytes});
    } else {
      store::discard(std::move(away));
    }
  }
}

void Mover::settle(int32_t moment, int64_t may_linger) {
  std::vector<Leaving> out;
  std::shared_ptr<store::Away> next;  // to be waited for
  do {
    if (next) wait_for([&] { next->wait_until_out(); });
    next.reset();
    out.clear();
    {
      const std::lock_guard<Lock> lock(contents_mutex());
      int64_t linger = 0;
      bool may_be_out = true;
      std::deque<Leaving> left;
      for (auto& leaving : leaving_) {
        if (may_be_out && leaving.away->is_out()) {
          out.push_back(std::move(leaving));
          continue;
        }
        may_be_out = !store_->uses_streams();
        if (leaving.lingers_from < moment) linger += leaving.bytes;
        left.push_back(std::move(leaving));
      }
      leaving_.swap(left);
      if (linger > may_linger) next = leaving_.front().away;
    }
    for (const auto& leaving : out) finish(leaving);
  } while (next);
}

// It is out: its memory is let go.
void Mover::finish(const Leaving& leaving) {
  Freed freed, given_up;
  const std::shared_ptr<Content> content = leaving.content.lock();
  if (!content) return;
  if (const auto failure = leaving.away->failure()) {
    const std::lock_guard<Lock> lock(contents_mutex());
    figures_.not_moved += content->bytes;
    figures_.failure = *failure;
    if (content->away != leaving.away) return;
    tally_.changed(*content, Verdict::kNotMoved);
    content->become(State::kKept);
    freed.push_back(content->away->take_source());
    store::discard(std::move(content->away));
    return;
  }
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    if (content->away != leaving.away) return;
    const bool is_alone = content->is_alone;
    freed.push_back(content->away->take_source());
    freed.push_back(content->give_up());
    content->become(State::kAway);
    content->dropped_depth = 0;
    figures_.moved += content->bytes;
    if (is_alone) given_up.push_back(freed.back());
  }
  freed.clear();
  if (step_ == nullptr) return;
  step_->given_up(given_up);
  given_up.clear();
  step_->recomputed();
}

void Mover::before_write(const std::shared_ptr<Content>& content) {
  std::vector<Leaving> found;
  std::shared_ptr<store::Away> away;
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    away = content->away;
  }
  if (!away) return;
  // Its memory may have been let go once its own stream was to wait for the copy. Others hold it.
  if (store_->uses_streams()) away->wait_until_out();
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    if (!content->is_leaving()) return;
    const auto is_it = [&](const Leaving& leaving) { return leaving.away == content->away; };
    const auto place = std::find_if(leaving_.begin(), leaving_.end(), is_it);
    if (place == leaving_.end()) return;
    found.push_back(std::move(*place));
    leaving_.erase(place);
  }
  wait_for([&] { found.front().away->wait_until_out(); });
  finish(found.front());
}

void Mover::bring_back_early(const std::shared_ptr<Content>& content) {
  std::shared_ptr<store::Away> away;
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    if (content->state() != State::kAway) return;
    away = content->away;
  }
  if (away->is_coming()) return;
  const Pause pause;
  const at::NoGradGuard no_grad;
  c10::Storage memory;
  try {
    memory = empty_for(*content);
  } catch (const std::exception&) {
    return;  // there is no memory for it yet; when it is opened that is an error
  }
  away->begin_back(std::move(memory));
  const std::lock_guard<Lock> lock(contents_mutex());
  if (content->away == away && !content->held) content->set_alone(true);
}

c10::Storage Mover::bring_back(const std::shared_ptr<Content>& content) {
  std::shared_ptr<store::Away> away;
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    away = content->away;
  }
  if (!away->is_coming()) away->begin_back(empty_for(*content));
  std::optional<c10::Storage> memory;
  wait_for([&] { memory = away->end_back(); });
  const std::lock_guard<Lock> lock(contents_mutex());
  content->set_alone(false);
  figures_.brought_back += content->bytes;
  return *memory;
}

MoveFigures Mover::figures() const {
  const std::lock_guard<Lock> lock(contents_mutex());
  return figures_;
}

}  // namespace memsave_ext::remat

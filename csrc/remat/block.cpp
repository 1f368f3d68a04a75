#include "remat/block.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "remat/policy.h"

namespace memsave_ext::remat {
namespace {

thread_local Block* current = nullptr;
thread_local int pauses = 0;

bool records() {
  return current != nullptr && pauses == 0 && torch::autograd::get_current_graph_task_id() == -1;
}

}  // namespace

Pause::Pause() { ++pauses; }
Pause::~Pause() { --pauses; }

bool Block::is_innermost() const { return current == this; }

Block* Block::active() { return records() ? current : nullptr; }

void Block::open() {
  thread_ = std::this_thread::get_id();
  outer_ = current;
  if (outer_ == nullptr) seconds_of_copy(0);  // measures it before any operator is timed
  pending_.emplace();
  if (budget_) step_ = std::make_unique<Step>(*budget_);
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  if (outer_ != nullptr) at::disableCallback(outer_->callback_);
  current = this;
}

void Block::close() {
  at::removeCallback(callback_);
  current = outer_;
  if (outer_ != nullptr) at::reenableCallback(outer_->callback_);
  table_.clear();
  pending_.reset();
  let_go();
}

std::shared_ptr<Content> Block::save(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return nullptr;
  std::shared_ptr<Content> content = entry_of(tensor).content;
  {
    const std::lock_guard<std::mutex> lock(contents_mutex());
    if (content->dropped && !has_all_memory(*content)) return nullptr;
    ++content->holders;
    ++holders_;
    if (content->decided) return content;
    if (!content->held) content->held = content->storage.lock();
    // It is new in an operator that still runs and may say how it is made: decided at its end.
    if (!content->call && is_new_for_running(*content)) return content;
  }
  decide(content);
  return content;
}

bool Block::is_new_for_running(const Content& content) const {
  return !running_.empty() && content.born > running_.front()->born;
}

bool Block::is_being_written(const Content& content) const {
  return std::any_of(running_.begin(), running_.end(), [&](const Recording* recording) {
    return recording->writes(content.storage._unsafe_get_target());
  });
}

void Block::released(const Content& content, bool was_last) {
  if (!step_) return;
  if (was_last) step_->closed(content);
  let_go();
}

void Block::opened(const Content& content) {
  if (!step_) return;
  step_->opened(content);
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward == -1 || backward_.exchange(backward) == backward) return;
  ++holders_;
  auto& engine = torch::autograd::Engine::get_default_engine();
  // Queued a second time it runs after what others, such as optimizers, have queued meanwhile.
  engine.queue_callback(
      [self = shared_from_this(), &engine] { engine.queue_callback([self] { self->let_go(); }); });
}

void Block::let_go() {
  if (--holders_ == 0 && step_) step_->finish();
}

// Returns how the content would be recomputed. The caller holds contents_mutex().
Route Block::route_to(const Content& content, Freed& locked) const {
  Route route;
  if (content.call && !content.external) route = find_route(content, locked);
  // It cannot be recomputed from memory that a running operator is about to write. This happens
  // where autograd saves a clone of a tensor before it is changed in place.
  for (const auto& needed : route.needs) {
    route.possible = route.possible && !is_being_written(*needed);
  }
  return route;
}

void Block::decide(const std::shared_ptr<Content>& content) {
  Freed freed;  // declared first: freed last, without the mutex
  std::vector<std::shared_ptr<Content>> contents;
  std::shared_ptr<Call> call;
  const Choice choice = step_ ? step_->decide(*content) : Choice{drops_, true};
  std::unique_lock<std::mutex> lock(contents_mutex());
  Route route = route_to(*content, freed);
  if (step_ && !route.possible) {
    lock.unlock();
    step_->must_keep(*content);
    lock.lock();
  }
  const Verdict verdict = judge(*content, route, choice.drops);
  content->decided = true;
  content->held_on_the_way = choice.held_on_the_way;
  Sum& sum = sums_[{{content->module, content->op}, verdict}];
  ++sum.count;
  sum.bytes += content->bytes;
  if (verdict == Verdict::kDropped) drop(content, std::move(route), freed);
  for (const auto& relying : std::exchange(content->relied_on_by, {})) {
    if (auto other = relying.lock()) contents.push_back(std::move(other));
  }
  for (size_t i = contents.size(); i-- > 0;) route_again(contents[i], freed, contents);
  if (verdict == Verdict::kDropped || content->relied_on || (step_ && step_->may_drop_later()))
    return;
  // It is kept, so that no chain of calls needs to go further back.
  call = std::move(content->call);
  content->depth = 0;
}

// The caller holds contents_mutex().
void Block::drop(const std::shared_ptr<Content>& content, Route route, Freed& freed) {
  sums_[{{content->module, content->op}, Verdict::kDropped}].seconds += route.seconds;
  content->dropped = true;
  content->pending.emplace();
  take_route(content, std::move(route));
  freed.push_back(content->give_up());
}

// Pins what it will be recomputed from. The caller holds contents_mutex().
void Block::take_route(const std::shared_ptr<Content>& content, Route route) {
  content->dropped_depth = route.dropped_depth + 1;
  for (const auto& needed : route.needs) {
    pin(*needed);
    if (!needed->held && !needed->dropped) needed->held = needed->storage.lock();
  }
  for (const auto& other : route.on_the_way) {
    other->relied_on = true;
    other->relied_on_by.push_back(content);
  }
  content->needs = std::move(route.needs);
}

// A content on its route, which nobody had saved, has been decided on: the route begins there now,
// as plans have it. The caller holds contents_mutex(), and destroys the others without it.
void Block::route_again(const std::shared_ptr<Content>& content, Freed& freed,
                        std::vector<std::shared_ptr<Content>>& contents) {
  if (!content->dropped || content->holders == 0) return;
  Route route = route_to(*content, freed);
  if (!route.possible) return;
  const auto before = std::move(content->needs);
  take_route(content, std::move(route));
  for (const auto& needed : before) {
    unpin(*needed);
    release_unused(needed, freed, contents);
  }
}

// Drops what was kept where there is no plan and the budget is exceeded. What is recomputed for a
// content on its route stays until backward has used it, so that what saves little beside that is
// kept, and routes end there. From the oldest on, so that what a route comes from is settled.
void Block::make_room() {
  constexpr int64_t kMostAgain = 10;  // times the bytes that are saved
  int64_t excess = step_->excess();
  if (excess <= 0) return;
  Freed freed;
  const std::vector<std::shared_ptr<Content>> candidates = step_->candidates();
  for (const auto& content : candidates) {
    if (excess <= 0) return;
    const std::lock_guard<std::mutex> lock(contents_mutex());
    if (!content->call || content->pins > 0) continue;
    Route route = route_to(*content, freed);
    const int64_t bytes = content->bytes - route.more_bytes;
    if (!route.possible || bytes <= 0) continue;
    if (bytes_on(route, kMostAgain * bytes) > kMostAgain * bytes) continue;
    const Maker maker{content->module, content->op};
    for (const auto& [verdict, sign] : {std::pair(Verdict::kFits, -1), {Verdict::kDropped, 1}}) {
      Sum& sum = sums_[{maker, verdict}];
      sum.count += sign;
      sum.bytes += sign * content->bytes;
    }
    drop(content, std::move(route), freed);
    excess -= bytes;
  }
}

void Block::enter_module(int32_t number) {
  if (std::this_thread::get_id() == thread_) modules_.push_back(number);
}

void Block::leave_module() {
  if (std::this_thread::get_id() == thread_ && modules_.size() > 1) modules_.pop_back();
}

Sums Block::sums() const {
  const std::lock_guard<std::mutex> lock(contents_mutex());
  return sums_;
}

SumsAgain Block::sums_again() {
  const std::lock_guard<std::recursive_mutex> lock(again_mutex_);
  return sums_again_;
}

void Block::count_again(const Call& call, double seconds) {
  Sum& sum = sums_again_[{call.module, call.op}];
  ++sum.count;
  sum.seconds += seconds;
  for (const auto& made : call.made) {
    if (const auto content = made.content.lock()) sum.bytes += content->bytes;
  }
}

}  // namespace memsave_ext::remat

#include "memory/threads.h"

#include <algorithm>
#include <limits>

namespace memsave_ext::memory {

Where Threads::where(const EventContext& context) {
  Thread& thread = threads_[context.thread];
  const int32_t inside = thread.modules.empty() ? -1 : thread.modules.back().module;
  if (!thread.recomputes.empty())
    return {Phase::kRecompute, thread.recomputes.back().span,
            inside >= 0 ? inside : thread.recomputes.back().module};
  if (context.in_backward) {
    if (thread.modules.empty()) after_forward_ = false;
    return {Phase::kBackward, 0, module_of_node(context)};
  }
  // Checked before the optimizer: step() may run a closure with a forward.
  if (!thread.modules.empty() || after_forward_) return {Phase::kForward, forward_, inside};
  if (thread.optimizer) return {Phase::kOptimizer, 0, -1};
  return {Phase::kOther, 0, -1};
}

void Threads::enter_module(const EventContext& context, int32_t module, uint64_t sequence) {
  Thread& thread = threads_[context.thread];
  const bool outermost = thread.modules.empty();
  // A forward inside a backward is the recompute of another library's checkpoint. Our own
  // recomputes call begin_recompute() themselves.
  const bool recompute = context.in_backward && outermost && thread.recomputes.empty();
  if (recompute) {
    begin_recompute(context);
  } else if (outermost && !context.in_backward) {
    ++forward_;
    after_forward_ = false;
  }
  if (!thread.recomputes.empty()) {
    int32_t& holder = thread.recomputes.back().module;
    holder = holder < 0 ? module : common_module(holder, module);
  }
  thread.modules.push_back({module, recompute});
  mark(thread, sequence);
}

void Threads::exit_module(const EventContext& context, int32_t module, uint64_t sequence) {
  Thread& thread = threads_[context.thread];
  const auto entered = std::find_if(thread.modules.rbegin(), thread.modules.rend(),
                                    [&](const Open& open) { return open.module == module; });
  if (entered == thread.modules.rend()) return;
  // Modules above it were left by an exception, without their hooks.
  const size_t depth = thread.modules.rend() - entered - 1;
  const bool recompute =
      std::any_of(thread.modules.begin() + static_cast<int64_t>(depth), thread.modules.end(),
                  [](const Open& open) { return open.recompute; });
  thread.modules.resize(depth);
  mark(thread, sequence);
  if (recompute) end_recompute(context);
  if (depth == 0 && !context.in_backward) after_forward_ = true;
}

bool Threads::inside_module(const EventContext& context) const {
  const auto found = threads_.find(context.thread);
  return found != threads_.end() && !found->second.modules.empty();
}

void Threads::begin_recompute(const EventContext& context) {
  Thread& thread = threads_[context.thread];
  thread.recomputes.push_back(
      {++recompute_, context.time, thread.modules.size(), 0, module_of_node(context), -1});
}

void Threads::end_recompute(const EventContext& context) {
  Thread& thread = threads_[context.thread];
  if (thread.recomputes.empty()) return;  // it began before tracking
  const Recompute recompute = thread.recomputes.back();
  thread.recomputes.pop_back();
  // A recompute that stops early leaves its modules without their hooks.
  if (thread.modules.size() > recompute.depth) thread.modules.resize(recompute.depth);
  CheckpointedRegion& region = regions_[name_of(recompute)];
  ++region.calls;
  region.saved_bytes = std::max(region.saved_bytes, recompute.bytes);
  region.nanoseconds += context.time - recompute.begin;
}

void Threads::count(int64_t span, int64_t bytes) {
  for (auto& [id, thread] : threads_)
    for (Recompute& recompute : thread.recomputes)
      if (recompute.span == span) recompute.bytes += bytes;
}

void Threads::begin_optimizer(const EventContext& context) {
  after_forward_ = false;
  threads_[context.thread].optimizer = true;
}

void Threads::end_optimizer(const EventContext& context) {
  threads_[context.thread].optimizer = false;
}

void Threads::end_step() {
  after_forward_ = false;
  for (auto& [id, thread] : threads_) {
    const auto begin = thread.marks.begin();
    thread.marks.erase(begin, begin + static_cast<int64_t>(thread.marks_before_step));
    thread.marks_before_step = thread.marks.size();
  }
}

void Threads::clear() {
  threads_.clear();
  after_forward_ = false;
}

void Threads::mark(Thread& thread, uint64_t sequence) {
  const int32_t module = thread.modules.empty() ? -1 : thread.modules.back().module;
  if (thread.marks.size() > thread.marks_before_step && thread.marks.back().sequence == sequence)
    thread.marks.back().module = module;  // no node was made since
  else
    thread.marks.push_back({sequence, module});
}

int32_t Threads::module_of_node(const EventContext& context) const {
  // AccumulateGrad has the largest sequence number; it belongs to no forward.
  if (!context.has_node || context.node_sequence == std::numeric_limits<uint64_t>::max()) return -1;
  const auto found = threads_.find(context.node_thread);
  if (found == threads_.end()) return -1;
  const std::vector<Mark>& marks = found->second.marks;
  const auto after = std::upper_bound(
      marks.begin(), marks.end(), context.node_sequence,
      [](uint64_t sequence, const Mark& mark) { return sequence < mark.sequence; });
  return after == marks.begin() ? -1 : std::prev(after)->module;
}

int32_t Threads::name_of(const Recompute& recompute) const {
  if (recompute.module < 0) return recompute.node_module;
  // A recompute that stops early may not enter the region's last module, but the node that needs it
  // is in that one. The node of an explicit region is outside of it, in a module that holds the
  // whole region.
  const int32_t common = common_module(recompute.module, recompute.node_module);
  return common < 0 || common == recompute.node_module ? recompute.module : common;
}

int32_t Threads::common_module(int32_t a, int32_t b) const {
  for (int32_t x = a; x >= 0; x = parents_[x])
    for (int32_t y = b; y >= 0; y = parents_[y])
      if (x == y) return x;
  return -1;
}

}  // namespace memsave_ext::memory

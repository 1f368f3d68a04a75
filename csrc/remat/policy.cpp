#include "remat/policy.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>

#include "remat/block.h"

namespace memsave_ext::remat {
namespace {

// The longest chain of operators from a dropped content back to what it is computed from.
constexpr int kMostOperators = 16;
// The longest chain of dropped contents, each computed from the one before. Once recomputed, those
// on the way stay in memory until backward needs them, so that long chains would save nothing at
// the peak.
constexpr int kMostDropped = 4;
// The host's cost of running one operator again, besides the operator's own time.
constexpr double kHostSeconds = 4e-6;
// How much recomputing a byte may cost, in units of copying it within the cache. Elementwise
// functions take 1 to 30, normalizations 5 to 25, matrix products 80 and more.
constexpr double kCopies = 40;

// Adds to the plan a repeat of `call`, which is the `operators`th in its chain.
void add(const Call& call, Plan& plan, Freed& locked, int operators) {
  if (operators > kMostOperators) {
    plan.possible = false;
    return;
  }
  plan.seconds += call.seconds + kHostSeconds;
  for (const auto& reference : call.references) {
    const auto& content = reference.content;
    if (reference.overwritten) continue;
    if (std::find(plan.needs.begin(), plan.needs.end(), content) != plan.needs.end()) continue;
    const bool unseen = !content->copied && content->fill == 0 && reference.changed();
    const bool lost = content->is_lost() || unseen;
    // FSDP frees the memory of a module's parameters after its forward.
    const auto is_empty = [&](const c10::StorageImpl& storage) {
      return static_cast<int64_t>(storage.nbytes()) < reference.geometry.extent();
    };
    if (content->held && !lost && is_empty(*content->held)) {
      plan.possible = false;
      return;
    }
    content->extent = std::max(content->extent, reference.geometry.extent());
    if ((content->held && !lost) || content->dropped) {
      if (content->dropped) {
        plan.dropped_depth = std::max(plan.dropped_depth, content->dropped_depth);
      }
      plan.needs.push_back(content);
      continue;
    }
    // An intermediate value that nobody saved is recomputed on the way.
    if (content->call) {
      plan.on_the_way.push_back(content);
      add(*content->call, plan, locked, operators + 1);
      if (!plan.possible) return;
      continue;
    }
    auto storage = content->storage.lock();
    if (!storage || lost || is_empty(*storage)) {
      plan.possible = false;
      return;
    }
    locked.push_back(std::move(storage));
    if (!content->external) plan.more_bytes += content->bytes;
    plan.needs.push_back(content);
  }
}

}  // namespace

Plan plan_for(const Content& content, Freed& locked) {
  Plan plan;
  add(*content.call, plan, locked, 1);
  return plan;
}

bool has_all_memory(const Content& content) {
  return std::all_of(content.needs.begin(), content.needs.end(), [](const auto& needed) {
    if (needed->held) return static_cast<int64_t>(needed->held->nbytes()) >= needed->extent;
    return !needed->dropped || has_all_memory(*needed);
  });
}

double seconds_of_copy(int64_t bytes) {
  static const double measured = [] {
    const Pause pause;
    constexpr int64_t size = 4 << 20;
    const auto from = at::empty({size}, at::kByte).fill_(1);
    const auto to = at::empty({size}, at::kByte).fill_(1);
    double best = 1;
    for (int i = 0; i < 5; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      to.copy_(from);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
      best = std::min(best, time.count());
    }
    return best / size;
  }();
  return measured * static_cast<double>(bytes);
}

Verdict judge(const Content& content, const Plan& plan, Drops drops) {
  if (content.external) return Verdict::kInput;
  if (content.op != nullptr && content.op->is_heavy) return Verdict::kHeavy;
  if (!content.call) return Verdict::kNotAgain;
  if (!plan.possible) return Verdict::kNotAgain;
  if (drops == Drops::kEverything) return Verdict::kDropped;
  if (drops == Drops::kNothing) return Verdict::kNoGain;
  if (plan.dropped_depth >= kMostDropped) return Verdict::kNoGain;
  const int64_t saved = content.bytes - plan.more_bytes;
  if (4 * saved < content.bytes) return Verdict::kNoGain;
  return plan.seconds <= kCopies * seconds_of_copy(saved) ? Verdict::kDropped : Verdict::kNoGain;
}

}  // namespace memsave_ext::remat

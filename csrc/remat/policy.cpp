#include "remat/policy.h"

#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "memory/active.h"
#include "plan/constants.h"
#include "remat/fakes.h"
#include "remat/pause.h"

namespace memsave_ext::remat {
namespace {

// The longest chain of operators from a dropped content back to what it is computed from.
constexpr int kMostOperators = 16;
// The longest chain of dropped contents, each computed from the one before. Once recomputed, those
// on the way stay in memory until backward needs them, so that long chains would save nothing at
// the peak.
constexpr int kMostDropped = 4;
// How much recomputing a byte may cost, in units of copying it within the cache. Elementwise
// functions take 1 to 30, normalizations 5 to 25, matrix products 80 and more.
constexpr double kCopies = 40;

// Of a predicted operator: as operator_seconds() in memsave_ext/fakes/costs.py has it.
constexpr double kFakeCopy = 6e-11;

bool is_in(const Contents& contents, const std::shared_ptr<Content>& content) {
  return std::find(contents.begin(), contents.end(), content) != contents.end();
}

// Adds to the route a repeat of `call`, which is the `operators`th in its chain.
void add(const Call& call, Route& route, Freed& locked, int operators) {
  if (operators > kMostOperators) {
    route.possible = false;
    return;
  }
  route.seconds += call.seconds + plan::kSecondsPerCall;
  for (const auto& reference : call.references) {
    const auto& content = reference.content;
    if (reference.overwritten) continue;
    if (is_in(route.needs, content) || is_in(route.on_the_way, content)) continue;
    const bool unseen =
        content->is_original() &&
        (reference.changed() || (content->external && may_be_stepped(call, reference)));
    const bool lost = content->is_lost() || unseen;
    // FSDP frees the memory of a module's parameters after its forward.
    const int64_t extent = reference.geometry.extent();
    const auto is_empty = [&](const c10::StorageImpl& storage) {
      return static_cast<int64_t>(storage.nbytes()) < extent;
    };
    const bool is_gone = content->is_dropped() ? !has_all_memory(*content)
                                               : content->held && !lost && is_empty(*content->held);
    if (is_gone) {
      route.possible = false;
      return;
    }
    content->extent = std::max(content->extent, extent);
    if ((content->held && !lost) || content->is_dropped()) {
      if (content->is_dropped()) {
        route.dropped_depth = std::max(route.dropped_depth, content->dropped_depth);
      }
      route.needs.push_back(content);
      continue;
    }
    // An intermediate value that nobody saved is recomputed on the way.
    if (content->call) {
      route.on_the_way.push_back(content);
      add(*content->call, route, locked, operators + 1);
      if (!route.possible) return;
      continue;
    }
    auto storage = content->storage.lock();
    // An alias would hold memory of the step that no trace knows to be held for this.
    if (!storage || lost || content->is_alias || is_empty(*storage)) {
      route.possible = false;
      return;
    }
    locked.push_back(std::move(storage));
    if (!content->external) route.more_bytes += content->bytes;
    route.needs.push_back(content);
  }
}

uint64_t walks = 0;  // so far, of all kinds; guarded by contents_mutex()

// Calls `enter` once with each of these, and with what each is computed from where it returns true.
template <typename Enter>
void walk(const Contents& needs, const Enter& enter) {
  const uint64_t number = ++walks;
  c10::SmallVector<const Contents*, 8> pending{&needs};
  while (!pending.empty()) {
    const Contents& next = *pending.pop_back_val();
    for (const auto& needed : next) {
      if (std::exchange(needed->walk, number) == number) continue;
      if (enter(*needed)) pending.push_back(&needed->needs);
    }
  }
}

}  // namespace

Route find_route(const Content& content, Freed& locked) {
  Route route;
  add(*content.call, route, locked, 1);
  return route;
}

int64_t bytes_on(const Route& route, int64_t enough) {
  int64_t bytes = 0;
  for (const auto& content : route.on_the_way) bytes += content->bytes;
  walk(route.needs, [&](const Content& needed) {
    if (!needed.is_dropped() || bytes > enough) return false;
    bytes += needed.bytes;
    return true;
  });
  return bytes;
}

bool has_all_memory(const Content& content) {
  bool has_all = true;
  walk(content.needs, [&](const Content& needed) {
    if (!needed.held) return has_all && needed.is_dropped();
    has_all = has_all && static_cast<int64_t>(needed.held->nbytes()) >= needed.extent;
    return false;
  });
  return has_all;
}

double seconds_of_copy(int64_t bytes) {
  if (Fakes::current() != nullptr) return kFakeCopy * static_cast<double>(bytes);
  static const double measured = [] {
    const Pause pause;
    const memory::PauseTracking pause_tracking;
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

Verdict judge(const Content& content, const Route& route, Drops drops) {
  if (content.external) return Verdict::kInput;
  if (drops == Drops::kMove) return Verdict::kMoved;
  const bool is_heavy = content.op != nullptr && content.op->is_heavy;
  const bool only_cheap = drops == Drops::kCheap || drops == Drops::kNothing;
  if (is_heavy && (!content.call || only_cheap)) return Verdict::kHeavy;
  if (!content.call) {
    const bool has_failed = content.op != nullptr && content.op->has_failed;
    return has_failed ? Verdict::kFailed : Verdict::kNotAgain;
  }
  if (!route.possible) return Verdict::kNotAgain;
  if (drops == Drops::kEverything) return Verdict::kDropped;
  if (drops == Drops::kNothing) return Verdict::kNoGain;
  if (drops == Drops::kUntilFull) return Verdict::kFits;
  if (route.dropped_depth >= kMostDropped) return Verdict::kNoGain;
  const int64_t saved = content.bytes - route.more_bytes;
  if (4 * saved < content.bytes) return Verdict::kNoGain;
  return route.seconds <= kCopies * seconds_of_copy(saved) ? Verdict::kDropped : Verdict::kNoGain;
}

}  // namespace memsave_ext::remat

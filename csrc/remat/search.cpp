#include "remat/search.h"

#include <algorithm>

namespace memsave_ext::remat {
namespace {

// An operator runs again at most so often.
constexpr int kMostRuns = 2;

}  // namespace

Search::Search(Simulator& simulator, const Routes& routes)
    : simulator_(simulator),
      routes_(routes),
      trace_(simulator.trace()),
      spans_(simulator.timeline().spans),
      by_worth_(routes.droppable) {
  const auto worth = [&](int32_t content) {
    return routes_.repeats[routes_.repeat_of[content]].seconds /
           static_cast<double>(std::max<int64_t>(trace_.contents[content].bytes, 1));
  };
  std::stable_sort(by_worth_.begin(), by_worth_.end(),
                   [&](int32_t a, int32_t b) { return worth(a) > worth(b); });
  first_need_ = simulator.timeline().size();
  for (const int32_t content : routes_.droppable) {
    first_need_ = std::min(first_need_, spans_[content].until + 1);
  }
  for (const int32_t content : simulator.timeline().openings) {
    first_need_ = std::min(first_need_, spans_[content].opened);
  }
}

bool Search::Runs::operator==(const Runs& other) const {
  return count == other.count && std::equal(slots, slots + std::min(count, 3), other.slots);
}

void Search::Runs::add(int32_t slot) {
  if (count < 3) slots[count] = slot;
  ++count;
}

Simulator::Result Search::set(std::vector<Decision> decisions) {
  decisions_ = std::move(decisions);
  fixed_ = -1;
  const auto result = simulator_.run(decisions_);
  work_ += 4 * (simulator_.timeline().size() + static_cast<int64_t>(decisions_.size()));
  profile_.set(simulator_.memory(), profile_.level());
  runs_.assign(routes_.repeats.size(), {});
  stays_.assign(trace_.contents.size(), {});
  on_way_.assign(trace_.calls.size(), 0);
  held_until_.assign(trace_.contents.size(), -1);
  for (auto i = static_cast<int32_t>(runs_.size()) - 1; i >= 0; --i) set_runs(i, follow(i));
  return result;
}

// Finds when the results of a repeat are needed, in order.
void Search::find_needs(int32_t repeat) {
  needs_.clear();
  for (const int32_t made : routes_.repeats[repeat].makes) {
    if (spans_[made].opened >= 0) needs_.push_back({spans_[made].opened, made});
    for (const int32_t user : routes_.users[made]) {
      const Runs& runs = runs_[user];
      for (int i = 0; i < std::min(runs.count, 3); ++i) needs_.push_back({runs.slots[i], made});
    }
  }
  std::sort(needs_.begin(), needs_.end(),
            [](const Need& a, const Need& b) { return a.slot < b.slot; });
}

// Returns when a repeat runs, and sets when its results have memory.
Search::Runs Search::follow(int32_t repeat) {
  find_needs(repeat);
  const auto& makes = routes_.repeats[repeat].makes;
  Runs runs;
  for (const int32_t made : makes) {
    held_until_[made] = -1;
    Stay stay;
    if (decisions_[made] == Decision::kKeep)
      stay = {spans_[made].kept_from, spans_[made].until + 1};
    for (const Need& need : needs_) {
      if (need.content == made) stay.to = std::max(stay.to, need.slot + 1);
    }
    if (decisions_[made] == Decision::kKeep) set_stay(made, stay);
  }
  for (const Need& need : needs_) {
    if (decisions_[need.content] == Decision::kKeep || held_until_[need.content] >= need.slot) {
      continue;
    }
    runs.add(need.slot);
    for (const int32_t made : makes) {
      const auto& span = spans_[made];
      const bool is_awaited = trace_.contents[made].closed >= 0 || span.opened >= need.slot;
      if (decisions_[made] == Decision::kKeep || held_until_[made] >= 0 || span.until < need.slot) {
        continue;
      }
      if ((decisions_[made] == Decision::kDrop && is_awaited) ||
          (made == need.content && span.opened == need.slot)) {
        held_until_[made] = span.until;
        set_stay(made, {need.slot, span.until + 1});
      }
    }
  }
  for (const int32_t made : makes) {
    if (decisions_[made] != Decision::kKeep && held_until_[made] < 0) set_stay(made, {});
  }
  return runs;
}

void Search::set_runs(int32_t number, const Runs& runs) {
  const Repeat& repeat = routes_.repeats[number];
  const int32_t more = runs.count - runs_[number].count;
  old_runs_.emplace_back(number, runs_[number]);
  runs_[number] = runs;
  seconds_ += more * repeat.seconds;
  too_often_ = too_often_ || (more > 0 && runs.count > kMostRuns);
  for (const int32_t call : repeat.calls) {
    on_way_[call] += more;
    too_often_ = too_often_ || (more > 0 && on_way_[call] > kMostRuns);
  }
}

void Search::set_stay(int32_t content, Stay stay) {
  const Stay before = stays_[content];
  if (before.from == stay.from && before.to == stay.to) return;
  old_stays_.emplace_back(content, before);
  stays_[content] = stay;
  add_piece(before.from, before.to, -trace_.contents[content].bytes);
  add_piece(stay.from, stay.to, trace_.contents[content].bytes);
}

void Search::add_piece(int32_t from, int32_t to, int64_t bytes) {
  if (from >= to) return;
  pieces_.push_back({from, bytes});
  pieces_.push_back({to, -bytes});
}

// Changes a decision, and what follows from it for others. `only_allowed`: not to the end where an
// operator would run again too often.
void Search::change(int32_t content, Decision decision, bool only_allowed) {
  changed_ = content;
  before_ = decisions_[content];
  decisions_[content] = decision;
  old_runs_.clear();
  old_stays_.clear();
  pieces_.clear();
  seconds_ = 0;
  too_often_ = false;
  pending_.assign(1, routes_.repeat_of[content]);
  int32_t last = -1;
  while (!pending_.empty() && !(only_allowed && too_often_)) {
    // The last one first: none that it reads changes it.
    std::pop_heap(pending_.begin(), pending_.end());
    const int32_t repeat = pending_.back();
    pending_.pop_back();
    if (repeat == last) continue;
    last = repeat;
    const Runs runs = follow(repeat);
    work_ += 1 + static_cast<int64_t>(needs_.size());
    if (runs == runs_[repeat]) continue;
    set_runs(repeat, runs);
    for (const int32_t read : routes_.repeats[repeat].reads) {
      pending_.push_back(routes_.repeat_of[read]);
      std::push_heap(pending_.begin(), pending_.end());
    }
  }
  work_ += 4 * static_cast<int64_t>(pieces_.size());  // sorting them takes longer than a visit
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.slot < b.slot; });
}

void Search::undo() {
  decisions_[changed_] = before_;
  for (const auto& [repeat, runs] : old_runs_) {
    const int32_t more = runs.count - runs_[repeat].count;
    for (const int32_t call : routes_.repeats[repeat].calls) on_way_[call] += more;
    runs_[repeat] = runs;
  }
  for (auto i = old_stays_.rbegin(); i != old_stays_.rend(); ++i) stays_[i->first] = i->second;
}

void Search::commit() {
  each_stretch([&](int32_t from, int32_t to, int64_t bytes) {
    profile_.add(from, to, bytes);
    return true;
  });
}

// Calls function(from, to, bytes) for stretches of slots in which memory changes, until it returns
// false.
template <class Function>
void Search::each_stretch(Function&& function) const {
  int64_t bytes = 0;
  for (size_t i = 0; i + 1 < pieces_.size(); ++i) {
    bytes += pieces_[i].bytes;
    if (bytes == 0 || pieces_[i].slot == pieces_[i + 1].slot) continue;
    if (!function(pieces_[i].slot, pieces_[i + 1].slot, bytes)) return;
  }
}

// Whether there is room for a dropped content in the slots in which nothing can make up for it.
bool Search::may_be_kept(int32_t content) {
  const int32_t from = spans_[content].kept_from;
  return from >= first_need_ || profile_.fits(from, first_need_, trace_.contents[content].bytes);
}

// By how much the change lowers the sum of what is over the level.
int64_t Search::gain() const {
  int64_t gain = 0;
  each_stretch([&](int32_t from, int32_t to, int64_t bytes) {
    gain += profile_.gain(from, to, bytes);
    return true;
  });
  return gain;
}

// Whether memory stays below the level where the change makes it grow.
bool Search::fits() {
  bool fits = true;
  each_stretch([&](int32_t from, int32_t to, int64_t bytes) {
    return fits = bytes <= 0 || profile_.fits(from, to, bytes);
  });
  return fits;
}

}  // namespace memsave_ext::remat

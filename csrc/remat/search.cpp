#include "remat/search.h"

#include <algorithm>
#include <limits>

namespace memsave_ext::remat {
namespace {

constexpr int32_t kNever = std::numeric_limits<int32_t>::max();
// An operator runs again at most so often.
constexpr int kMostRuns = 2;

}  // namespace

bool Search::Move::operator<(const Move& other) const {
  return score != other.score ? score < other.score : content > other.content;
}

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
}

Simulator::Result Search::set(std::vector<Decision> decisions) {
  decisions_ = std::move(decisions);
  const auto result = simulator_.run(decisions_);
  memory_ = simulator_.memory();
  at_.assign(routes_.repeats.size(), kNever);
  start_.assign(trace_.contents.size(), kNever);
  dropped_.assign(routes_.repeats.size(), 0);
  runs_.assign(trace_.calls.size(), 0);
  for (const int32_t content : routes_.droppable) {
    if (decisions_[content] == Decision::kKeep) continue;
    const int32_t repeat = routes_.repeat_of[content];
    const bool is_twice = decisions_[content] == Decision::kDropTwice;
    if (++dropped_[repeat] > 1 && !is_twice) continue;
    for (const int32_t call : routes_.repeats[repeat].calls) runs_[call] += 1 + is_twice;
  }
  for (auto i = static_cast<int32_t>(at_.size()) - 1; i >= 0; --i) {
    at_[i] = repeat_at(i);
    for (const int32_t made : routes_.repeats[i].makes) start_[made] = start_of(made);
  }
  return result;
}

// The first slot in which the dropped results of a repeat are needed.
int32_t Search::repeat_at(int32_t repeat) const {
  int32_t at = kNever;
  for (const int32_t made : routes_.repeats[repeat].makes) {
    if (decisions_[made] == Decision::kKeep) continue;
    if (spans_[made].opened >= 0) at = std::min(at, spans_[made].opened);
    for (const int32_t user : routes_.users[made]) at = std::min(at, at_[user]);
  }
  return at;
}

int32_t Search::start_of(int32_t content) const {
  const auto& span = spans_[content];
  if (decisions_[content] == Decision::kKeep) return span.kept_from;
  if (decisions_[content] == Decision::kDropTwice) return span.opened < 0 ? kNever : span.opened;
  const bool is_awaited = trace_.contents[content].closed >= 0 || span.opened >= 0;
  return is_awaited ? at_[routes_.repeat_of[content]] : kNever;
}

// Changes a decision, and what follows from it for the starts of others.
void Search::change(int32_t content, Decision decision) {
  changed_ = content;
  before_ = decisions_[content];
  decisions_[content] = decision;
  old_at_.clear();
  old_start_.clear();
  pieces_.clear();
  pending_.assign(1, routes_.repeat_of[content]);
  while (!pending_.empty()) {
    // The last one first: none that is read by it changes it.
    std::pop_heap(pending_.begin(), pending_.end());
    const int32_t repeat = pending_.back();
    pending_.pop_back();
    const int32_t at = repeat_at(repeat);
    if (at != at_[repeat]) {
      old_at_.emplace_back(repeat, at_[repeat]);
      at_[repeat] = at;
      for (const int32_t read : routes_.repeats[repeat].reads) {
        if (decisions_[read] == Decision::kKeep) continue;
        pending_.push_back(routes_.repeat_of[read]);
        std::push_heap(pending_.begin(), pending_.end());
      }
    }
    for (const int32_t made : routes_.repeats[repeat].makes) move_start(made, start_of(made));
  }
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.slot < b.slot; });
}

void Search::move_start(int32_t content, int32_t start) {
  const int32_t before = start_[content];
  if (start == before) return;
  old_start_.emplace_back(content, before);
  start_[content] = start;
  const int32_t end = spans_[content].until + 1;
  const int32_t from = std::min({start, before, end});
  const int32_t to = std::min(std::max(start, before), end);
  if (from == to) return;
  const int64_t bytes = trace_.contents[content].bytes * (start < before ? 1 : -1);
  pieces_.push_back({from, bytes});
  pieces_.push_back({to, -bytes});
}

void Search::undo() {
  decisions_[changed_] = before_;
  for (auto i = old_at_.rbegin(); i != old_at_.rend(); ++i) at_[i->first] = i->second;
  for (auto i = old_start_.rbegin(); i != old_start_.rend(); ++i) start_[i->first] = i->second;
}

void Search::commit() {
  each_stretch([&](int32_t from, int32_t to, int64_t bytes) {
    for (int32_t slot = from; slot < to; ++slot) memory_[slot] += bytes;
    return true;
  });
  const int32_t repeat = routes_.repeat_of[changed_];
  const Decision after = decisions_[changed_];
  const bool was_run = dropped_[repeat] > 0;
  dropped_[repeat] += (after != Decision::kKeep) - (before_ != Decision::kKeep);
  const int more = (dropped_[repeat] > 0) - was_run + (after == Decision::kDropTwice) -
                   (before_ == Decision::kDropTwice);
  for (const int32_t call : routes_.repeats[repeat].calls) runs_[call] += more;
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

// By how much the change lowers the sum of what is over the level.
int64_t Search::gain(int64_t level) const {
  int64_t gain = 0;
  each_stretch([&](int32_t from, int32_t to, int64_t bytes) {
    for (int32_t slot = from; slot < to; ++slot) {
      const int64_t over = memory_[slot] - level;
      gain += std::max<int64_t>(over, 0) - std::max<int64_t>(over + bytes, 0);
    }
    return true;
  });
  return gain;
}

// Whether memory stays below the level where the change makes it grow.
bool Search::fits(int64_t level) {
  bool fits = true;
  each_stretch([&](int32_t from, int32_t to, int64_t bytes) {
    if (bytes < 0) return true;
    if (from <= tight_ && tight_ < to && memory_[tight_] + bytes > level) return fits = false;
    for (int32_t slot = from; slot < to; ++slot) {
      if (memory_[slot] + bytes <= level) continue;
      tight_ = slot;
      return fits = false;
    }
    return true;
  });
  return fits;
}

// The time that a decision costs beyond the one of now.
double Search::seconds_of(int32_t content, Decision decision) const {
  const int32_t repeat = routes_.repeat_of[content];
  const Decision now = decisions_[content];
  const auto times = [&](Decision d) {
    const bool others = dropped_[repeat] > (now != Decision::kKeep);
    return (others || d != Decision::kKeep) + (d == Decision::kDropTwice);
  };
  return routes_.repeats[repeat].seconds * (times(decision) - times(now));
}

bool Search::runs_too_often(const Repeat& repeat) const {
  return std::any_of(repeat.calls.begin(), repeat.calls.end(),
                     [&](int32_t call) { return runs_[call] >= kMostRuns; });
}

bool Search::is_allowed(int32_t content, Decision decision) const {
  const int32_t number = routes_.repeat_of[content];
  const Repeat& repeat = routes_.repeats[number];
  if (decision == Decision::kKeep) return true;
  if (decision == Decision::kDrop) return dropped_[number] > 0 || !runs_too_often(repeat);
  if (at_[number] >= spans_[content].opened || runs_too_often(repeat)) return false;
  // What is dropped twice must be computed from what is there, else that would run three times.
  const auto is_twice = [&](int32_t other) { return decisions_[other] == Decision::kDropTwice; };
  if (std::any_of(repeat.makes.begin(), repeat.makes.end(), is_twice)) return false;
  if (std::any_of(repeat.reads.begin(), repeat.reads.end(), is_twice)) return false;
  return std::none_of(routes_.users[content].begin(), routes_.users[content].end(),
                      [&](int32_t user) {
                        const auto& makes = routes_.repeats[user].makes;
                        return std::any_of(makes.begin(), makes.end(), is_twice);
                      });
}

double Search::score(int32_t content, Decision decision, int64_t level) {
  if (!is_allowed(content, decision)) return 0;
  const double seconds = seconds_of(content, decision);
  change(content, decision);
  const auto lowered = static_cast<double>(gain(level));
  undo();
  return lowered / std::max(seconds, 1e-9);
}

void Search::push_moves(int32_t content, std::vector<Move>& heap) const {
  constexpr double first = std::numeric_limits<double>::max();
  const auto push = [&](Decision decision) {
    heap.push_back({first, content, decision, -1});
    std::push_heap(heap.begin(), heap.end());
  };
  if (decisions_[content] == Decision::kKeep) {
    push(Decision::kDrop);
  } else {
    push(Decision::kKeep);
    if (decisions_[content] == Decision::kDrop) push(Decision::kDropTwice);
  }
}

bool Search::lower(int64_t level) {
  std::vector<Move> heap;
  for (const int32_t content : routes_.droppable) push_moves(content, heap);
  int64_t over = 0;
  for (const int64_t memory : memory_) over += std::max<int64_t>(memory - level, 0);
  for (int32_t round = 0; over > 0 && !heap.empty();) {
    std::pop_heap(heap.begin(), heap.end());
    Move move = heap.back();
    heap.pop_back();
    if (decisions_[move.content] == move.decision) continue;
    if (move.round != round) {
      move.score = score(move.content, move.decision, level);
      move.round = round;
      if (move.score <= 0) continue;
      heap.push_back(move);
      std::push_heap(heap.begin(), heap.end());
      continue;
    }
    change(move.content, move.decision);
    over -= gain(level);
    commit();
    ++round;
    push_moves(move.content, heap);
    const Repeat& repeat = routes_.repeats[routes_.repeat_of[move.content]];
    for (const int32_t made : repeat.makes) push_moves(made, heap);
    for (const int32_t read : repeat.reads) push_moves(read, heap);
    for (const int32_t user : routes_.users[move.content]) {
      for (const int32_t made : routes_.repeats[user].makes) push_moves(made, heap);
    }
  }
  return over <= 0;
}

void Search::put_back(int64_t level) {
  for (const int32_t content : by_worth_) {
    for (const Decision decision : {Decision::kKeep, Decision::kDrop}) {
      if (decisions_[content] <= decision) break;
      change(content, decision);
      if (fits(level)) {
        commit();
      } else {
        undo();
      }
    }
  }
}

}  // namespace memsave_ext::remat

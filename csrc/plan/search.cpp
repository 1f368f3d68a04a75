#include "plan/search.h"

#include <algorithm>
#include <limits>

namespace memsave_ext::plan {
namespace {

// Fills in what a repeat of `call` reads, and what runs on the way.
void fill_in(const Trace& trace, const Routes& routes, int32_t call, std::vector<int32_t>& seen,
             Repeat& repeat) {
  std::vector<int32_t> pending = {call};
  repeat.calls.clear();
  while (!pending.empty()) {
    const int32_t current = pending.back();
    pending.pop_back();
    for (const int32_t read : trace.calls[current].reads) {
      if (seen[read] == call) continue;
      seen[read] = call;
      const auto& content = trace.contents[read];
      if (routes.repeat_of[read] >= 0) {
        repeat.reads.push_back(read);
      } else if (!content.saved && content.let_go >= 0 && content.call >= 0) {
        if (std::find(repeat.calls.begin(), repeat.calls.end(), content.call) !=
            repeat.calls.end()) {
          continue;
        }
        repeat.calls.push_back(content.call);
        pending.push_back(content.call);
      }
    }
  }
}

}  // namespace

Routes::Routes(const Simulator& simulator, bool moves) {
  const Trace& trace = simulator.trace();
  const size_t contents = trace.contents.size();
  repeat_of.assign(contents, -1);
  users.resize(contents);
  can_be_dropped.resize(contents);
  can_be_moved.resize(contents);
  for (size_t i = 0; i < contents; ++i) {
    const auto content = static_cast<int32_t>(i);
    can_be_dropped[i] = simulator.can_be_dropped(content);
    can_be_moved[i] = moves && simulator.can_be_moved(content);
    if (can_be_dropped[i] || can_be_moved[i]) free.push_back(content);
  }
  // What has no call, or must not be recomputed by it, stands where it is read first or made.
  const auto number = static_cast<int32_t>(trace.calls.size());
  std::vector<int32_t> first_read(contents, number);
  for (int32_t i = number; i-- > 0;) {
    for (const int32_t read : trace.calls[i].reads) first_read[read] = i;
  }
  const auto place = [&](int32_t content) {
    const int32_t call = trace.contents[content].call;
    if (can_be_dropped[content]) return std::make_pair(call, 1);
    return call >= 0 ? std::make_pair(call, 2) : std::make_pair(first_read[content], 0);
  };
  std::vector<int32_t> order = free, calls;
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return place(a) < place(b); });
  for (const int32_t content : order) {
    const int32_t call = can_be_dropped[content] ? trace.contents[content].call : -1;
    if (call < 0 || calls.empty() || calls.back() != call) {
      calls.push_back(call);
      repeats.emplace_back();
    }
    repeats.back().makes.push_back(content);
    repeat_of[content] = static_cast<int32_t>(repeats.size()) - 1;
  }
  std::vector<int32_t> seen(contents, -1);
  for (size_t i = 0; i < repeats.size(); ++i) {
    if (calls[i] < 0) continue;
    Repeat& repeat = repeats[i];
    fill_in(trace, *this, calls[i], seen, repeat);
    for (const int32_t read : repeat.reads) users[read].push_back(static_cast<int32_t>(i));
    repeat.seconds = trace.calls[calls[i]].seconds + kSecondsPerCall;
    for (const int32_t call : repeat.calls) {
      repeat.seconds += trace.calls[call].seconds + kSecondsPerCall;
    }
  }
}

void Profile::set(const std::vector<int64_t>& memory, int64_t level) {
  memory_ = memory;
  blocks_.assign((memory.size() + kSlots - 1) / kSlots, {});
  tight_ = 0;
  set_level(level);
}

void Profile::set_level(int64_t level) {
  level_ = level;
  for (size_t block = 0; block < blocks_.size(); ++block) update(static_cast<int32_t>(block));
}

int64_t Profile::most() const {
  int64_t most = 0;
  for (const auto& block : blocks_) most = std::max(most, block.most);
  return most;
}

int32_t Profile::end_of(int32_t block) const {
  return std::min((block + 1) * kSlots, static_cast<int32_t>(memory_.size()));
}

void Profile::update(int32_t block) {
  const int32_t from = block * kSlots, to = end_of(block);
  const int64_t added = blocks_[block].added;
  Block sums = {memory_[from], memory_[from], 0, added};
  for (int32_t slot = from; slot < to; ++slot) {
    sums.least = std::min(sums.least, memory_[slot]);
    sums.most = std::max(sums.most, memory_[slot]);
    sums.over += std::max<int64_t>(memory_[slot] + added - level_, 0);
  }
  sums.least += added;
  sums.most += added;
  blocks_[block] = sums;
}

int64_t Profile::gain_in(const Block& sums, int32_t from, int32_t to, int64_t bytes) const {
  int64_t gain = 0;
  for (int32_t slot = from; slot < to; ++slot) {
    const int64_t over = memory_[slot] + sums.added - level_;
    gain += std::max<int64_t>(over, 0) - std::max<int64_t>(over + bytes, 0);
  }
  return gain;
}

int64_t Profile::gain(int32_t from, int32_t to, int64_t bytes) const {
  int64_t gain = 0;
  while (from < to) {
    const int32_t block = from / kSlots;
    const int32_t end = std::min(end_of(block), to);
    const Block& sums = blocks_[block];
    if (sums.most <= level_ && sums.most + bytes <= level_) {
      // Nothing is over, before and after.
    } else if (sums.least >= level_ && sums.least + bytes >= level_) {
      gain -= bytes * (end - from);
    } else if (end - from == end_of(block) - block * kSlots && sums.most + bytes <= level_) {
      gain += sums.over;
    } else {
      gain += gain_in(sums, from, end, bytes);
    }
    from = end;
  }
  return gain;
}

void Profile::add(int32_t from, int32_t to, int64_t bytes) {
  while (from < to) {
    const int32_t block = from / kSlots;
    const int32_t end = std::min(end_of(block), to);
    Block& sums = blocks_[block];
    if (end - from == end_of(block) - block * kSlots) {
      sums.over -= gain(from, end, bytes);
      sums.added += bytes;
      sums.least += bytes;
      sums.most += bytes;
    } else {
      for (int32_t slot = from; slot < end; ++slot) memory_[slot] += bytes;
      update(block);
    }
    from = end;
  }
}

bool Profile::fits(int32_t from, int32_t to, int64_t bytes) {
  const auto is_over = [&](int32_t slot) {
    return memory_[slot] + blocks_[slot / kSlots].added + bytes > level_;
  };
  if (from <= tight_ && tight_ < to && is_over(tight_)) return false;
  while (from < to) {
    const int32_t block = from / kSlots;
    const int32_t end = std::min(end_of(block), to);
    for (; blocks_[block].most + bytes > level_ && from < end; ++from) {
      if (!is_over(from)) continue;
      tight_ = from;
      return false;
    }
    from = end;
  }
  return true;
}

Search::Search(Simulator& simulator, const Routes& routes, int64_t most_moved)
    : simulator_(simulator),
      routes_(routes),
      trace_(simulator.trace()),
      spans_(simulator.timeline().spans),
      most_moved_(most_moved) {
  set_price(0);
  first_need_ = simulator.timeline().size();
  for (const int32_t content : routes_.free) {
    first_need_ = std::min(first_need_, spans_[content].until + 1);
  }
  for (const int32_t content : simulator.timeline().openings) {
    first_need_ = std::min(first_need_, spans_[content].opened);
  }
}

void Search::set_price(double seconds_per_byte) {
  price_ = seconds_per_byte;
  by_worth_ = routes_.free;
  std::vector<double> worth(trace_.contents.size());
  for (const int32_t content : by_worth_) {
    constexpr double kNever = std::numeric_limits<double>::infinity();
    const double again = routes_.can_be_dropped[content]
                             ? routes_.repeats[routes_.repeat_of[content]].seconds
                             : kNever;
    const double back = routes_.can_be_moved[content] ? seconds_to_move(content) : kNever;
    worth[content] = std::min(again, back) /
                     static_cast<double>(std::max<int64_t>(trace_.contents[content].bytes, 1));
  }
  std::stable_sort(by_worth_.begin(), by_worth_.end(),
                   [&](int32_t a, int32_t b) { return worth[a] > worth[b]; });
}

double Search::seconds_to_move(int32_t content) const {
  return kSecondsPerMove + kSecondsPerCall +
         price_ * static_cast<double>(trace_.contents[content].bytes);
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
  moved_ = 0;
  for (size_t i = 0; i < decisions_.size(); ++i) {
    if (is_moved(decisions_[i])) moved_ += trace_.contents[i].bytes;
  }
  runs_.assign(routes_.repeats.size(), {});
  backs_.assign(trace_.contents.size(), 0);
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

// Whether a content that has come in a slot, for this need, is held from then on.
bool Search::stays(int32_t content, const Need& need) const {
  const auto& span = spans_[content];
  if (span.until < need.slot) return false;
  if (content == need.content && span.opened == need.slot) return true;
  const Decision decision = decisions_[content];
  const bool is_once = decision == Decision::kDrop || decision == Decision::kMove;
  return is_once && (trace_.contents[content].closed >= 0 || span.opened >= need.slot);
}

// Returns when a repeat runs, and sets when its results have memory.
Search::Runs Search::follow(int32_t repeat) {
  find_needs(repeat);
  const auto& makes = routes_.repeats[repeat].makes;
  Runs runs;
  for (const int32_t made : makes) {
    held_until_[made] = -1;
    if (is_moved(decisions_[made])) {
      follow_moved(made);
      continue;
    }
    if (backs_[made] > 0) set_backs(made, 0);
    if (decisions_[made] != Decision::kKeep) continue;
    Stay stay = {spans_[made].kept_from, spans_[made].until + 1};
    for (const Need& need : needs_) {
      if (need.content == made) stay.to = std::max(stay.to, need.slot + 1);
    }
    set_stay(made, stay);
  }
  const auto is_dropped = [&](int32_t made) {
    return decisions_[made] == Decision::kDrop || decisions_[made] == Decision::kDropTwice;
  };
  for (const Need& need : needs_) {
    if (!is_dropped(need.content) || held_until_[need.content] >= need.slot) continue;
    runs.add(need.slot);
    for (const int32_t made : makes) {
      if (!is_dropped(made) || held_until_[made] >= 0 || !stays(made, need)) continue;
      held_until_[made] = spans_[made].until;
      set_stay(made, {need.slot, spans_[made].until + 1});
    }
  }
  for (const int32_t made : makes) {
    if (is_dropped(made) && held_until_[made] < 0) set_stay(made, {});
  }
  return runs;
}

void Search::follow_moved(int32_t content) {
  int32_t backs = 0;
  Stay stay;
  for (const Need& need : needs_) {
    if (need.content != content || held_until_[content] >= need.slot) continue;
    ++backs;
    if (!stays(content, need)) continue;
    held_until_[content] = spans_[content].until;
    stay = {need.slot, spans_[content].until + 1};
  }
  set_stay(content, stay);
  set_backs(content, backs);
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

void Search::set_backs(int32_t content, int32_t backs) {
  const int32_t more = backs - backs_[content];
  if (more == 0) return;
  old_backs_.emplace_back(content, backs_[content]);
  backs_[content] = backs;
  seconds_ += more * seconds_to_move(content);
  too_often_ = too_often_ || (more > 0 && backs > kMostRuns);
}

void Search::decide(int32_t content, Decision decision) {
  const int32_t more = int32_t(is_moved(decision)) - int32_t(is_moved(decisions_[content]));
  moved_ += more * trace_.contents[content].bytes;
  decisions_[content] = decision;
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
  decide(content, decision);
  old_runs_.clear();
  old_backs_.clear();
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
  decide(changed_, before_);
  for (const auto& [content, backs] : old_backs_) backs_[content] = backs;
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

bool Search::Candidate::operator<(const Candidate& other) const {
  return score != other.score ? score < other.score : content > other.content;
}

double Search::score(int32_t content, Decision decision) {
  change(content, decision, true);
  const auto lowered = too_often_ ? 0 : static_cast<double>(gain());
  undo();
  return lowered / std::max(seconds_, kLeastSeconds);
}

bool Search::is_possible(int32_t content, Decision decision) const {
  if (!routes_.can(content, decision)) return false;
  if (!is_moved(decision) || is_moved(decisions_[content])) return true;
  return moved_ + trace_.contents[content].bytes <= most_moved_;
}

// Adds the changes that may lower memory where it is over the level, with bounds of their scores.
void Search::push_candidates(int32_t content, std::vector<Candidate>& heap) {
  const auto push = [&](Decision decision, int64_t gain, double seconds) {
    if (gain <= 0 || !is_possible(content, decision)) return;
    const double score = static_cast<double>(gain) / std::max(seconds, kLeastSeconds);
    Candidate candidate = {score, content, decision, 0};
    candidate.number = ++pushed(candidate);
    heap.push_back(candidate);
    std::push_heap(heap.begin(), heap.end());
  };
  const auto& span = spans_[content];
  const auto bytes = trace_.contents[content].bytes;
  const int32_t number = routes_.repeat_of[content];
  const Repeat& repeat = routes_.repeats[number];
  const int32_t end = span.opened >= 0 ? span.opened : span.until + 1;
  const Decision now = decisions_[content];
  if (now == Decision::kKeep) {
    const int64_t gain = profile_.gain(span.kept_from, end, -bytes);
    push(Decision::kDrop, gain, runs_[number].count > 0 ? 0 : repeat.seconds);
    push(Decision::kMove, gain, seconds_to_move(content));
    return;
  }
  if (now == Decision::kMove && backs_[content] > 0) {
    push(Decision::kMoveTwice, profile_.gain(first_need_, end, -bytes), seconds_to_move(content));
  }
  if (is_moved(now) || runs_[number].count == 0) return;
  const int32_t from = runs_[number].slots[0];
  if (now == Decision::kDrop) {
    push(Decision::kDropTwice, profile_.gain(from, end, -bytes), repeat.seconds);
  }
  // Keeping or moving it helps where that lets others, which it is computed from, come back later,
  // and moving it where these are kept for it.
  const bool has_dropped = std::any_of(repeat.reads.begin(), repeat.reads.end(), [&](int32_t read) {
    return decisions_[read] != Decision::kKeep;
  });
  if (!has_dropped && !is_possible(content, Decision::kMove)) return;
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max() / 4;
  const int64_t most = profile_.gain(from, simulator_.timeline().size(), -kAll);
  if (has_dropped) push(Decision::kKeep, most, 0);
  push(Decision::kMove, most, 0);
}

// Adds the changes whose scores may have grown because of a change of `content`.
void Search::push_candidates_around(int32_t content, std::vector<Candidate>& heap) {
  const Repeat& repeat = routes_.repeats[routes_.repeat_of[content]];
  for (const int32_t made : repeat.makes) push_candidates(made, heap);
  for (const int32_t read : repeat.reads) push_candidates(read, heap);
  for (const int32_t user : routes_.users[content]) {
    for (const int32_t made : routes_.repeats[user].makes) push_candidates(made, heap);
  }
}

bool Search::lower(int64_t level, int64_t aim) {
  profile_.set_level(aim);
  pushed_.assign(kDecisions * decisions_.size(), 0);
  std::vector<Candidate> heap;
  for (const int32_t content : routes_.free) push_candidates(content, heap);
  while (profile_.most() > level && !heap.empty() && !is_stopped()) {
    work_ += 1 + simulator_.timeline().size() / 256;
    std::pop_heap(heap.begin(), heap.end());
    Candidate best = heap.back();
    heap.pop_back();
    if (decisions_[best.content] == best.decision || best.number != pushed(best)) continue;
    if (best.content == fixed_ || !is_possible(best.content, best.decision)) continue;
    // Scores fall as others change. One that is still about the best is taken.
    best.score = score(best.content, best.decision);
    if (best.score <= 0) continue;
    if (!heap.empty() && best.score * kTolerance < heap.front().score) {
      heap.push_back(best);
      std::push_heap(heap.begin(), heap.end());
      continue;
    }
    change(best.content, best.decision);
    commit();
    push_candidates_around(best.content, heap);
  }
  return profile_.most() <= level;
}

void Search::put_back(int64_t level) {
  profile_.set_level(level);
  static constexpr Decision kBetter[] = {Decision::kKeep, Decision::kDrop, Decision::kMove};
  for (const int32_t content : by_worth_) {
    if (is_stopped()) return;
    ++work_;
    if (content == fixed_) continue;
    for (const Decision decision : kBetter) {
      const Decision now = decisions_[content];
      if (now == Decision::kKeep) break;
      if (now == decision || !is_possible(content, decision)) continue;
      if (decision == Decision::kKeep && !may_be_kept(content)) continue;
      change(content, decision, true);
      const bool is_other_way = decision != Decision::kKeep && is_moved(now) != is_moved(decision);
      const bool is_faster = is_other_way ? seconds_ < 0 : seconds_ <= 0;
      if (is_faster && !too_often_ && fits()) {
        commit();
      } else {
        undo();
      }
    }
  }
}

void Search::force(int32_t content, Decision decision) {
  change(content, decision);
  commit();
  fixed_ = content;
}

}  // namespace memsave_ext::plan

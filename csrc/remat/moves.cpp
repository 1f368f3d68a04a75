#include <algorithm>
#include <limits>

#include "remat/search.h"

namespace memsave_ext::remat {
namespace {

// Moves that take no time are worth as if they took this.
constexpr double kLeastSeconds = 1e-9;
// A move whose score is smaller than the best bound by less than this factor is taken.
constexpr double kTolerance = 1.2;

}  // namespace

bool Search::Move::operator<(const Move& other) const {
  return score != other.score ? score < other.score : content > other.content;
}

double Search::score(int32_t content, Decision decision) {
  change(content, decision, true);
  const auto lowered = too_often_ ? 0 : static_cast<double>(gain());
  undo();
  return lowered / std::max(seconds_, kLeastSeconds);
}

// Adds the moves that may lower memory where it is over the level, with bounds of their scores.
void Search::push_moves(int32_t content, std::vector<Move>& heap) {
  const auto push = [&](Decision decision, int64_t gain, double seconds) {
    if (gain <= 0) return;
    const double score = static_cast<double>(gain) / std::max(seconds, kLeastSeconds);
    Move move = {score, content, decision, 0};
    move.number = ++pushed(move);
    heap.push_back(move);
    std::push_heap(heap.begin(), heap.end());
  };
  const auto& span = spans_[content];
  const auto bytes = trace_.contents[content].bytes;
  const int32_t number = routes_.repeat_of[content];
  const Repeat& repeat = routes_.repeats[number];
  const int32_t end = span.opened >= 0 ? span.opened : span.until + 1;
  if (decisions_[content] == Decision::kKeep) {
    push(Decision::kDrop, profile_.gain(span.kept_from, end, -bytes),
         runs_[number].count > 0 ? 0 : repeat.seconds);
    return;
  }
  if (runs_[number].count == 0) return;
  const int32_t from = runs_[number].slots[0];
  if (decisions_[content] == Decision::kDrop) {
    push(Decision::kDropTwice, profile_.gain(from, end, -bytes), repeat.seconds);
  }
  // Keeping it helps where that lets others, which it is computed from, be recomputed later.
  const bool has_dropped = std::any_of(repeat.reads.begin(), repeat.reads.end(), [&](int32_t read) {
    return decisions_[read] != Decision::kKeep;
  });
  if (has_dropped) {
    constexpr int64_t all = std::numeric_limits<int64_t>::max() / 4;
    push(Decision::kKeep, profile_.gain(from, simulator_.timeline().size(), -all), 0);
  }
}

// Adds the moves whose scores may have grown because of a change of `content`.
void Search::push_moves_around(int32_t content, std::vector<Move>& heap) {
  const Repeat& repeat = routes_.repeats[routes_.repeat_of[content]];
  for (const int32_t made : repeat.makes) push_moves(made, heap);
  for (const int32_t read : repeat.reads) push_moves(read, heap);
  for (const int32_t user : routes_.users[content]) {
    for (const int32_t made : routes_.repeats[user].makes) push_moves(made, heap);
  }
}

bool Search::lower(int64_t level, int64_t aim) {
  profile_.set_level(aim);
  pushed_.assign(3 * decisions_.size(), 0);
  std::vector<Move> heap;
  for (const int32_t content : routes_.droppable) push_moves(content, heap);
  while (profile_.most() > level && !heap.empty() && !is_stopped()) {
    work_ += 1 + simulator_.timeline().size() / 256;
    std::pop_heap(heap.begin(), heap.end());
    Move move = heap.back();
    heap.pop_back();
    if (decisions_[move.content] == move.decision || move.number != pushed(move)) continue;
    if (move.content == fixed_) continue;
    // Scores fall as others move. One that is still about the best is taken.
    move.score = score(move.content, move.decision);
    if (move.score <= 0) continue;
    if (!heap.empty() && move.score * kTolerance < heap.front().score) {
      heap.push_back(move);
      std::push_heap(heap.begin(), heap.end());
      continue;
    }
    change(move.content, move.decision);
    commit();
    push_moves_around(move.content, heap);
  }
  return profile_.most() <= level;
}

void Search::put_back(int64_t level) {
  profile_.set_level(level);
  for (const int32_t content : by_worth_) {
    if (is_stopped()) return;
    ++work_;
    if (content == fixed_) continue;
    for (const Decision decision : {Decision::kKeep, Decision::kDrop}) {
      if (decisions_[content] <= decision) break;
      if (decision == Decision::kKeep && !may_be_kept(content)) continue;
      change(content, decision, true);
      if (seconds_ <= 0 && !too_often_ && fits()) {
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

}  // namespace memsave_ext::remat

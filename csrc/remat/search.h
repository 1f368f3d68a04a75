// Changes decisions one by one so that memory falls below a level at little time.
#pragma once

#include <cstdint>
#include <vector>

#include "remat/routes.h"
#include "remat/simulate.h"

namespace memsave_ext::remat {

// The memory of a step under decisions that change, close to that of a Simulator: it leaves out
// what is on the way, and what is held longer because it is read late, between two calls of set().
class Search {
 public:
  Search(Simulator& simulator, const Routes& routes);

  // Simulates these decisions.
  Simulator::Result set(std::vector<Decision> decisions);
  const std::vector<Decision>& decisions() const { return decisions_; }

  // Drops, and keeps what makes others wait in memory, until memory is at most `level`. Returns
  // whether it is.
  bool lower(int64_t level);
  // Keeps what fits below `level`, the most seconds per byte first.
  void put_back(int64_t level);

 private:
  struct Move {
    double score;  // what memory over the level falls by, per second
    int32_t content;
    Decision decision;
    int32_t round;  // in which the score was found
    bool operator<(const Move& other) const;
  };
  struct Piece {
    int32_t slot;
    int64_t bytes;  // that memory grows by from this slot on
  };

  void change(int32_t content, Decision decision);
  void undo();
  void commit();
  void move_start(int32_t content, int32_t start);
  int32_t repeat_at(int32_t repeat) const;
  int32_t start_of(int32_t content) const;
  double seconds_of(int32_t content, Decision decision) const;
  bool is_allowed(int32_t content, Decision decision) const;
  bool runs_too_often(const Repeat& repeat) const;
  template <class Function>
  void each_stretch(Function&& function) const;
  int64_t gain(int64_t level) const;
  bool fits(int64_t level);
  double score(int32_t content, Decision decision, int64_t level);
  void push_moves(int32_t content, std::vector<Move>& heap) const;

  Simulator& simulator_;
  const Routes& routes_;
  const Trace& trace_;
  const std::vector<Timeline::Span>& spans_;
  std::vector<int32_t> by_worth_;  // droppable contents, the most seconds per byte first
  std::vector<Decision> decisions_;
  std::vector<int64_t> memory_;   // by slot
  std::vector<int32_t> at_;       // by repeat: the slot in which it runs; kNever
  std::vector<int32_t> start_;    // by content: the slot in which its memory begins
  std::vector<int32_t> dropped_;  // by repeat: how many of `makes` are dropped
  std::vector<int32_t> runs_;     // by call, of those on the way
  // The change that is being tried.
  int32_t changed_ = -1;
  Decision before_ = Decision::kKeep;
  std::vector<std::pair<int32_t, int32_t>> old_at_, old_start_;
  std::vector<Piece> pieces_;
  std::vector<int32_t> pending_;  // repeats, as a heap
  int32_t tight_ = 0;             // a slot in which something did not fit
};

}  // namespace memsave_ext::remat

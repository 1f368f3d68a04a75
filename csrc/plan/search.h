// Searches for plans: changes decisions one by one so that memory falls below a level at little
// time.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan/constants.h"
#include "plan/simulate.h"

namespace memsave_ext::plan {

// What a call makes again, by number. One that makes what can only be moved never runs.
struct Repeat {
  std::vector<int32_t> makes;  // contents that can be dropped or moved
  std::vector<int32_t> reads;  // such contents, directly or through what nobody saved
  std::vector<int32_t> calls;  // that make what nobody saved, on the way
  double seconds = 0;          // with these
};

// Which contents of a trace need not be kept, what each is recomputed from, and what that takes.
struct Routes {
  Routes(const Simulator& simulator, bool moves);

  bool can(int32_t content, Decision decision) const {
    return decision == Decision::kKeep ||
           (is_moved(decision) ? can_be_moved : can_be_dropped)[content] != 0;
  }

  std::vector<Repeat> repeats;                        // in the order of forward
  std::vector<int32_t> free;                          // contents, in the order of their making
  std::vector<int32_t> repeat_of;                     // by content: that makes it; -1: it is kept
  std::vector<std::vector<int32_t>> users;            // by content: the repeats that read it
  std::vector<uint8_t> can_be_dropped, can_be_moved;  // by content
};

// The memory of a step by slot, and what of it is over a level. Sums over many slots look at blocks
// of them.
class Profile {
 public:
  void set(const std::vector<int64_t>& memory, int64_t level);
  void set_level(int64_t level);

  int64_t level() const { return level_; }
  int64_t most() const;
  // By how much the sum of what is over the level falls where memory grows by `bytes` in the slots
  // [from, to).
  int64_t gain(int32_t from, int32_t to, int64_t bytes) const;
  void add(int32_t from, int32_t to, int64_t bytes);
  // Whether memory stays below the level where it grows by `bytes` > 0 in the slots [from, to).
  bool fits(int32_t from, int32_t to, int64_t bytes);

 private:
  static constexpr int32_t kSlots = 64;
  struct Block {
    int64_t least, most;
    int64_t over;   // the sum in it
    int64_t added;  // to all of its slots, besides what is in memory_
  };

  int32_t end_of(int32_t block) const;
  void update(int32_t block);
  int64_t gain_in(const Block& sums, int32_t from, int32_t to, int64_t bytes) const;

  int64_t level_ = 0;
  std::vector<int64_t> memory_;
  std::vector<Block> blocks_;
  int32_t tight_ = 0;  // a slot in which something did not fit
};

// The memory of a step under decisions that change. Between two calls of set() it leaves out what
// is on the way, and is else that of a Simulator.
class Search {
 public:
  Search(Simulator& simulator, const Routes& routes, int64_t most_moved);

  // To bring a content back costs so many seconds for each of its bytes, besides the host's.
  void set_price(double seconds_per_byte);
  // Simulates these decisions.
  Simulator::Result set(std::vector<Decision> decisions);
  const std::vector<Decision>& decisions() const { return decisions_; }

  // Drops, and keeps what makes others wait in memory, until memory is at most `level`. Takes first
  // what lowers memory over `aim` most per second: with one below the level, large contents are
  // preferred to many small ones. Returns whether memory is at most `level`.
  bool lower(int64_t level, int64_t aim);
  // Changes one decision, which then stays until set() is called.
  void force(int32_t content, Decision decision);
  // Keeps what fits below `level`, the most seconds per byte first.
  void put_back(int64_t level);

  // From so many visits of slots and repeats on, all in all, lower() and put_back() end early.
  void stop_at(int64_t most) { most_work_ = most; }
  bool is_stopped() const { return work_ >= most_work_; }

 private:
  struct Candidate {
    double score;  // what memory over the level falls by, per second
    int32_t content;
    Decision decision;
    int32_t number;  // counts up; only the latest one of a content and a decision holds
    bool operator<(const Candidate& other) const;
  };
  // The slots in which a repeat runs, in order. More than these few are not noted.
  struct Runs {
    int32_t count = 0;
    int32_t slots[3] = {};
    bool operator==(const Runs& other) const;
    void add(int32_t slot);
  };
  // The slots [from, to) in which a content has memory.
  struct Stay {
    int32_t from = 0, to = 0;
  };
  struct Piece {
    int32_t slot;
    int64_t bytes;  // that memory grows by from this slot on
  };
  struct Need {
    int32_t slot, content;
  };

  void change(int32_t content, Decision decision, bool only_allowed = false);
  void undo();
  void commit();
  void find_needs(int32_t repeat);
  Runs follow(int32_t repeat);
  void follow_moved(int32_t content);
  bool stays(int32_t content, const Need& need) const;
  void set_runs(int32_t repeat, const Runs& runs);
  void set_backs(int32_t content, int32_t backs);
  void decide(int32_t content, Decision decision);
  void set_stay(int32_t content, Stay stay);
  void add_piece(int32_t from, int32_t to, int64_t bytes);
  template <class Function>
  void each_stretch(Function&& function) const;
  int64_t gain() const;
  bool fits();
  bool may_be_kept(int32_t content);
  double score(int32_t content, Decision decision);
  double seconds_to_move(int32_t content) const;
  bool is_possible(int32_t content, Decision decision) const;
  void push_candidates(int32_t content, std::vector<Candidate>& heap);
  void push_candidates_around(int32_t content, std::vector<Candidate>& heap);
  int32_t& pushed(const Candidate& candidate) {
    return pushed_[kDecisions * candidate.content + static_cast<int32_t>(candidate.decision)];
  }

  Simulator& simulator_;
  const Routes& routes_;
  const Trace& trace_;
  const std::vector<Timeline::Span>& spans_;
  const int64_t most_moved_;
  double price_ = 0;
  std::vector<int32_t> by_worth_;  // free contents, the most seconds per byte first
  std::vector<Decision> decisions_;
  Profile profile_;
  int64_t moved_ = 0;            // bytes
  std::vector<Runs> runs_;       // by repeat
  std::vector<int32_t> backs_;   // by content: how often it is brought back
  std::vector<int32_t> on_way_;  // by call: how often it runs on the way
  std::vector<Stay> stays_;      // by content
  int32_t first_need_ = 0;       // the first slot from which stays depend on other decisions
  int64_t work_ = 0, most_work_ = std::numeric_limits<int64_t>::max();
  int32_t fixed_ = -1;  // a content whose decision must not change; -1: none
  // The change that is being tried.
  int32_t changed_ = -1;
  Decision before_ = Decision::kKeep;
  std::vector<std::pair<int32_t, Runs>> old_runs_;
  std::vector<std::pair<int32_t, int32_t>> old_backs_;
  std::vector<std::pair<int32_t, Stay>> old_stays_;
  std::vector<Piece> pieces_;
  double seconds_ = 0;      // that it adds
  bool too_often_ = false;  // an operator would run again too often
  // Room for what change() works with.
  std::vector<int32_t> pending_;  // repeats, as a heap
  std::vector<Need> needs_;
  std::vector<int32_t> pushed_;      // by content and decision: how many candidates were added
  std::vector<int32_t> held_until_;  // by content
};

}  // namespace memsave_ext::plan

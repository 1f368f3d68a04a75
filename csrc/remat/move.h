// Moves contents of a block to a store while the step goes on, and back before they are needed.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "remat/content.h"
#include "remat/step.h"
#include "remat/tally.h"
#include "store/store.h"

namespace memsave_ext::remat {

struct MoveFigures {
  int64_t moved = 0, brought_back = 0;  // bytes
  int64_t not_moved = 0;                // bytes for which there was no room
  double waited = 0;                    // seconds
  std::string failure;                  // why, in the words of the system; empty: the limit
};

// Functions may wait, and are called without contents_mutex(), except for want().
class Mover {
 public:
  Mover(Tally& tally, std::shared_ptr<store::Store> store, int64_t limit)
      : tally_(tally), store_(std::move(store)), limit_(limit) {}
  void follow(Step* step) { step_ = step; }  // null without one

  // A content is to be moved once no operator runs that may still change it. `lingers_from`: the
  // moment from which its memory counts as the block's. The caller holds contents_mutex().
  void want(const std::shared_ptr<Content>& content, int32_t lingers_from);
  // Begins to copy what is wanted.
  void begin();
  // Frees what has been copied. Waits until at most so many bytes are left of those that count from
  // a moment before `moment` on.
  void settle(int32_t moment, int64_t may_linger);
  // Waits until a content that is being copied is out: its memory is about to be written.
  void before_write(const std::shared_ptr<Content>& content);
  // Begins to copy a content back, if it is away.
  void bring_back_early(const std::shared_ptr<Content>& content);
  // Returns the memory of a content that is away. Throws where it cannot be read.
  c10::Storage bring_back(const std::shared_ptr<Content>& content);

  bool takes(c10::Device device) const { return store_->takes(device); }
  const store::Store& store() const { return *store_; }
  MoveFigures figures() const;

 private:
  struct Leaving {
    std::weak_ptr<Content> content;
    std::shared_ptr<store::Away> away;
    int32_t lingers_from;
    int64_t bytes;
  };

  void finish(const Leaving& leaving);
  // Calls wait() without the GIL, and adds its time to the figures.
  template <typename Wait>
  void wait_for(const Wait& wait);

  Tally& tally_;
  Step* step_ = nullptr;
  const std::shared_ptr<store::Store> store_;
  const int64_t limit_;
  // Guarded by contents_mutex().
  std::vector<std::pair<std::weak_ptr<Content>, int32_t>> wanted_;
  std::deque<Leaving> leaving_;
  MoveFigures figures_;
};

}  // namespace memsave_ext::remat

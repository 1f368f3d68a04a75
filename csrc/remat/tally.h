// The figures of a block's report: what was decided on contents, what ran again, what was given
// back.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "remat/content.h"

namespace memsave_ext::remat {

// Over contents that were saved, or operators that ran again.
struct Sum {
  int64_t count = 0, bytes = 0;
  // Of operators: that running them again took. Of contents: estimated to recompute the dropped
  // ones, from times measured in the forward.
  double seconds = 0;
};
using Maker = std::pair<int32_t, const Operator*>;  // module number; operator or null
using Sums = std::map<std::pair<Maker, Verdict>, Sum>;
using SumsAgain = std::map<Maker, Sum>;

// Guarded by contents_mutex(), but for `again`, which the block's lock of recomputes guards.
struct Tally {
  Sums saved;
  SumsAgain again;
  int64_t contents_given_back = 0, bytes_given_back = 0;

  // A content was decided on for the first time.
  void decided(Content& content, Verdict verdict);
  // Something else has become of it.
  void changed(Content& content, Verdict verdict);
  // One is kept that nobody has looked at.
  void passed(int32_t module, const Operator* op, int64_t bytes, Verdict verdict);
  void dropped(const Content& content, double seconds);
  void ran_again(const Call& call, double seconds);

 private:
  Sum& sum_of(const Content& content) {
    return saved[{{content.module, content.op}, content.verdict}];
  }
};

}  // namespace memsave_ext::remat

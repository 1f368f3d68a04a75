#include "remat/tally.h"

namespace memsave_ext::remat {

void Tally::decided(Content& content, Verdict verdict) {
  content.verdict = verdict;
  Sum& sum = sum_of(content);
  ++sum.count;
  sum.bytes += content.bytes;
}

void Tally::changed(Content& content, Verdict verdict) {
  Sum& before = sum_of(content);
  --before.count;
  before.bytes -= content.bytes;
  decided(content, verdict);
}

void Tally::passed(int32_t module, const Operator* op, int64_t bytes, Verdict verdict) {
  Sum& sum = saved[{{module, op}, verdict}];
  ++sum.count;
  sum.bytes += bytes;
}

void Tally::dropped(const Content& content, double seconds) {
  saved[{{content.module, content.op}, Verdict::kDropped}].seconds += seconds;
}

void Tally::ran_again(const Call& call, double seconds) {
  Sum& sum = again[{call.module, call.op}];
  ++sum.count;
  sum.seconds += seconds;
  for (const auto& made : call.made) {
    if (const auto content = made.content.lock()) sum.bytes += content->bytes;
  }
}

}  // namespace memsave_ext::remat

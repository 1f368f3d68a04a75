#include "plan/script.h"

#include <algorithm>
#include <utility>

namespace memsave_ext::plan {
namespace {

// By call: whether it is recorded, as it is to be repeated, or as the script has not begun yet.
std::vector<uint8_t> calls_to_record(const Trace& trace, const std::vector<Decision>& decisions,
                                     int32_t first_operator) {
  std::vector<uint8_t> recorded(trace.calls.size());
  std::vector<int32_t> pending;  // contents that are to be recomputed
  for (size_t i = 0; i < trace.contents.size(); ++i) {
    if (decisions[i] != Decision::kKeep) pending.push_back(static_cast<int32_t>(i));
  }
  while (!pending.empty()) {
    const int32_t call = trace.contents[pending.back()].call;
    pending.pop_back();
    if (call < 0 || recorded[call]) continue;
    recorded[call] = 1;
    for (const int32_t read : trace.calls[call].reads) {
      const bool is_kept = trace.contents[read].saved && decisions[read] == Decision::kKeep;
      if (!is_kept) pending.push_back(read);
    }
  }
  for (int32_t i = 0; i < first_operator; ++i) {
    if (trace.operators[i].call >= 0) recorded[trace.operators[i].call] = 1;
  }
  return recorded;
}

}  // namespace

Script script_of(const Trace& trace, const std::vector<Decision>& decisions, int32_t first_operator,
                 int32_t first_save) {
  Script script;
  script.first_operator = first_operator;
  script.first_save = first_save;
  const std::vector<uint8_t> calls = calls_to_record(trace, decisions, first_operator);
  script.all_pass = std::all_of(decisions.begin(), decisions.end(),
                                [](Decision decision) { return decision == Decision::kKeep; });
  for (const TraceOperator& op : trace.operators) {
    // What makes memory without a call, as empty_like(), is seen: it was not there before the step.
    script.recorded.push_back(!script.all_pass && (op.call < 0 || calls[op.call]));
  }
  const auto saves = static_cast<int32_t>(trace.saves.size());
  script.packed.assign(saves, -1);
  std::vector<uint8_t> is_seen(trace.contents.size());
  for (int32_t save = 0; save < saves; ++save) {
    const int32_t content = trace.saves[save];
    if (content < 0) continue;
    const int32_t call = trace.contents[content].call;
    if (save < first_save || save == trace.first_opened || save == trace.last_closed ||
        (call >= 0 && calls[call]) || decisions[content] != Decision::kKeep) {
      script.packed[save] = content;
      is_seen[content] = 1;
    }
  }
  for (int32_t save = 0; save < saves; ++save) {
    const int32_t content = trace.saves[save];
    if (content >= 0 && !std::exchange(is_seen[content], 1))
      script.passing.push_back({content, save});
  }
  return script;
}

}  // namespace memsave_ext::plan

#include "remat/account.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "plan/simulate.h"
#include "remat/operators.h"

namespace memsave_ext::remat {
namespace {

Place place_of(const plan::Trace& trace, const plan::Timeline& timeline, int32_t slot) {
  const auto& openings = timeline.openings;
  Place place;
  place.in_forward = openings.empty() || slot < timeline.spans[openings.front()].opened;
  int32_t latest = -1;
  if (place.in_forward) {
    for (size_t i = 0; i < trace.contents.size(); ++i) {
      const int32_t from = timeline.spans[i].kept_from;
      if (from >= 0 && from <= slot) latest = static_cast<int32_t>(i);
    }
  } else {
    for (const int32_t content : openings) {
      if (timeline.spans[content].opened <= slot) latest = content;
    }
  }
  if (latest >= 0) place.call = trace.contents[latest].call;
  return place;
}

std::string_view schema_name(const Operator* op) {
  return op == nullptr ? std::string_view() : std::string_view(op->name.name);
}

// Between a product and a loss: they change how logits lie, or their type.
bool passes_logits_on(std::string_view name) {
  static constexpr std::string_view names[] = {"aten::_to_copy",    "aten::clone",
                                               "aten::copy_",       "aten::contiguous",
                                               "aten::mul",         "aten::div",
                                               "aten::tanh",        "aten::add",
                                               "aten::slice",       "aten::constant_pad_nd",
                                               "aten::_log_softmax"};
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

}  // namespace

Limit limit_of(const plan::Trace& trace, const plan::Plan& plan) {
  plan::Simulator simulator(trace);
  simulator.run(plan.decisions);
  const plan::Timeline& timeline = simulator.timeline();
  const auto& memory = simulator.memory();
  const auto highest = std::max_element(memory.begin(), memory.end());
  Limit limit;
  if (highest == memory.end()) return limit;
  const auto slot = static_cast<int32_t>(highest - memory.begin());
  limit.place = place_of(trace, timeline, slot);
  limit.others = timeline.memory[slot];
  limit.held = *highest - limit.others;
  simulator.run(plan.decisions, slot);
  limit.kept = simulator.held().kept;
  limit.recomputed = simulator.held().recomputed;
  const auto slot_of = [&](int32_t moment) {
    const auto at = static_cast<size_t>(moment);
    return at < timeline.before.size() ? timeline.before[at] : std::numeric_limits<int32_t>::max();
  };
  for (const auto& kept : trace.on_context) {
    const bool is_there = kept.until < 0 || slot < slot_of(kept.until);
    if (slot_of(kept.from) <= slot && is_there) limit.on_context += kept.bytes;
  }
  for (const auto& [moment, bytes] : trace.left) {
    const auto at = static_cast<size_t>(moment);
    if (moment >= trace.forward && at < timeline.before.size() && timeline.before[at] < slot) {
      limit.made += bytes;
    }
  }
  return limit;
}

std::vector<int32_t> logits_of(const plan::Trace& trace) {
  std::vector<uint8_t> found(trace.contents.size());
  std::vector<int32_t> calls, logits;
  const auto follow = [&](int32_t content) {
    if (found[content]) return;
    found[content] = 1;
    logits.push_back(content);
    if (trace.contents[content].call >= 0) calls.push_back(trace.contents[content].call);
  };
  for (const plan::TraceCall& call : trace.calls) {
    if (schema_name(call.op) != "aten::_log_softmax") continue;
    for (const int32_t made : call.makes) follow(made);
  }
  while (!calls.empty()) {
    const plan::TraceCall& call = trace.calls[calls.back()];
    calls.pop_back();
    if (!passes_logits_on(schema_name(call.op))) continue;
    int64_t largest = 0;
    for (const int32_t made : call.makes) largest = std::max(largest, trace.contents[made].bytes);
    for (const int32_t read : call.reads) {
      // Of another type they are half as large, or twice; a scale or a bias is smaller.
      if (4 * trace.contents[read].bytes >= largest) follow(read);
    }
  }
  return logits;
}

std::vector<int64_t> foreseen(const plan::Trace& trace,
                              const std::vector<plan::Decision>& decisions,
                              const plan::Schedule* schedule) {
  std::vector<plan::Decision> all = decisions;
  all.resize(trace.contents.size(), plan::Decision::kKeep);
  plan::Simulator simulator(trace);
  simulator.correct(all);
  simulator.run(all);
  const plan::Timeline& timeline = simulator.timeline();
  std::vector<int64_t> memory = simulator.memory();
  const size_t openings = schedule == nullptr ? 0 : std::min(all.size(), schedule->back.size());
  for (size_t opened = 0; opened < openings; ++opened) {
    for (const int32_t content : schedule->back[opened]) {
      const int32_t until = simulator.first_back()[content];
      for (int32_t slot = timeline.spans[opened].opened; slot < until; ++slot) {
        memory[slot] += trace.contents[content].bytes;
      }
    }
  }
  std::vector<int64_t> found;
  for (size_t i = 0; i < trace.moments.size(); ++i) {
    const int32_t slot = timeline.before[i];
    int64_t most = trace.moments[i].peak + memory[slot] - timeline.memory[slot];
    // What is recomputed at a moment is measured after it.
    if (i > 0) most = std::max(most, memory[timeline.at[i - 1]]);
    found.push_back(most);
  }
  return found;
}

Deviation deviation_of(const plan::Trace& trace, const plan::Trace& known,
                       const std::vector<plan::Decision>& decisions, const plan::Schedule* schedule,
                       const std::vector<int64_t>& measured) {
  const bool is_same = known.moments.size() == trace.moments.size();
  const std::vector<int64_t> planned =
      foreseen(is_same ? known : trace, decisions, is_same ? schedule : nullptr);
  const int64_t highest = *std::max_element(planned.begin(), planned.end());
  const auto most = std::max_element(measured.begin(), measured.end()) - measured.begin();
  Deviation deviation;
  auto worst = static_cast<size_t>(most);
  if (measured[worst] < highest) {
    worst = static_cast<size_t>(std::max_element(planned.begin(), planned.end()) - planned.begin());
  }
  deviation.measured = measured[worst];
  deviation.foreseen = planned[worst];
  const plan::Timeline timeline(trace);
  deviation.place = place_of(trace, timeline, timeline.before[worst]);
  if (deviation.place->call >= 0) deviation.op = trace.calls[deviation.place->call].op;
  return deviation;
}

}  // namespace memsave_ext::remat

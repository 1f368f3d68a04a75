#include "remat/known.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "cuda_stream.h"
#include "locks.h"
#include "remat/fakes.h"
#include "streams.h"

namespace memsave_ext::remat {
namespace {

constexpr size_t kMostSteps = 1024;
constexpr int64_t kAboutEqual = 500;  // bytes that differ by a five-hundredth are about the same
constexpr int64_t kMostBytes = int64_t{256} << 20;  // of the host, for all of them
constexpr size_t kMostModels = 64;                  // of each step
constexpr int kMostEnds = 4;  // known of steps that are the same until their last decision

// About how much of the host's memory it takes.
int64_t size_of(const Known& step) {
  const auto& trace = step.trace;
  const size_t plans = step.plans.size() + step.moving_plans();  // a byte for each content
  const size_t contents = trace.contents.size() * (sizeof(plan::TraceContent) + plans);
  const size_t calls = trace.calls.size() * (sizeof(plan::TraceCall) + 64);  // with what they list
  const size_t moments = trace.moments.size() * sizeof(plan::TraceMoment);
  const size_t operators = trace.operators.size() * (sizeof(plan::TraceOperator) + sizeof(uint8_t));
  const size_t saves = trace.saves.size() * 2 * sizeof(int32_t);
  const size_t keys = step.keys.size() * sizeof(uint64_t);
  return static_cast<int64_t>(contents + calls + moments + operators + saves + keys);
}

bool has_model(const std::vector<int64_t>& models, int64_t model) {
  return std::find(models.begin(), models.end(), model) != models.end();
}

// The one that was noted first is forgotten where there are too many.
void note_model(std::vector<int64_t>& models, int64_t model) {
  if (has_model(models, model)) return;
  if (models.size() == kMostModels) models.erase(models.begin());
  models.push_back(model);
}

// Makes the step one before which there is already what it allocated for good (gradients, states).
void leave_out(Known& step, const std::map<int32_t, int64_t>& survivors) {
  for (auto& [moment, left] : step.trace.left) {
    if (const auto found = survivors.find(moment); found != survivors.end()) left -= found->second;
  }
  auto& moments = step.trace.moments;
  const auto number = static_cast<int32_t>(moments.size());
  int64_t bytes = 0;  // that are still to be allocated
  for (auto each = survivors.begin(); each != survivors.lower_bound(number); ++each) {
    bytes += each->second;
  }
  step.before += bytes;
  auto next = survivors.begin();
  for (int32_t moment = 0; moment < number; ++moment) {
    // In the interval that ends here it may have been allocated after the peak.
    moments[moment].peak += bytes;
    for (; next != survivors.end() && next->first <= moment; ++next) bytes -= next->second;
    moments[moment].now += bytes;
  }
}

// What had to be kept under one plan is kept under the next one: plans would take turns otherwise.
void keep_what_must_be_kept(const plan::Trace& old, plan::Trace& step) {
  if (old.contents.size() != step.contents.size()) return;
  for (size_t i = 0; i < step.contents.size(); ++i) {
    step.contents[i].must_be_kept |= old.contents[i].must_be_kept;
  }
}

// What recomputing an operator takes besides its results is what it took when it was last
// recomputed, or else in the forward.
void keep_temporary(const plan::Trace& old, plan::Trace& step) {
  if (old.calls.size() != step.calls.size()) return;
  for (size_t i = 0; i < step.calls.size(); ++i) {
    plan::TraceCall& call = step.calls[i];
    if (call.was_repeated || !old.calls[i].was_repeated) continue;
    call.temporary = old.calls[i].temporary;
    call.was_repeated = true;
  }
}

// Times are the shortest measured until there were plans: these must not follow a noisy clock.
void keep_times(Known& old, Known& step) {
  if (old.trace.calls.size() != step.trace.calls.size()) return;
  for (size_t i = 0; i < step.trace.calls.size(); ++i) {
    double& before = old.trace.calls[i].seconds;
    double& now = step.trace.calls[i].seconds;
    if (old.plans.empty()) before = std::min(before, now);
    now = before;
  }
}

struct Devices {
  Lock mutex{LockOrder::kStepsOfDevice};
  std::map<std::pair<int, int>, std::shared_ptr<KnownSteps>> steps;
};

Devices& devices() {
  static auto& all = *new Devices();  // steps may outlive static destruction
  return all;
}

}  // namespace

std::unique_ptr<DeviceTime> DeviceTime::start(c10::Device device) {
  if (is_capturing(device)) return nullptr;
  const auto stream = current_stream(device);
  if (!stream) return nullptr;  // fake tensors, of a device that is not there
  return std::unique_ptr<DeviceTime>(new DeviceTime(*stream));
}

DeviceTime::DeviceTime(c10::Stream stream)
    : stream_(stream),
      begin_(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT),
      end_(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT) {
  begin_.record(stream_);
}

void DeviceTime::stop() { end_.record(stream_); }

std::optional<double> DeviceTime::seconds() const {
  if (is_capturing(stream_.device())) return std::nullopt;  // no event may be queried then
  if (!end_.was_marked_for_recording() || !end_.query() || !begin_.query()) return std::nullopt;
  constexpr double kMillisecond = 1e-3;
  return kMillisecond * begin_.elapsedTime(end_);
}

bool Known::read_times() {
  // The latest first: where the device is not past it, nothing else is asked.
  for (; !times.empty(); times.pop_back()) {
    const auto seconds = times.back().time->seconds();
    if (!seconds) return false;
    for (size_t i = 0; i < calls.size(); ++i) {
      if (calls[i] != times.back().key) continue;
      trace.calls[i].seconds = std::min(trace.calls[i].seconds, *seconds);
    }
  }
  return std::none_of(trace.calls.begin(), trace.calls.end(),
                      [](const plan::TraceCall& call) { return std::isinf(call.seconds); });
}

void Known::prove(const std::vector<plan::Decision>& decisions, int64_t model) {
  scripts_after = std::max(scripts_after - 1, 0);
  if (!proven || proven->decisions != decisions) {
    proven = {decisions, {}};
    script = nullptr;
  }
  note_model(proven->models, model);
}

bool Known::is_proven(const std::vector<plan::Decision>& decisions, int64_t model) const {
  return proven && proven->decisions == decisions && has_model(proven->models, model);
}

bool Known::is_of(int64_t model) const { return has_model(models, model); }

void Known::note_models(const std::vector<int64_t>& more) {
  for (const int64_t model : more) note_model(models, model);
}

bool Known::leaves_like(const Known& other) const {
  const auto left_by_backward = [](const plan::Trace& trace) {
    int64_t bytes = 0;
    for (const auto& [moment, left] : trace.left) bytes += moment >= trace.forward ? left : 0;
    return bytes;
  };
  int64_t highest = 0;
  for (const auto& moment : trace.moments) highest = std::max(highest, moment.peak);
  return std::abs(left_by_backward(trace) - left_by_backward(other.trace)) <= highest / kAboutEqual;
}

bool Known::ends_like(const Known& other) const {
  const auto same_content = [](const plan::TraceContent& x, const plan::TraceContent& y) {
    return x.opened == y.opened && x.closed == y.closed;
  };
  const auto& a = trace.contents;
  const auto& b = other.trace.contents;
  return calls == other.calls && trace.moments.size() == other.trace.moments.size() &&
         std::equal(a.begin(), a.end(), b.begin(), b.end(), same_content) && leaves_like(other);
}

bool Known::is_same_program(const Known& other) const {
  const auto same_content = [](const plan::TraceContent& x, const plan::TraceContent& y) {
    return x.bytes == y.bytes && x.let_go == y.let_go && x.must_be_kept == y.must_be_kept;
  };
  const auto& a = trace.contents;
  const auto& b = other.trace.contents;
  return keys == other.keys && ends_like(other) &&
         std::equal(a.begin(), a.end(), b.begin(), b.end(), same_content);
}

bool Known::is_same_memory(const Known& other) const {
  const auto& a = trace.moments;
  const auto& b = other.trace.moments;
  int64_t highest = 0, difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    highest = std::max(highest, a[i].peak);
    difference = std::max(difference, std::abs((a[i].peak - before) - (b[i].peak - other.before)));
  }
  for (size_t i = 0; i < trace.calls.size(); ++i) {
    const int64_t more = other.trace.calls[i].temporary - trace.calls[i].temporary;
    difference = std::max(difference, std::abs(more));
  }
  return difference <= highest / kAboutEqual;
}

bool Known::is_as_of(int64_t other) const {
  return std::abs(before - other) <= other / kAboutEqual;
}

bool Known::is_same(const Known& other) const {
  return keys == other.keys && missing == other.missing && others == other.others;
}

int KnownSteps::begin(Count::Peak& peak) {
  const std::lock_guard<Lock> lock(mutex_);
  const int others = running_++;
  if (others > 0) {
    overlapped_ = true;
  } else {
    if (next_has_begun_) settle();  // it has not asked for a known one
    overlapped_ = false;
    count.start();
    next_has_begun_ = latest_ != nullptr;
  }
  count.watch(peak);
  return std::min(others, kMostOthers);
}

void KnownSteps::settle() {
  if (!latest_) return;
  const auto survivors = count.survivors();
  if (survivors.of_gradients == 0) {
    leave_out(*latest_, survivors.bytes);
  } else {
    add_with_gradients(*latest_, survivors);
  }
  add(std::move(latest_), false);
}

// The step has made gradients that the next one adds to. It will come with and without them, so
// that it is two. What was derived gives way to what is measured.
void KnownSteps::add_with_gradients(const Known& step, const Count::Survivors& survivors) {
  auto next = std::make_shared<Known>(step);
  leave_out(*next, survivors.bytes);
  next->missing -= survivors.of_gradients;
  const bool is_known = std::any_of(steps_.begin(), steps_.end(), [&](const auto& other) {
    return other->is_same(*next) && other->is_as_of(next->before);
  });
  if (!is_known) add(std::move(next), false);
}

void KnownSteps::end(std::shared_ptr<Known> step, Count::Peak& peak) {
  const std::lock_guard<Lock> lock(mutex_);
  count.unwatch(peak);
  --running_;
  ++ended_;
  if (!step) return;
  step->ended = ended_;
  if (overlapped_) return add(std::move(step), true);
  settle();
  next_has_begun_ = false;
  latest_ = std::move(step);
}

// What is known of a step that ran ahead of this one, whose times are known now. One that began
// with other memory, as before an optimizer has states, is still the one for such a beginning.
void KnownSteps::replace_ahead(Known& step) {
  if (step.is_ahead) return;
  const auto is_replaced = [&](const auto& other) {
    if (!other->is_ahead || !other->is_same(step)) return false;
    step.told |= other->told;
    keep_what_must_be_kept(other->trace, step.trace);
    return other->is_as_of(step.before);
  };
  steps_.erase(std::remove_if(steps_.begin(), steps_.end(), is_replaced), steps_.end());
}

// `overlapped`: its memory is in part that of other steps, which is another each time.
void KnownSteps::add(std::shared_ptr<Known> step, bool overlapped) {
  if (step->times.empty()) replace_ahead(*step);
  // Steps may take turns that differ after their last decision alone, as two losses of one model:
  // each of them is known, as plans would be made anew in every step if one replaced the other.
  auto same = steps_.end();
  int ends = 0;
  for (auto other = steps_.rbegin(); other != steps_.rend(); ++other) {
    if ((*other)->is_ahead != step->is_ahead || !(*other)->is_same(*step)) continue;
    step->told |= (*other)->told;
    step->seen = std::max(step->seen, (*other)->seen + 1);
    same = std::prev(other.base());
    if (++ends == kMostEnds || step->ends_like(**other)) break;
    same = steps_.end();
  }
  if (same != steps_.end()) {
    std::shared_ptr<Known> old = std::move(*same);
    steps_.erase(same);
    const std::vector<int64_t> latest = std::exchange(step->models, old->models);
    step->note_models(latest);
    keep_what_must_be_kept(old->trace, step->trace);
    keep_temporary(old->trace, step->trace);
    const bool are_known = old->read_times();
    if (are_known) keep_times(*old, *step);
    const bool same_program = (are_known || !old->times.empty()) && old->is_same_program(*step);
    // A plan that keeps what it promises stays: the memory of a step is in part its plan's, and two
    // plans of about the same peak would take turns.
    if (same_program && (overlapped || step->proven || old->is_same_memory(*step))) {
      old->seen = step->seen;
      old->ended = step->ended;
      old->note_models(step->models);
      if (step->proven) old->prove(step->proven->decisions, step->proven->models.back());
      step = std::move(old);
    } else {
      step->proven.reset();
      step->scripts_after = old->scripts_after;
      step->latest_wait = old->latest_wait;
      if (same_program) {
        step->plans = old->plans;
        step->plans_are_old = !step->plans.empty();
      }
    }
  } else {
    step->proven.reset();
  }
  steps_.push_back(std::move(step));
  int64_t bytes = 0;
  for (const auto& known : steps_) bytes += size_of(*known);
  while (steps_.size() > kMostSteps || (bytes > kMostBytes && steps_.size() > 1)) {
    // Not the oldest: where steps take turns that is the one that comes next, so that with one too
    // many of them none would ever be planned.
    const auto forgotten = steps_.begin() + static_cast<int64_t>(chance_() % (steps_.size() - 1));
    bytes -= size_of(**forgotten);
    steps_.erase(forgotten);
  }
}

std::shared_ptr<Known> KnownSteps::find(const std::vector<uint64_t>& keys, int64_t before,
                                        int64_t missing, int others, int64_t model, int least_seen,
                                        bool exact) {
  const std::lock_guard<Lock> lock(mutex_);
  settle();
  std::shared_ptr<Known>* place = nullptr;
  int best = 0;  // how well it matches
  for (auto& step : steps_) {
    // Keys are hashes of everything until then, so that the last one speaks for all.
    if (step->keys.size() < keys.size() || step->keys[keys.size() - 1] != keys.back()) continue;
    const bool is_ready = !step->plans.empty() || step->read_times();
    const int match = 32 * int(is_ready) + 16 * int(step->missing == missing) +
                      8 * int(step->others == others) + 4 * int(step->is_as_of(before)) +
                      2 * int(step->is_of(model)) + int(!step->is_ahead);
    if (match < best) continue;
    best = match;
    place = &step;
  }
  if (place == nullptr || (*place)->seen < least_seen) return nullptr;
  const std::shared_ptr<Known> kept_alive = *place;
  Known& found = *kept_alive;
  if (!found.plans.empty() && !(exact && found.plans_are_old)) return kept_alive;
  // Old plans are better than none.
  if (!found.read_times()) return found.plans.empty() ? nullptr : kept_alive;
  if (found.plans.empty()) {
    replace_ahead(found);
    found.plans = plan::plans_of(found.trace);
    return kept_alive;
  }
  // Steps of other threads may follow the old ones.
  *place = std::make_shared<Known>(found);
  (*place)->plans = plan::plans_of(found.trace);
  (*place)->plans_are_old = false;
  return *place;
}

KnownSteps::Numbers KnownSteps::numbers() const {
  const std::lock_guard<Lock> lock(mutex_);
  const auto planned = std::count_if(steps_.begin(), steps_.end(),
                                     [](const auto& step) { return !step->plans.empty(); });
  return {steps_.size(), static_cast<size_t>(planned)};
}

bool KnownSteps::overlapped() const {
  const std::lock_guard<Lock> lock(mutex_);
  return overlapped_;
}

bool KnownSteps::any() const {
  const std::lock_guard<Lock> lock(mutex_);
  return latest_ != nullptr || !steps_.empty();
}

std::shared_ptr<Known> KnownSteps::take_latest() {
  const std::lock_guard<Lock> lock(mutex_);
  next_has_begun_ = false;
  return std::move(latest_);
}

void KnownSteps::expect(std::shared_ptr<Known> step) {
  const std::lock_guard<Lock> lock(mutex_);
  // An equal model's step may have had its optimizer's states from its beginning, where this one
  // makes them in backward.
  const auto is_same = [&](const auto& other) {
    return other->is_same(*step) && other->is_as_of(step->before) && other->leaves_like(*step);
  };
  if (latest_ && is_same(latest_)) return latest_->note_models(step->models);
  const auto known = std::find_if(steps_.begin(), steps_.end(), is_same);
  if (known != steps_.end()) return (*known)->note_models(step->models);
  step->is_ahead = true;
  add(std::move(step), false);
}

std::optional<double> KnownSteps::seconds_of(size_t call, uint64_t key) const {
  const std::lock_guard<Lock> lock(mutex_);
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    const Known& known = **step;
    if (known.is_ahead || known.plans.empty() || call >= known.calls.size()) continue;
    const double seconds = known.trace.calls[call].seconds;
    // Plans may be those of an earlier step like it, and its own times not be read yet.
    if (known.calls[call] == key && std::isfinite(seconds)) return seconds;
  }
  return std::nullopt;
}

bool KnownSteps::knows(uint64_t last_key) const {
  const std::lock_guard<Lock> lock(mutex_);
  const auto is_same = [&](const auto& other) {
    return !other->keys.empty() && other->keys.back() == last_key;
  };
  return (latest_ && is_same(latest_)) || std::any_of(steps_.begin(), steps_.end(), is_same);
}

bool KnownSteps::is_ambiguous(const Known& step, size_t decisions) const {
  constexpr uint64_t kLately = 100;
  return std::any_of(steps_.begin(), steps_.end(), [&](const auto& other) {
    return !other->is_ahead && other->ended + kLately > ended_ && other->keys.size() >= decisions &&
           other->keys[decisions - 1] == step.keys[decisions - 1] && other->keys != step.keys;
  });
}

std::shared_ptr<const plan::Script> KnownSteps::script(Known& step, const plan::Plan& plan,
                                                       int64_t model, size_t decisions,
                                                       size_t operators, size_t saves) const {
  const std::lock_guard<Lock> lock(mutex_);
  if (step.scripts_after > 0 || !step.is_proven(plan.decisions, model)) return nullptr;
  if (is_ambiguous(step, decisions)) return nullptr;
  const auto first_operator = static_cast<int32_t>(operators);
  const auto first_save = static_cast<int32_t>(saves);
  auto& script = step.script;
  if (!script || script->first_operator != first_operator || script->first_save != first_save) {
    script = std::make_shared<const plan::Script>(
        plan::script_of(step.trace, plan.decisions, first_operator, first_save));
  }
  return script;
}

void KnownSteps::came_again(const Known& step) {
  const std::lock_guard<Lock> lock(mutex_);
  const auto is_it = [&](const auto& known) { return known.get() == &step; };
  const auto found = std::find_if(steps_.begin(), steps_.end(), is_it);
  if (found == steps_.end()) return;
  (*found)->ended = ended_ + 1;
  std::rotate(found, found + 1, steps_.end());
}

void KnownSteps::left_script(Known& step) const {
  constexpr int kLongestWait = 1024;
  const std::lock_guard<Lock> lock(mutex_);
  step.proven.reset();
  step.script = nullptr;
  step.scripts_after = step.latest_wait = std::clamp(2 * step.latest_wait, 2, kLongestWait);
}

bool KnownSteps::tell(Known& step) const {
  const std::lock_guard<Lock> lock(mutex_);
  return !std::exchange(step.told, true);
}

void KnownSteps::forget() {
  const std::lock_guard<Lock> lock(mutex_);
  latest_ = nullptr;
  steps_.clear();
}

std::shared_ptr<KnownSteps> known_steps(at::Device device) {
  if (device.is_meta()) return Fakes::current()->steps();
  const std::lock_guard<Lock> lock(devices().mutex);
  auto& found = devices().steps[{static_cast<int>(device.type()), device.index()}];
  if (!found) found = std::make_shared<KnownSteps>(device);
  return found;
}

void forget_known_steps() {
  const std::lock_guard<Lock> lock(devices().mutex);
  for (auto& [device, steps] : devices().steps) steps->forget();
}

namespace {

// Where a store has become so much faster or slower, plans are made again.
constexpr double kOtherSpeed = 3;

Lock moving_mutex{LockOrder::kMovingPlans};  // for latest_moving of all

}  // namespace

size_t Known::moving_plans() const {
  const std::lock_guard<Lock> lock(moving_mutex);
  return latest_moving.plans ? latest_moving.plans->plans.size() : 0;
}

std::shared_ptr<plan::MovingPlans> Known::moving(const std::shared_ptr<store::Store>& store,
                                                 int64_t most_moved) {
  const store::Speed speed = store->speed();
  const std::lock_guard<Lock> lock(moving_mutex);
  // Pinned memory is given back: torch's allocator keeps it for the next block.
  if (!store->uses_streams()) latest_moving.file = store;
  const auto is_as = [](double a, double b) {
    return a <= kOtherSpeed * b && b <= kOtherSpeed * a;
  };
  auto& latest = latest_moving.plans;
  if (latest && latest->most_moved == most_moved && is_as(latest->speed.out, speed.out) &&
      is_as(latest->speed.back, speed.back)) {
    return latest;
  }
  latest = std::make_shared<plan::MovingPlans>(trace, plans, speed, most_moved);
  return latest;
}

}  // namespace memsave_ext::remat

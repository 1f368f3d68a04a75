#include "remat/step.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "locks.h"
#include "plan/simulate.h"
#include "remat/content.h"

namespace memsave_ext::remat {
namespace {

// A block that is open for many steps would write down more and more of them, to no use.
constexpr size_t kMostMoments = 100000;

// Steps without a budget do not count the memory that lived before them. This value of missing_
// keeps them apart from the same steps within a budget: else each would replace the other's plans
// whenever the two alternate.
constexpr int64_t kNothingCounts = -1;

uint64_t mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x9E3779B97F4A7C15u + (hash << 6) + (hash >> 2);
}

// A content that has no number yet is written into trace_.saves as -2 minus the position of its
// first save. The function is its own inverse.
int32_t as_save(int32_t save) { return -2 - save; }

// Of an operator and the types and sizes of its arguments.
uint64_t key_of(const Operator& op, c10::ArrayRef<const c10::IValue> inputs) {
  uint64_t hash = mix(0, op.key);
  for (const auto& input : inputs) {
    for_tensors(input, [&](const at::Tensor& tensor, int64_t) {
      hash = mix(hash, static_cast<uint64_t>(tensor.scalar_type()) + 1);
      if (!is_plain(tensor)) return;
      for (const int64_t size : tensor.sizes()) hash = mix(hash, static_cast<uint64_t>(size) + 1);
    });
  }
  return hash;
}

}  // namespace

Step::Step(Budget budget, bool may_pass)
    : budget_(budget),
      shared_(known_steps(budget.device)),
      others_(shared_->begin(since_look_) * int(budget.is_limit())),
      may_pass_(may_pass && others_ == 0),
      bytes_(budget.bytes),
      missing_(budget.is_limit() ? 0 : kNothingCounts) {}

Step::~Step() { abandon(); }

void Step::count(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gradients,
                 int64_t missing) {
  const std::lock_guard<Lock> lock(mutex_);
  const int64_t before = shared_->count.before();
  shared_->count.add(tensors, false);
  shared_->count.add(gradients, true);
  missing_ += missing;
  if (keys_.empty()) return;
  if (script_) leave_script();
  // It was there from the beginning, of which the next step like this one will know.
  const int64_t more = shared_->count.before() - before;
  before_ += more;
  live_ += more;
  for (auto& moment : trace_.moments) {
    moment.now += more;
    moment.peak += more;
  }
  if (!has_left_) followed_ ? find() : follow(nullptr);
}

int32_t Step::number_of(Content& content) {
  if (content.number >= 0) return content.number;
  content.number = static_cast<int32_t>(trace_.contents.size());
  trace_.contents.emplace_back().bytes = content.bytes;
  contents_.push_back(content.weak_from_this());
  if (content.save >= 0 && content.save < static_cast<int32_t>(trace_.saves.size())) {
    trace_.saves[content.save] = content.number;
  }
  if (!content.external) not_let_go_.push_back(content.number);
  if (!content.call && content.bytes > 0) sources_.emplace_back(content.number, content.storage);
  return content.number;
}

// Of a mask, which its call holds as long as it may be computed again: a plan that drops it, or
// what is computed from it, has these in memory. Returns the position among the trace's contents,
// where nothing but the call stands for it.
int32_t Step::add_bits(const at::Tensor& bits) {
  const auto number = static_cast<int32_t>(trace_.contents.size());
  plan::TraceContent& content = trace_.contents.emplace_back();
  content.bytes = static_cast<int64_t>(bits.nbytes());
  content.let_go = static_cast<int32_t>(trace_.moments.size());
  contents_.emplace_back();
  given_up_.emplace_back(bits.storage().getWeakStorageImpl());
  return number;
}

// Notes which memory that nothing recorded made was given back since the latest operator. Steps
// that follow a plan know.
void Step::look_what_is_emptied() {
  if (plan_ != nullptr && !followed_->is_ahead) return;
  const auto is_emptied = [&](const auto& source) {
    const auto& [number, storage] = source;
    if (storage.expired() || storage._unsafe_get_target()->nbytes() > 0) return false;
    trace_.contents[number].emptied = static_cast<int32_t>(trace_.moments.size());
    return true;
  };
  sources_.erase(std::remove_if(sources_.begin(), sources_.end(), is_emptied), sources_.end());
}

bool Step::is_alias(const c10::Storage& storage) const {
  // What torch's allocators made can be resized. Memory of others is rare, and a search.
  return budget_.device.is_cpu() && !storage.resizable() && shared_->count.holds(storage.data());
}

Step::Began Step::began(const Operator& op, c10::ArrayRef<const c10::IValue> inputs) {
  if (script_) {
    const auto& operators = followed_->trace.operators;
    const plan::TraceOperator& known = operators[operators_ - 1];
    if (known.call < 0) return {known.key};
    const plan::TraceCall& call = followed_->trace.calls[known.call];
    return {known.key, call.seconds, -1, call.module};
  }
  Began began{key_of(op, inputs)};
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_) return began;
  began.position = static_cast<int32_t>(trace_.operators.size());
  trace_.operators.push_back({began.key, -1, static_cast<int32_t>(trace_.saves.size())});
  hash_ = mix(hash_, began.key);
  end_moment();
  look_what_is_emptied();
  const size_t position = calls_.size();
  if (keys_.empty()) {
    began.seconds = shared_->seconds_of(position, began.key);
  } else if (plan_ != nullptr && !followed_->is_ahead && position < followed_->calls.size() &&
             followed_->calls[position] == began.key) {
    // A step that ran ahead has estimated its times.
    began.seconds = followed_->trace.calls[position].seconds;
  }
  return began;
}

bool Step::must_record(const Operator& op, c10::ArrayRef<const c10::IValue> inputs) {
  const auto& operators = followed_->trace.operators;
  const auto position = static_cast<size_t>(operators_++);
  if (position >= operators.size() || operators[position].saves != saves_ ||
      operators[position].key != key_of(op, inputs)) {
    const std::lock_guard<Lock> lock(mutex_);
    leave_script();
    return true;
  }
  // What a factory calls is not seen, and so it has to be known that one runs.
  inner_ = operators[position].inner;
  return script_->recorded[position] || op.is_factory;
}

void Step::inner_began() {
  const std::lock_guard<Lock> lock(mutex_);
  if (!finished_ && !script_ && !trace_.operators.empty()) ++trace_.operators.back().inner;
}

bool Step::must_pack() {
  if (script_ && static_cast<size_t>(saves_) < script_->packed.size()) {
    return script_->packed[saves_++] >= 0;
  }
  const std::lock_guard<Lock> lock(mutex_);
  if (script_) leave_script();
  if (!finished_) trace_.saves.push_back(-1);
  saves_ = static_cast<int32_t>(trace_.saves.size());
  return true;
}

void Step::saved(Content& content) {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_) return;
  if (script_) {
    if (content.number >= 0) return;
    content.number = script_->packed[saves_ - 1];
    contents_.push_back(content.weak_from_this());
    return;
  }
  if (trace_.saves.empty()) return;
  const auto position = static_cast<int32_t>(trace_.saves.size()) - 1;
  if (content.number >= 0) {
    trace_.saves.back() = content.number;
  } else if (content.save < 0) {
    content.save = position;
  } else {
    trace_.saves.back() = as_save(content.save);
  }
}

// Forgets what was recorded until now. The caller holds mutex_.
void Step::forget() {
  std::vector<std::shared_ptr<Content>> seen;  // destroyed without the mutex of contents
  {
    const std::lock_guard<Lock> contents(contents_mutex());
    for (const auto& weak : contents_) {
      const auto& content = seen.emplace_back(weak.lock());
      if (!content) continue;
      content->number = content->save = -1;
      if (content->call) content->call->number = -1;
    }
  }
  contents_.clear();
  not_let_go_.clear();
  on_context_.clear();
  sources_.clear();
  calls_.clear();
  curve_.clear();
  verdicts_.clear();
  hash_ = 0;
  saves_ = inner_ = 0;
  trace_ = {};
}

bool Step::restart() {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_ || !keys_.empty()) return false;
  forget();
  made_before_ = shared_->count.live() - shared_->count.before();
  return true;
}

// The step goes another way than the one whose script it went by: from here on everything is
// written down, and what does not fit in the budget is dropped, as in a step without a plan. The
// caller holds mutex_.
void Step::leave_script() {
  shared_->left_script(*followed_);
  forget();
  script_ = nullptr;
  followed_ = nullptr;
  moving_ = nullptr;
  plan_ = nullptr;
  least_ = 0;
  has_left_ = true;
}

void Step::left() {
  const std::lock_guard<Lock> lock(mutex_);
  if (!finished_ && !script_) end_moment();
}

// Between operators, and where the block is left, is where most contents are let go: what was
// before belongs to the moment that is past, so that the peak of what follows is told apart from
// them. An allocator that has to be asked is asked at the ends of operators alone.
void Step::end_moment() {
  const bool asks = shared_->count.asks();
  if (asks) shared_->count.forget(since_look_);
  const int64_t least = asks ? 0 : take().peak;
  if (!trace_.moments.empty()) {
    trace_.moments.back().peak = std::max(trace_.moments.back().peak, least);
    look_what_is_held(static_cast<int32_t>(trace_.moments.size()) - 1);
  }
}

std::unique_ptr<DeviceTime> Step::start_time(uint64_t key, at::Device device) {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_ || script_) return nullptr;
  // The shortest of so many is about the operator's time without waiting for the host.
  constexpr int kMostTimes = 3;
  const auto is_same = [key](const TimeOfKey& time) { return time.key == key; };
  if (std::count_if(times_.begin(), times_.end(), is_same) >= kMostTimes) return nullptr;
  return DeviceTime::start(device);
}

void Step::keeps(const std::vector<std::shared_ptr<Content>>& contents) {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_ || script_) return;
  for (const auto& content : contents) {
    const auto moment = static_cast<int32_t>(trace_.moments.size());
    on_context_.push_back({trace_.on_context.size(), content->storage, content});
    trace_.on_context.push_back({content->bytes, moment});
  }
}

void Step::begin_proof() {
  const std::lock_guard<Lock> lock(mutex_);
  if (!shared_->count.asks()) {
    before_proof_ = std::max(before_proof_, shared_->count.take(since_look_).peak);
  }
}

void Step::end_proof() {
  const std::lock_guard<Lock> lock(mutex_);
  if (!shared_->count.asks()) peak_ = std::max(peak_, shared_->count.take(since_look_).peak);
}

// Writes down which contents a call reads, makes and writes.
void Step::trace_call(Call& call, const Began& began) {
  const auto number = static_cast<int32_t>(trace_.calls.size());
  plan::TraceCall& traced = trace_.calls.emplace_back();
  traced.op = call.op;
  traced.module = call.module;
  traced.moment = static_cast<int32_t>(trace_.moments.size());
  if (static_cast<size_t>(began.position) < trace_.operators.size()) {
    trace_.operators[began.position].call = number;
  }
  const auto once = [](auto& list, int32_t value) {
    if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
  };
  for (const auto& reference : call.references) {
    const int32_t read = number_of(*reference.content);
    // Not only the shapes of what it reads count: x + x is another program than x + y.
    hash_ = mix(hash_, static_cast<uint64_t>(read) + 1);
    if (!reference.overwritten) once(traced.reads, read);
  }
  if (call.mask.defined()) traced.reads.push_back(add_bits(call.mask));
  for (const bool in_place : {true, false}) {
    for (const auto& made : call.made) {
      const auto content = made.content.lock();
      const bool changes = made.reference >= 0 && !call.references[made.reference].overwritten;
      if (!content || changes != in_place) continue;
      once(traced.makes, number_of(*content));
      trace_.contents[content->number].call = number;
      if (in_place) once(traced.writes, call.references[made.reference].content->number);
    }
  }
  traced.seconds = time_of(call, began);
  calls_.push_back(began.key);
  call.number = number;
}

// The call's, which is given that of the step that is followed where it was not measured.
double Step::time_of(Call& call, const Began& began) {
  double measured = call.measured;
  if (plan_ != nullptr && std::isinf(measured) && calls_.size() < followed_->trace.calls.size()) {
    call.measured = call.seconds = followed_->trace.calls[calls_.size()].seconds;
    if (!followed_->is_ahead) measured = call.measured;
  }
  if (!began.seconds) {
    const auto [known, is_new] = fastest_.try_emplace(began.key, measured);
    if (!is_new) known->second = std::min(known->second, measured);
  }
  return measured;
}

int64_t Step::ended(Call* call, const Began& began, std::unique_ptr<DeviceTime> time) {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_ || script_) return 0;
  if (time) times_.push_back({began.key, std::move(time)});
  if (trace_.moments.size() > kMostMoments) {
    stop();
    return 0;
  }
  if (call != nullptr) trace_call(*call, began);
  ++trace_.forward;
  const int64_t temporary = add_moment();
  if (call != nullptr) trace_.calls.back().temporary = temporary;
  return excess();
}

// Notes how much only the block holds and, given a moment, what nobody else refers to from then on.
void Step::look_what_is_held(std::optional<int32_t> moment) {
  int64_t bytes = 0;
  const auto is_gone = [&](const auto& memory) {
    if (memory.expired()) return true;
    bytes += static_cast<int64_t>(memory._unsafe_get_target()->nbytes());
    return false;
  };
  given_up_.erase(std::remove_if(given_up_.begin(), given_up_.end(), is_gone), given_up_.end());
  c10::SmallVector<std::shared_ptr<Content>, 8> seen;  // destroyed without the mutex
  const std::lock_guard<Lock> lock(contents_mutex());
  const auto is_let_go = [&](int32_t number) {
    const auto& content = seen.emplace_back(contents_[number].lock());
    if (content && !content->is_let_go()) return false;
    trace_.contents[number].let_go = *moment;
    if (content && content->held) content->set_alone(true);
    return true;
  };
  const auto is_over = [&](const OnContext& kept) {
    plan::TraceOnContext& traced = trace_.on_context[kept.number];
    const auto& content = seen.emplace_back(kept.content.lock());
    if (content && content->number >= 0 && trace_.contents[content->number].saved) traced.bytes = 0;
    if (kept.storage.expired()) traced.until = *moment;
    return traced.bytes == 0 || traced.until >= 0;
  };
  if (moment) {
    on_context_.erase(std::remove_if(on_context_.begin(), on_context_.end(), is_over),
                      on_context_.end());
    not_let_go_.erase(std::remove_if(not_let_go_.begin(), not_let_go_.end(), is_let_go),
                      not_let_go_.end());
  }
  held_ = bytes + *alone_;
}

int64_t Step::add_moment() {
  const auto number = static_cast<int32_t>(trace_.moments.size());
  const auto [live, peak] = take(number + 1);
  const int64_t temporary = peak + held_ - live;
  if (number > 0) most_added_ = std::max(most_added_, highest_ - live_);
  look_what_is_held(number);
  live_ = live;
  const int64_t now = live_ - held_;
  trace_.moments.push_back({now, std::max(now, peak)});
  curve_.push_back(std::exchange(highest_, 0));
  return temporary;
}

// Returns the live bytes and the most since the last call, the latter less what only the block
// held.
Count::Bytes Step::take(std::optional<int32_t> mark) {
  auto bytes = shared_->count.take(since_look_, mark);
  bytes.peak = std::max(bytes.peak, std::exchange(before_proof_, 0));
  highest_ = std::max(highest_, bytes.peak);
  peak_ = std::max(peak_, bytes.peak);
  return {bytes.live, bytes.peak - held_};
}

void Step::given_up(const Freed& memory) {
  const std::lock_guard<Lock> lock(mutex_);
  if (script_) return;
  for (const auto& storage : memory) given_up_.emplace_back(storage);
}

bool Step::opened(const Content& content, int32_t save) {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_) return false;
  if (!std::exchange(saw_backward_, true)) {
    shared_->count.look();
    trace_.first_opened = save;
  }
  if (script_ || content.number < 0 || trace_.contents[content.number].opened >= 0) return false;
  trace_.contents[content.number].opened = static_cast<int32_t>(trace_.moments.size());
  add_moment();
  return true;
}

void Step::repeats() {
  const std::lock_guard<Lock> lock(mutex_);
  if (!script_ && !shared_->count.asks()) take();
}

void Step::repeated(const Call& call) {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_ || script_ || call.number < 0 || shared_->count.asks()) return;
  held_ = 0;
  const auto [live, peak] = take();
  plan::TraceCall& traced = trace_.calls[call.number];
  traced.temporary = traced.was_repeated ? std::max(traced.temporary, peak - live) : peak - live;
  traced.was_repeated = true;
}

void Step::recomputed() {
  const std::lock_guard<Lock> lock(mutex_);
  if (script_) return;
  take();
  look_what_is_held(std::nullopt);
}

void Step::gave_way(at::Device device) {
  // Another device's allocator is not asked under the lock of this one.
  if (budget_.device != device) return;
  // Whoever has the mutex may be waiting for the allocator, or for those that give way.
  const std::unique_lock<Lock> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    is_exact_ = false;
    return;
  }
  if (finished_) return;
  take();
  look_what_is_held(std::nullopt);
}

void Step::closed(const Content& content, int32_t save, bool was_last) {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_ || script_) return;
  trace_.last_closed = save;
  if (content.number < 0 || !was_last) return;
  trace_.contents[content.number].closed = static_cast<int32_t>(trace_.moments.size());
  add_moment();
}

// Forgets what was written down. The caller holds mutex_.
void Step::stop() {
  finished_ = true;
  followed_ = nullptr;
  moving_ = nullptr;
  schedule_ = nullptr;
  script_ = nullptr;
  plan_ = nullptr;
  trace_ = {};
  for (auto* list : {&keys_, &calls_}) *list = {};
  curve_ = {};
  contents_ = {};
  not_let_go_ = {};
  on_context_ = {};
  sources_ = {};
  fastest_.clear();
  times_.clear();
  shared_->end(nullptr, since_look_);
}

void Step::abandon() {
  const std::lock_guard<Lock> lock(mutex_);
  if (!finished_) stop();
}

void Step::finish() {
  const std::lock_guard<Lock> lock(mutex_);
  if (std::exchange(finished_, true)) return;
  if (script_) {
    take();
    const bool is_told = saw_backward_ && budget_.is_limit() && !shared_->overlapped();
    if (is_told && !is_as_planned()) {
      deviation_.emplace();
      deviation_->measured = peak_;
      deviation_->foreseen = planned_peak();
      shared_->left_script(*followed_);
    }
    shared_->came_again(*followed_);
    shared_->end(nullptr, since_look_);
    return;
  }
  add_moment();
  for (size_t i = 0; i < calls_.size(); ++i) {
    const auto measured = fastest_.find(calls_[i]);
    if (measured != fastest_.end()) trace_.calls[i].seconds = measured->second;
  }
  auto known = std::make_shared<Known>();
  known->keys = keys_;
  known->trace = trace_;
  for (int32_t& save : known->trace.saves) {
    if (save < -1) save = known->trace.saves[as_save(save)];
  }
  plan::mark_what_must_be_kept(known->trace);
  known->calls = calls_;
  known->times = std::move(times_);
  known->before = before_;
  known->missing = missing_;
  known->others = others_;
  known->models = {model_};
  known->verdicts = verdicts_;
  known->verdicts.resize(trace_.contents.size(), Verdict::kFits);
  if (budget_.is_limit() && saw_backward_) {
    for (const auto& left : shared_->count.living()) known->trace.left.push_back(left);
    if (plan_ != nullptr) compare(known->trace);
  }
  if (plan_ != nullptr && !followed_->is_ahead && !deviation_ && kept_to_budget()) {
    known->prove(plan_->decisions, model_);
  }
  const bool is_worth_it = saw_backward_ && is_exact_ && !has_left_;
  shared_->end(is_worth_it ? std::move(known) : nullptr, since_look_);
}

// These compare the step with its plan. The caller holds mutex_.
int64_t Step::planned_peak() const { return plan_->peak + before_ - followed_->before; }

bool Step::is_as_planned() const {
  constexpr int64_t kTolerated = 100;  // one hundredth
  return std::abs(peak_ - planned_peak()) <= planned_peak() / kTolerated;
}

// Or its plan has not, as there is none within it.
bool Step::kept_to_budget() const {
  constexpr int64_t kTolerated = 500;  // a five-hundredth, about as much as numbers and views
  return planned_peak() > bytes_ || peak_ <= bytes_ + bytes_ / kTolerated;
}

void Step::compare(const plan::Trace& trace) {
  if (is_as_planned()) return;
  deviation_ = deviation_of(trace, followed_->trace, plan_->decisions, schedule_.get(), curve_);
}

// What a step does with a plan.

Choice Step::decide(Content& content) {
  const std::lock_guard<Lock> lock(mutex_);
  const Choice unplanned{bytes_ > 0 ? Drops::kUntilFull : Drops::kCheap, true, std::nullopt,
                         bytes_ > 0};
  if (finished_) return unplanned;
  const Drops none = budget_.is_limit() ? Drops::kUntilFull : Drops::kNothing;
  if (script_) {
    const auto& contents = followed_->trace.contents;
    if (content.number < 0) return {none};
    if (content.bytes == contents[content.number].bytes) return by_script(content);
    leave_script();
  }
  const int32_t number = number_of(content);
  plan::TraceContent& traced = trace_.contents[number];
  if (!std::exchange(traced.saved, true)) {
    traced.decided = static_cast<int32_t>(trace_.moments.size());
  }
  traced.op = content.op;
  traced.module = content.module;
  if (has_left_) return unplanned;
  keys_.push_back(hash_);
  if (keys_.size() == 1) before_ = shared_->count.before() + made_before_;
  // A step that ran ahead is a module's; the real one may go on after it, as with a loss.
  const bool follows = followed_ && (keys_.size() <= followed_->keys.size()
                                         ? followed_->keys[keys_.size() - 1] == hash_
                                         : followed_->is_ahead);
  if (!follows) {
    const std::shared_ptr<Known> before = followed_;  // has its plan
    const plan::Plan* const plan = plan_;
    find();
    if (plan_ != nullptr && decided_like(plan, number)) begin_script(content);
  }
  if (plan_ == nullptr) return unplanned;
  if (script_) return by_script(content);
  // What the running operator reads is not in the hash yet: there may be a content more.
  const auto position = static_cast<size_t>(number);
  if (position >= plan_->decisions.size()) return {none};
  const plan::Decision decision = plan_->decisions[position];
  if (decision == plan::Decision::kKeep) {
    // What earlier steps have found out stays. One that ran ahead had other memory: what can be
    // dropped is found out as without a plan.
    if (followed_->is_ahead) return {none, true, std::nullopt, true};
    return {none, true, !followed_->trace.contents[position].must_be_kept};
  }
  if (plan::is_moved(decision)) {
    Choice choice{Drops::kMove, decision == plan::Decision::kMove};
    choice.lingers_from = followed_->trace.contents[position].let_go;
    return choice;
  }
  return {Drops::kEverything, decision == plan::Decision::kDrop};
}

// Whether what was decided on until now, by a plan of another step, is as the plan has it: a script
// has the peak of its whole plan. The caller holds mutex_.
bool Step::decided_like(const plan::Plan* before, int32_t contents) const {
  if (keys_.size() == 1) return true;  // nothing was
  const auto most = static_cast<size_t>(contents);
  if (before == nullptr || std::min(before->decisions.size(), plan_->decisions.size()) < most) {
    return false;
  }
  return std::equal(plan_->decisions.begin(), plan_->decisions.begin() + contents,
                    before->decisions.begin());
}

// Goes by the script of the plan that was chosen, if there is one. Everything until now was as in
// the step that is followed. The caller holds mutex_.
void Step::begin_script(const Content& content) {
  const plan::Trace& known = followed_->trace;
  const auto number = static_cast<size_t>(content.number);
  if (!may_pass_ || schedule_ || followed_->is_ahead || number >= known.contents.size()) return;
  // Reports name modules by their numbers in a block.
  if (known.contents[number].module != content.module) return;
  operators_ = static_cast<int32_t>(trace_.operators.size());
  script_ = shared_->script(*followed_, *plan_, model_, keys_.size(), trace_.operators.size(),
                            trace_.saves.size());
}

// The caller holds mutex_.
Choice Step::by_script(Content& content) const {
  const plan::TraceContent& known = followed_->trace.contents[content.number];
  content.op = known.op;
  content.module = known.module;
  const plan::Decision decision = plan_->decisions[content.number];
  if (decision != plan::Decision::kKeep) {
    return {Drops::kEverything, decision == plan::Decision::kDrop};
  }
  Choice choice{budget_.is_limit() ? Drops::kUntilFull : Drops::kNothing, true, false};
  choice.verdict = why_kept(content.number);
  return choice;
}

// Of a content that the script keeps. Under another plan, which the known step went by, it may have
// been dropped. The caller holds mutex_.
Verdict Step::why_kept(int32_t content) const {
  const Verdict verdict = followed_->verdicts[content];
  if (verdict == Verdict::kInput || verdict == Verdict::kNotAgain || verdict == Verdict::kFailed) {
    return verdict;
  }
  const plan::TraceContent& known = followed_->trace.contents[content];
  const bool is_heavy = known.op != nullptr && known.op->is_heavy;
  if (is_heavy && (known.call < 0 || !budget_.is_limit())) return Verdict::kHeavy;
  return budget_.is_limit() ? Verdict::kFits : Verdict::kNoGain;
}

void Step::decided(const Content& content, Verdict verdict) {
  const std::lock_guard<Lock> lock(mutex_);
  if (finished_ || script_ || content.number < 0) return;
  verdicts_.resize(trace_.contents.size(), Verdict::kFits);
  verdicts_[content.number] = verdict;
}

void Step::must_keep(const Content& content) {
  const std::lock_guard<Lock> lock(mutex_);
  if (!finished_ && !script_) trace_.contents[content.number].must_be_kept = true;
}

// Finds a step like this one, as far as it has come, and follows a plan of it.
void Step::find() {
  // The calls of a process's first step are slow. Where nothing is promised, and times are
  // measured, a second one is awaited.
  const bool waits = !budget_.is_limit() && !budget_.device.is_meta();
  const int least_seen = waits ? 2 : 1;
  const bool exact = budget_.is_limit();
  follow(shared_->find(keys_, before_, missing_, others_, model_, least_seen, exact));
}

// Chooses the plan of `known` for this budget; null: there is no step like this one.
void Step::follow(std::shared_ptr<Known> known) {
  followed_ = std::move(known);
  plan_ = nullptr;
  moving_ = nullptr;
  schedule_ = nullptr;
  bytes_ = limit();
  least_ = 0;
  if (!followed_) return;
  if (!budget_.is_limit()) {
    plan_ = &plan::best_value(followed_->trace, followed_->plans);
    return;
  }
  const int64_t more = before_ - followed_->before;
  if (budget_.store) moving_ = followed_->moving(budget_.store, budget_.most_moved);
  const auto& plans = moving_ ? moving_->plans : followed_->plans;
  if (budget_.share > 0) {
    const int64_t activations = plans.front().peak + more - before_;
    bytes_ = before_ + missing_ + static_cast<int64_t>(budget_.share * double(activations));
  }
  least_ = plans.back().peak + more;
  plan_ = &plan::plan_within(plans, bytes_ - more);
  if (moving_) schedule_ = moving_->schedule(followed_->trace, *plan_);
}

Step::Moves Step::moves(const Content* opened) const {
  constexpr int32_t kAll = std::numeric_limits<int32_t>::max();
  const std::lock_guard<Lock> lock(mutex_);
  Moves now{kAll, std::numeric_limits<int64_t>::max(), {}};
  if (!schedule_ || finished_) return now;
  if (opened == nullptr) {
    now.moment = static_cast<int32_t>(trace_.moments.size());
    const auto next = std::min(trace_.moments.size(), schedule_->room_before.size() - 1);
    now.may_linger = schedule_->room_before[next];
    return now;
  }
  const auto number = static_cast<size_t>(opened->number);
  if (number >= schedule_->back.size()) return now;
  now.may_linger = schedule_->room_after[number];
  for (const int32_t other : schedule_->back[number]) {
    if (static_cast<size_t>(other) >= contents_.size()) continue;
    if (auto content = contents_[other].lock()) now.come_back.push_back(std::move(content));
  }
  return now;
}

// The caller holds mutex_.
int64_t Step::excess() const {
  if (plan_ != nullptr || bytes_ == 0) return 0;
  // Room for the next operator, and for backward, whose operators add a gradient for each input.
  constexpr int64_t kOperators = 3;
  const int64_t most = bytes_ - kOperators * most_added_;
  const int64_t live = shared_->count.live();
  // Freeing a tenth more than necessary keeps the searches for what to drop few.
  return live <= most ? 0 : live - most + bytes_ / 10;
}

void Step::check() const {
  if (!budget_.strict) return;
  const std::lock_guard<Lock> lock(mutex_);
  const bool refused = plan_ != nullptr && least_ > bytes_;
  TORCH_CHECK_WITH(OutOfMemoryError, !refused, "remat: out of memory. The budget is ", bytes_,
                   " bytes, and a step of these shapes needs at least ", least_,
                   " (strict=True). Use a larger budget or a smaller batch.");
}

// Figures.

bool Step::is_newly_short() {
  const std::lock_guard<Lock> lock(mutex_);
  return plan_ != nullptr && least_ > bytes_ && shared_->tell(*followed_);
}

int64_t Step::before() const {
  const std::lock_guard<Lock> lock(mutex_);
  return before_;
}

std::vector<int64_t> Step::curve() const {
  const std::lock_guard<Lock> lock(mutex_);
  if (!script_) return curve_;
  std::vector<int64_t> planned = foreseen(followed_->trace, plan_->decisions, schedule_.get());
  for (int64_t& bytes : planned) bytes += before_ - followed_->before;
  return planned;
}

int64_t Step::peak() {
  const std::lock_guard<Lock> lock(mutex_);
  if (script_ && !finished_) take();
  return peak_;
}

void Step::each_passed(const std::function<void(const plan::TraceContent&, Verdict)>& visit) const {
  const std::lock_guard<Lock> lock(mutex_);
  if (!script_) return;
  for (const auto& [content, save] : script_->passing) {
    if (save < saves_) visit(followed_->trace.contents[content], why_kept(content));
  }
}

int64_t Step::budget() const {
  const std::lock_guard<Lock> lock(mutex_);
  return bytes_;
}

int64_t Step::least() const {
  const std::lock_guard<Lock> lock(mutex_);
  return least_;
}

std::optional<plan::Plan> Step::plan() const {
  const std::lock_guard<Lock> lock(mutex_);
  return plan_ == nullptr ? std::nullopt : std::optional(*plan_);
}

std::vector<plan::Plan> Step::plans() const {
  const std::lock_guard<Lock> lock(mutex_);
  if (moving_) return moving_->plans;
  return followed_ ? followed_->plans : std::vector<plan::Plan>();
}

double Step::waiting() const {
  const std::lock_guard<Lock> lock(mutex_);
  return schedule_ ? schedule_->waiting : 0;
}

std::optional<Deviation> Step::deviation() const {
  const std::lock_guard<Lock> lock(mutex_);
  return deviation_;
}

plan::Trace Step::trace() const {
  const std::lock_guard<Lock> lock(mutex_);
  return script_ ? followed_->trace : trace_;
}

std::shared_ptr<const Known> Step::followed() const {
  const std::lock_guard<Lock> lock(mutex_);
  return followed_;
}

}  // namespace memsave_ext::remat

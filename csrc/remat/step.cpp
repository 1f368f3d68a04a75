#include "remat/step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "remat/tensors.h"

namespace memsave_ext::remat {
namespace {

// A block that is open for many steps would write down more and more of them, to no use.
constexpr size_t kMostMoments = 100000;

// In place of missing bytes, of steps within no budget, which do not count what lived before: their
// memory is not that of the same step within one, whose plans would be made anew where both take
// turns.
constexpr int64_t kNothingCounts = -1;

uint64_t mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x9E3779B97F4A7C15u + (hash << 6) + (hash >> 2);
}

// Of an operator and the shapes of its arguments.
uint64_t key_of(const Operator& op, const at::RecordFunction& function) {
  uint64_t hash = mix(0, reinterpret_cast<uintptr_t>(&op));
  for (const auto& input : function.inputs()) {
    for_tensors(input, [&](const at::Tensor& tensor, int64_t) {
      hash = mix(hash, static_cast<uint64_t>(tensor.scalar_type()) + 1);
      if (!is_plain(tensor)) return;
      for (const int64_t size : tensor.sizes()) hash = mix(hash, static_cast<uint64_t>(size) + 1);
    });
  }
  return hash;
}

}  // namespace

Step::Step(Budget budget)
    : budget_(budget),
      shared_(known_steps(budget.device)),
      bytes_(budget.bytes),
      missing_(budget.is_limit() ? 0 : kNothingCounts) {
  shared_->begin();
}

Step::~Step() { finish(); }

void Step::count(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gradients,
                 int64_t missing) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t before = shared_->count.before();
  for (const bool are_gradients : {false, true}) {
    for (const auto& tensor : are_gradients ? gradients : tensors) {
      if (is_plain(tensor)) shared_->count.add(tensor.storage(), are_gradients);
    }
  }
  missing_ += missing;
  if (keys_.empty()) return;
  // It was there from the beginning, of which the next step like this one will know.
  const int64_t more = shared_->count.before() - before;
  before_ += more;
  live_ += more;
  for (auto& moment : trace_.moments) {
    moment.now += more;
    moment.peak += more;
  }
  if (followed_) find();
}

int32_t Step::number_of(Content& content) {
  if (content.number >= 0) return content.number;
  content.number = static_cast<int32_t>(trace_.contents.size());
  trace_.contents.emplace_back().bytes = content.bytes;
  contents_.push_back(content.weak_from_this());
  const std::lock_guard<std::mutex> lock(contents_mutex());
  content.alone = alone_;
  if (!content.external) not_let_go_.push_back(content.number);
  return content.number;
}

bool Step::is_alias(const c10::Storage& storage) const {
  // What torch's allocators made can be resized. Memory of others is rare, and a search.
  return budget_.device.is_cpu() && !storage.resizable() && shared_->count.holds(storage.data());
}

uint64_t Step::began(const Operator& op, const at::RecordFunction& function) {
  const uint64_t key = key_of(op, function);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_) return key;
  hash_ = mix(hash_, key);
  // Between operators is where most contents are let go: what was before belongs to the moment
  // that is past, so that the operator's own peak is told apart from them. An allocator that has to
  // be asked is asked at the ends of operators alone.
  const bool asks = shared_->count.asks();
  if (asks) shared_->count.forget_peak();
  const int64_t least = asks ? 0 : take().peak;
  if (!trace_.moments.empty()) {
    trace_.moments.back().peak = std::max(trace_.moments.back().peak, least);
    let_go(static_cast<int32_t>(trace_.moments.size()) - 1);
  }
  held_ = held_alone();
  return key;
}

std::unique_ptr<DeviceTime> Step::start_time(uint64_t key, at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_ || plan_ != nullptr) return nullptr;
  // The shortest of so many is about the operator's time without waiting for the host.
  constexpr int kMostTimes = 3;
  const auto is_same = [key](const TimeOfKey& time) { return time.key == key; };
  if (std::count_if(times_.begin(), times_.end(), is_same) >= kMostTimes) return nullptr;
  return DeviceTime::start(device);
}

void Step::ended(Call* call, uint64_t key, std::unique_ptr<DeviceTime> time) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_) return;
  if (time) times_.push_back({key, std::move(time)});
  if (trace_.moments.size() > kMostMoments) return stop();
  if (call != nullptr) {
    TraceCall& traced = trace_.calls.emplace_back();
    traced.op = call->op;
    const auto number = static_cast<int32_t>(trace_.calls.size()) - 1;
    const auto once = [](std::vector<int32_t>& list, int32_t value) {
      if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
    };
    for (const auto& reference : call->references) {
      const int32_t read = number_of(*reference.content);
      // Not only the shapes of what it reads count: x + x is another program than x + y.
      hash_ = mix(hash_, static_cast<uint64_t>(read) + 1);
      if (!reference.overwritten) once(traced.reads, read);
    }
    for (const bool in_place : {true, false}) {
      for (const auto& made : call->made) {
        const auto content = made.content.lock();
        const bool changes = made.reference >= 0 && !call->references[made.reference].overwritten;
        if (!content || changes != in_place) continue;
        once(traced.makes, number_of(*content));
        trace_.contents[content->number].call = number;
        if (in_place) once(traced.writes, call->references[made.reference].content->number);
      }
    }
    if (plan_ != nullptr && std::isinf(call->measured) &&
        calls_.size() < followed_->trace.calls.size()) {
      call->measured = call->seconds = followed_->trace.calls[calls_.size()].seconds;
    }
    const auto [known, is_new] = fastest_.try_emplace(key, call->measured);
    if (!is_new) known->second = std::min(known->second, call->measured);
    calls_.push_back(key);
  }
  ++trace_.forward;
  add_moment();
}

// Notes which contents nobody but the block refers to any more.
void Step::let_go(int32_t moment) {
  const std::lock_guard<std::mutex> lock(contents_mutex());
  const auto is_let_go = [&](int32_t number) {
    const auto content = contents_[number].lock();
    if (content && !content->is_let_go()) return false;
    trace_.contents[number].let_go = moment;
    if (content && content->held) content->set_alone(true);
    return true;
  };
  not_let_go_.erase(std::remove_if(not_let_go_.begin(), not_let_go_.end(), is_let_go),
                    not_let_go_.end());
}

void Step::add_moment() {
  const auto [live, peak] = take();
  if (!trace_.moments.empty()) most_added_ = std::max(most_added_, highest_ - live_);
  let_go(static_cast<int32_t>(trace_.moments.size()));
  held_ = held_alone();
  live_ = live;
  const int64_t now = live_ - held_;
  trace_.moments.push_back({now, std::max(now, peak)});
  shared_->count.set_mark(static_cast<int32_t>(trace_.moments.size()));
  curve_.push_back(std::exchange(highest_, 0));
}

// Returns the live bytes and the most since the last call, the latter less what only the block
// held.
Count::Bytes Step::take() {
  const auto bytes = shared_->count.take();
  highest_ = std::max(highest_, bytes.peak);
  peak_ = std::max(peak_, bytes.peak);
  return {bytes.live, bytes.peak - held_};
}

int64_t Step::held_alone() {
  int64_t bytes = 0;
  const auto is_gone = [&](const auto& memory) {
    if (memory.expired()) return true;
    bytes += static_cast<int64_t>(memory._unsafe_get_target()->nbytes());
    return false;
  };
  given_up_.erase(std::remove_if(given_up_.begin(), given_up_.end(), is_gone), given_up_.end());
  const std::lock_guard<std::mutex> lock(contents_mutex());
  return bytes + *alone_;
}

void Step::given_up(const Freed& memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& storage : memory) given_up_.emplace_back(storage);
}

void Step::opened(const Content& content) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_ || content.number < 0 || trace_.contents[content.number].opened >= 0) return;
  if (!saw_backward_) shared_->count.look();
  saw_backward_ = true;
  trace_.contents[content.number].opened = static_cast<int32_t>(trace_.moments.size());
  add_moment();
}

void Step::recomputed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  take();
  held_ = held_alone();
}

void Step::closed(const Content& content) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (content.number < 0 || finished_) return;
  trace_.contents[content.number].closed = static_cast<int32_t>(trace_.moments.size());
  add_moment();
}

// Forgets what was written down. The caller holds mutex_.
void Step::stop() {
  finished_ = true;
  followed_ = nullptr;
  plan_ = nullptr;
  trace_ = {};
  for (auto* list : {&keys_, &calls_}) *list = {};
  curve_ = {};
  contents_ = {};
  not_let_go_ = {};
  fastest_.clear();
  times_.clear();
  shared_->end(nullptr);
}

void Step::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(finished_, true)) return;
  add_moment();
  for (size_t i = 0; i < calls_.size(); ++i) trace_.calls[i].seconds = fastest_[calls_[i]];
  auto known = std::make_shared<Known>();
  known->keys = keys_;
  known->trace = trace_;
  known->calls = calls_;
  known->times = std::move(times_);
  known->before = before_;
  known->missing = missing_;
  shared_->end(saw_backward_ ? std::move(known) : nullptr);
}

}  // namespace memsave_ext::remat

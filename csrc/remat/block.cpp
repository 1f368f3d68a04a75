#include "remat/block.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "checkpoint/recomputing.h"
#include "checkpoint/tensors.h"
#include "locks.h"
#include "remat/content.h"
#include "remat/fakes.h"
#include "remat/functions.h"
#include "remat/memory.h"
#include "remat/pause.h"
#include "remat/policy.h"
#include "remat/pool.h"
#include "remat/random.h"
#include "streams.h"

namespace memsave_ext::remat {
namespace {

thread_local Block* current = nullptr;

struct EndOfThread {
  ~EndOfThread() {
    for (const auto& block : Block::all_open()) block->abandon();
  }
};

bool records() {
  return current != nullptr && !Pause::is_on() && !current->is_paused() &&
         torch::autograd::get_current_graph_task_id() == -1;
}

// The longest chain of calls of which no result was kept.
constexpr int kDeepest = 32;
// Plans keep what shortens chains, but the stack must not overflow.
constexpr int kDeepestPlanned = 1000;
// The argument of this package's batch norm that takes the statistics.
constexpr size_t kStatistics = 4;

bool below_autograd() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

// Whether it is a library's that will be called again below autocast, with other arguments.
bool is_cast(const Operator& op) {
  if (op.casts.empty()) return false;
  return !(op.casts - c10::impl::tls_local_dispatch_key_set().excluded_).empty();
}

// Returns the device of the first tensor among `inputs`; `otherwise` where there is none.
at::Device device_of(c10::ArrayRef<const c10::IValue> inputs, at::Device otherwise) {
  if (Fakes::current() != nullptr) return at::kCPU;  // theirs is asked in Python
  for (const auto& input : inputs) {
    std::optional<at::Device> device;
    for_tensors(input, [&](const at::Tensor& tensor, int64_t) {
      if (!device && tensor.defined()) device = tensor.device();
    });
    if (device) return *device;
  }
  return otherwise;
}

// Whether a TorchDispatchMode of others decides what operators give: they are repeated without it.
bool is_changed_by_mode() {
  return Fakes::current() == nullptr && c10::impl::TorchDispatchModeTLS::any_modes_set(true);
}

c10::ArrayRef<const c10::IValue> as_array(const std::vector<c10::IValue>& values) {
  return c10::ArrayRef<const c10::IValue>(values.data(), values.size());
}

// Returns the argument with None in place of its tensors, which the call's references have.
c10::IValue without_tensors(const c10::IValue& argument) {
  if (argument.isTensorList()) return std::vector<at::Tensor>(argument.toTensorList().size());
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    list.resize(argument.toOptionalTensorList().size());
    return list;
  }
  return argument.isTensor() ? c10::IValue() : argument;
}

}  // namespace

Block::Block(Drops drops, const std::shared_ptr<store::Store>& store, int64_t most_moved)
    : drops_(drops) {
  if (store) mover_ = std::make_unique<Mover>(tally_, store, most_moved);
}

Block::Block(Budget budget) : drops_(Drops::kCheap), budget_(std::move(budget)) {
  if (budget_->store) mover_ = std::make_unique<Mover>(tally_, budget_->store, budget_->most_moved);
}

bool Block::is_innermost() const { return current == this; }

Block* Block::active() { return records() ? current : nullptr; }

std::vector<std::shared_ptr<Block>> Block::all_open() {
  std::vector<std::shared_ptr<Block>> blocks;
  for (Block* block = current; block != nullptr; block = block->outer_) {
    blocks.push_back(block->shared_from_this());
  }
  return blocks;
}

void Block::open(std::optional<int64_t> bytes, bool retry) {
  static thread_local const EndOfThread at_end;
  outer_ = current;
  if (outer_ == nullptr) seconds_of_copy(0);  // measures it before any operator is timed
  pending_.emplace();
  if (retry) gives_way_.emplace(*this);
  if (budget_ && bytes) budget_->bytes = *bytes;
  // What gives way may drop anything, and a prediction runs each step about once.
  const bool may_pass = !retry && Fakes::current() == nullptr;
  if (budget_) step_ = std::make_unique<Step>(*budget_, may_pass);
  if (mover_) mover_->follow(step_.get());
  watch(true);
  if (outer_ != nullptr) at::disableCallback(outer_->callback_);
  current = this;
}

// Lets torch call the block for operators, for results where it needs them: to box them takes as
// long as all that is done for an operator that passes.
void Block::watch(bool sees_results) {
  if (sees_results == sees_results_) return;
  if (callback_ != at::INVALID_CALLBACK_HANDLE) at::removeCallback(callback_);
  sees_results_ = sees_results;
  at::RecordFunctionCallback callback =
      sees_results ? at::RecordFunctionCallback(on_start, on_end).needsOutputs(true)
                   : at::RecordFunctionCallback(on_start);
  callback_ = at::addThreadLocalCallback(
      std::move(callback.needsInputs(true).scopes({at::RecordScope::FUNCTION})));
}

void Block::close() {
  at::removeCallback(callback_);
  current = outer_;
  if (outer_ != nullptr) at::reenableCallback(outer_->callback_);
  move_out();
  table_.clear();
  modules_ = nullptr;
  if (!gives_way_) pending_.reset();
  if (step_) step_->left();
  let_go();
}

void Block::abandon() {
  if (!gives_way_) pending_.reset();
  if (step_) step_->abandon();
}

void Block::suspend() {
  at::disableCallback(callback_);
  current = nullptr;
}

void Block::resume() {
  current = this;
  at::reenableCallback(callback_);
}

Block::Saving Block::save(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return {};
  Saving saving{entry_of(tensor).content};
  const std::shared_ptr<Content>& content = saving.content;
  if (step_) {
    saving.number = step_->latest_save();
    step_->saved(*content);
  }
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    if (copy_failed_) std::rethrow_exception(copy_failed_);
    if (content->is_dropped() && !has_all_memory(*content)) return {};
    ++content->holders;
    ++holders_;
    saving.fill = content->fill;
    if (content->is_decided()) return saving;
    if (!content->held) content->held = content->storage.lock();
    // It is new in an operator that still runs and may say how it is made, or a Function may still
    // write it: decided at its end.
    if ((!content->call && is_new_for_running(*content)) || is_given(*content)) return saving;
  }
  decide(content);
  return saving;
}

bool Block::is_given(const Content& content) const {
  return std::any_of(scopes_.begin(), scopes_.end(), [&](const Recording* scope) {
    return std::any_of(scope->given.begin(), scope->given.end(), [&](const auto& given) {
      return storage_of(given.tensor) == content.storage._unsafe_get_target();
    });
  });
}

bool Block::is_new_for_running(const Content& content) const {
  return !running_.empty() && content.born > running_.front()->born;
}

void Block::released(const Content& content, int32_t number, bool was_last) {
  if (!step_) return;
  step_->closed(content, number, was_last);
  let_go();
}

void Block::opened(const Content& content, int32_t number) {
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    if (copy_failed_) std::rethrow_exception(copy_failed_);
  }
  if (!step_) return;
  if (step_->opened(content, number)) settle_moves(&content);
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward == -1 || backward_.exchange(backward) == backward) return;
  ++holders_;
  auto& engine = torch::autograd::Engine::get_default_engine();
  // Queued a second time it runs after what others, such as optimizers, have queued meanwhile.
  engine.queue_callback(
      [self = shared_from_this(), &engine] { engine.queue_callback([self] { self->let_go(); }); });
}

void Block::let_go() {
  if (--holders_ > 0) return;
  pending_.reset();
  if (step_) step_->finish();
}

// Returns how the content would be recomputed. The caller holds contents_mutex().
Route Block::route_to(const Content& content, Freed& locked) const {
  Route route;
  if (content.call && !content.external) route = find_route(content, locked);
  // It cannot be recomputed from memory that a running operator is about to write. This happens
  // where autograd saves a clone of a tensor before it is changed in place.
  for (const auto& needed : route.needs) {
    route.possible = route.possible && !is_being_written(*needed);
  }
  return route;
}

void Block::decide(const std::shared_ptr<Content>& content) {
  Freed freed;  // declared first: freed last, without the mutex
  std::vector<std::shared_ptr<Content>> contents;
  std::shared_ptr<Call> call;
  Choice choice = step_ ? step_->decide(*content) : Choice{drops_};
  if (has_script() && step_->all_pass()) watch(false);
  if (choice.drops == Drops::kBoth) {
    moves_next_ = !moves_next_;
    choice.drops = moves_next_ ? Drops::kMove : Drops::kEverything;
  }
  // What is on another device than those whose memory is moved is recomputed, if it can be.
  if (choice.drops == Drops::kMove && !(mover_ && mover_->takes(content->device))) {
    choice.drops = Drops::kEverything;
  }
  const bool is_moved = choice.drops == Drops::kMove && !content->external;
  std::unique_lock<Lock> lock(contents_mutex());
  Route route;
  if (is_moved) {
    mover_->want(content, choice.lingers_from);
  } else if (choice.is_possible) {
    route.possible = *choice.is_possible;
  } else {
    route = route_to(*content, freed);
  }
  if (step_ && !is_moved && !route.possible) {
    lock.unlock();
    step_->must_keep(*content);
    lock.lock();
  }
  const Verdict verdict = choice.verdict ? *choice.verdict : judge(*content, route, choice.drops);
  tally_.decided(*content, verdict);
  content->held_on_the_way = choice.held_on_the_way;
  if (verdict == Verdict::kDropped) {
    drop(content, std::move(route), freed);
  } else {
    content->become(State::kKept);
  }
  for (const auto& relying : std::exchange(content->relied_on_by, {})) {
    if (auto other = relying.lock()) contents.push_back(std::move(other));
  }
  for (size_t i = contents.size(); i-- > 0;) route_again(contents[i], freed, contents);
  if (content->call && (gives_way_ || choice.may_drop_later)) drop_later(content);
  const bool needs_call =
      verdict == Verdict::kDropped || content->relied_on || choice.may_drop_later || gives_way_;
  if (!needs_call) {  // it is kept, so that no chain of calls needs to go further back
    call = std::move(content->call);
    content->depth = 0;
  }
  lock.unlock();
  if (step_) step_->decided(*content, verdict);
}

// The caller holds contents_mutex().
void Block::drop(const std::shared_ptr<Content>& content, Route route, Freed& freed) {
  tally_.dropped(*content, route.seconds);
  content->become(State::kDropped);
  content->pending.emplace();
  take_route(content, std::move(route));
  freed.push_back(content->give_up());
}

// Pins what it will be recomputed from. The caller holds contents_mutex().
void Block::take_route(const std::shared_ptr<Content>& content, Route route) {
  content->dropped_depth = route.dropped_depth + 1;
  for (const auto& needed : route.needs) {
    pin(*needed);
    if (!needed->held && !needed->is_dropped()) needed->held = needed->storage.lock();
  }
  for (const auto& other : route.on_the_way) {
    other->relied_on = true;
    other->relied_on_by.push_back(content);
  }
  content->needs = std::move(route.needs);
}

// A content on its route, which nobody had saved, has been decided on: the route begins there now,
// as plans have it. The caller holds contents_mutex(), and destroys the others without it.
void Block::route_again(const std::shared_ptr<Content>& content, Freed& freed,
                        std::vector<std::shared_ptr<Content>>& contents) {
  if (!content->is_dropped() || content->holders == 0) return;
  Route route = route_to(*content, freed);
  if (!route.possible) return;
  const Contents before = std::move(content->needs);
  take_route(content, std::move(route));
  for (const auto& needed : before) {
    unpin(*needed);
    release_unused(*needed, freed, contents);
  }
}

// Drops a content that was kept. Returns how many bytes that saves, 0 where it stays. The caller
// holds contents_mutex().
int64_t Block::drop_late(const std::shared_ptr<Content>& content, Gives what, Freed& freed,
                         Freed& locked) {
  constexpr int64_t kMostAgain = 10;  // times the bytes that are saved
  if (!content->call || content->is_lost()) return 0;
  if (what == Gives::kUnneeded && content->pins > 0) return 0;
  Route route = route_to(*content, locked);
  const int64_t bytes = content->bytes - route.more_bytes;
  if (!route.possible || bytes <= 0) return 0;
  if (what != Gives::kAny && bytes_on(route, kMostAgain * bytes) > kMostAgain * bytes) return 0;
  tally_.changed(*content, Verdict::kDropped);
  drop(content, std::move(route), freed);
  return bytes;
}

// On the block's thread: begins to move what was decided on, where no operator runs.
void Block::move_out() {
  if (!mover_ || !running_.empty()) return;
  mover_->begin();
  settle_moves();
}

// Frees what has been copied, and begins to bring back what is needed soon.
void Block::settle_moves(const Content* opened) {
  if (!mover_) return;
  if (!step_) return mover_->settle(1, 0);  // at once, for tests
  store::empty_trash();
  const Step::Moves now = step_->moves(opened);
  mover_->settle(now.moment, now.may_linger);  // first, as what comes back takes its place
  for (const auto& content : now.come_back) mover_->bring_back_early(content);
  if (!now.come_back.empty()) step_->recomputed();
}

// The caller holds contents_mutex().
void Block::drop_later(const std::shared_ptr<Content>& content) {
  if (later_.size() >= sweep_later_at_) {
    const auto is_gone = [](const auto& weak) { return weak.expired(); };
    later_.erase(std::remove_if(later_.begin(), later_.end(), is_gone), later_.end());
    sweep_later_at_ = std::max<size_t>(1024, 2 * later_.size());
  }
  later_.push_back(content);
}

// The one rule for what is dropped after it was decided on, for a budget without a plan as for an
// allocator that has no memory left. From the oldest on, so that what a route comes from is
// settled. But with kAny, routes that recompute much stay: that is in memory until backward has
// used it.
Block::Dropped Block::drop_oldest(c10::Device device, int64_t enough, Gives what) {
  std::vector<std::shared_ptr<Content>> seen;  // destroyed without the mutex, as what follows
  Freed freed, locked;
  Dropped dropped;
  const std::lock_guard<Lock> lock(contents_mutex());
  for (const auto& weak : later_) {
    if (dropped.bytes >= enough) break;
    const std::shared_ptr<Content> content = weak.lock();
    if (!content) continue;
    seen.push_back(content);
    if (!content->held_by_block_alone() || content->held->device() != device) continue;
    int64_t bytes = 0;
    if (what == Gives::kRecomputed && content->has_come_back()) {
      bytes = content->bytes;
      freed.push_back(content->give_up_again());
    } else if (what != Gives::kRecomputed && content->state() == State::kKept) {
      bytes = drop_late(content, what, freed, locked);
    }
    dropped.bytes += bytes;
    dropped.contents += bytes > 0;
  }
  return dropped;
}

int64_t Block::give_way(c10::Device device, int64_t enough, Gives what) {
  const Dropped dropped = drop_oldest(device, enough, what);
  if (dropped.bytes == 0) return 0;
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    tally_.bytes_given_back += dropped.bytes;
    tally_.contents_given_back += dropped.contents;
  }
  if (step_) step_->gave_way(device);
  return dropped.bytes;
}

Tally Block::tally() {
  Tally tally;
  {
    const std::lock_guard<RecursiveLock> again(again_mutex_);
    const std::lock_guard<Lock> lock(contents_mutex());
    tally = tally_;
  }
  if (step_) {
    step_->each_passed([&](const plan::TraceContent& content, Verdict verdict) {
      tally.passed(content.module, content.op, content.bytes, verdict);
    });
  }
  return tally;
}

// Operators, as they run.

void Block::Recording::measure(const std::vector<c10::IValue>& outputs) {
  if (began.seconds) {
    call->measured = call->seconds = *began.seconds;
    return;
  }
  if (call->device.is_cuda()) {
    if (device_time) device_time->stop();
    call->measured = std::numeric_limits<double>::infinity();
    return;
  }
  const double seconds = now() - begin;
  call->measured = call->seconds = seconds;
  if (Fakes::current() != nullptr) return;  // what operators are known to take is measured
  int64_t bytes = 0;
  for (const auto& output : outputs) {
    for_tensors(output, [&](const at::Tensor& tensor, int64_t) {
      if (is_plain(tensor)) bytes += static_cast<int64_t>(tensor.numel() * tensor.itemsize());
    });
  }
  constexpr int64_t kMeasurable = 1 << 16;
  std::atomic<double>& least = call->op->seconds_per_byte;
  constexpr int kTrusted = 3;  // the first calls are slow: memory is new and threads start
  if (bytes >= kMeasurable) {
    ++call->op->measured;
    if (seconds / bytes < least) least = seconds / bytes;
  }
  call->seconds = call->op->measured < kTrusted ? 0 : std::min(seconds, 2 * least * bytes);
}

std::unique_ptr<at::ObserverContext> Block::on_start(const at::RecordFunction& function) {
  if (current == nullptr) return nullptr;
  const Operator* op = Operator::of(function);
  if (op == nullptr) return begin_scope(function);
  if (op->is_composite || is_cast(*op)) return nullptr;
  // Most calls are of operators that others call, and that only make something.
  const bool is_below = below_autograd();
  if (is_below && !op->may_write()) return nullptr;
  Block* block = active();
  if (block == nullptr) return nullptr;
  if (!block->running_.empty() && block->running_.back()->is_of_factory()) {
    if (block->step_) block->step_->inner_began();
    return nullptr;
  }
  if (!block->sees_results_ && block->step_->passes_inner()) return nullptr;
  if (!block->sees_results_ && !block->has_script()) {  // it was left
    block->watch(true);
    if (op->may_write()) block->note_hidden_writes(*op, function);
    return nullptr;
  }
  const bool is_recorded = !is_below && !checkpoint::in_region() && at::GradMode::is_enabled();
  if (block->has_script() && block->passes(*op, function.inputs(), is_recorded)) {
    if (is_recorded && op->any_writes && block->sees_results_) {
      return block->start_write(*op, function);
    }
    if (op->may_write()) block->note_hidden_writes(*op, function);
    return nullptr;
  }
  if (is_recorded && op->is_view) {
    // A view is another geometry of its argument's content, so that one must be known.
    for (const auto& input : function.inputs()) {
      for_tensors(input, [&](const at::Tensor& tensor, int64_t) {
        if (is_plain(tensor)) block->entry_of(tensor);
      });
    }
    return nullptr;
  }
  if (is_recorded) return block->start(*op, function.inputs());
  if (op->may_write()) block->note_hidden_writes(*op, function);
  if (is_below) return nullptr;
  auto recording = std::make_unique<Recording>();
  recording->block = block;
  for (const auto& input : function.inputs()) {
    for_tensors(input, [&](const at::Tensor& tensor, int64_t) {
      if (tensor.defined() && is_plain(tensor)) recording->inputs.push_back(storage_of(tensor));
    });
  }
  return recording;
}

// Whether the script lets an operator pass. `is_recorded`: it is recorded without one.
bool Block::passes(const Operator& op, c10::ArrayRef<const c10::IValue> inputs, bool is_recorded) {
  if (!is_recorded || op.is_view) return step_->all_pass();
  if (step_->must_record(op, inputs) && sees_results_) return false;
  ++passed_;
  return true;
}

// For an operator that is not recorded but writes. Before it writes it may call operators that are
// recorded, such as the clone that autograd makes of a tensor it still needs.
std::unique_ptr<Block::Recording> Block::start_write(const Operator& op,
                                                     const at::RecordFunction& function) {
  sweep();
  auto recording = std::make_unique<Recording>();
  recording->block = this;
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size() && i < op.writes.size(); ++i) {
    if (!op.writes[i]) continue;
    for_tensors(inputs[i],
                [&](const at::Tensor& tensor, int64_t) { begin_write(*recording, tensor); });
  }
  recording->born = contents_so_far();
  running_.push_back(recording.get());
  return recording;
}

void Block::begin_write(Recording& recording, const at::Tensor& tensor) {
  if (!is_plain(tensor)) return;
  entry_of(tensor);
  recording.writing.emplace_back(storage_of(tensor));
  before_write(tensor);
  recording.written.push_back({tensor, checkpoint::version_of(tensor), storage_of(tensor)});
  if (outer_ != nullptr) outer_->note_hidden_write(tensor);  // they do not see the operator
}

// Memory that was written gets a new content, returned or not, before any is decided on: nothing
// can be computed from what it held.
void Block::end_write(Recording& recording) {
  for (const auto& written : recording.written) {
    if (written.has_other_storage()) continue;
    const auto found = table_.find(written.storage);
    if (found == table_.end() || found->second.content->born <= recording.born) {
      renew(written.tensor);
    }
  }
  recording.writing.clear();
}

bool Block::refer(Recording& recording, const at::Tensor& tensor, size_t argument,
                  int64_t element) {
  if (!tensor.defined()) return true;
  // Of an inference tensor no version tells whether it has been written.
  if (!is_plain(tensor) || tensor.is_inference()) return false;
  Entry& entry = entry_of(tensor);
  const Operator& op = *recording.call->op;
  const bool written = argument < op.writes.size() && op.writes[argument];
  const bool all_of_it = tensor.is_non_overlapping_and_dense() &&
                         static_cast<int64_t>(tensor.nbytes()) == entry.content->bytes;
  auto& references = recording.call->references;
  bool overwritten = written && op.overwrites && all_of_it;
  for (auto& other : references) {
    if (other.content != entry.content) continue;
    overwritten = other.overwritten = false;  // the operator reads what it writes
  }
  Reference& reference = references.emplace_back();
  reference.argument = argument;
  reference.element = element;
  reference.content = entry.content;
  reference.written = written;
  reference.overwritten = overwritten;
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    reference.number = tensor.storage().getWeakStorageImpl().lock();
  }
  reference.geometry.assign(tensor);
  reference.version = entry.counter;
  reference.noted = entry.version;
  return true;
}

// Whether a second call with these arguments would give the same. Of an operator that draws random
// numbers it notes their state.
bool Block::is_repeatable(Recording& recording, c10::ArrayRef<const c10::IValue> inputs) const {
  const Operator& op = *recording.call->op;
  // What is never recomputed needs no arguments recorded.
  if (!op.is_repeatable || (op.is_heavy && !step_)) return false;
  if (op.has_failed || is_in_library()) return false;
  // Dropout changes its state unseen.
  if (op.dropout_state && inputs[*op.dropout_state].isTensor() &&
      inputs[*op.dropout_state].toTensor().defined()) {
    return false;
  }
  // In evaluation a batch norm reads running statistics, which change unseen.
  if (op.is_torch_batch_norm && !trains_batch_norm(inputs) && inputs.size() > 3 &&
      inputs[3].isTensor()) {
    return false;
  }
  if (!(op.is_random || op.draws) || recording.is_mask) return true;
  recording.call->random = Random::of(op, inputs);
  return recording.call->random.has_value();
}

// What the call is to be repeated under.
void Block::note_settings(Call& call) {
  const checkpoint::Settings settings =
      checkpoint::Settings::capture(call.op->makes_no_products ? settings_.get() : nullptr);
  if (!settings_ || !(*settings_ == settings))
    settings_ = std::make_shared<checkpoint::Settings>(settings);
  call.settings = settings_;
  call.steps_before = checkpoint::steps_so_far();
}

// Begins what the operator writes, and refers the call to what it reads.
void Block::note_arguments(Recording& recording, c10::ArrayRef<const c10::IValue> inputs) {
  Call& call = *recording.call;
  const Operator& op = *call.op;
  const bool trains = op.is_torch_batch_norm && trains_batch_norm(inputs);
  if (recording.repeatable) call.arguments.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool writes = op.may_write(i);
    // A batch norm is recomputed without its running statistics.
    const bool left_out =
        (trains && is_running_statistic(i)) || (op.is_package_batch_norm && (i == 5 || i == 6));
    if (writes || left_out) {
      for_tensors(inputs[i],
                  [&](const at::Tensor& tensor, int64_t) { begin_write(recording, tensor); });
    }
    if (!recording.repeatable) {
      for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t) {
        if (is_plain(tensor)) entry_of(tensor);
      });
      continue;
    }
    if (inputs[i].isOptionalTensorList() && writes) recording.repeatable = false;
    call.arguments.push_back(without_tensors(inputs[i]));
    if (!holds_tensors(inputs[i]) || left_out) continue;
    for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t element) {
      recording.repeatable = refer(recording, tensor, i, element) && recording.repeatable;
    });
  }
}

std::unique_ptr<Block::Recording> Block::start(const Operator& op,
                                               c10::ArrayRef<const c10::IValue> inputs) {
  ++recorded_;
  sweep();
  auto recording = std::make_unique<Recording>();
  if (step_) recording->began = step_->began(op, inputs);
  recording->block = this;
  recording->call = std::allocate_shared<Call>(Pool<Call>());
  Call& call = *recording->call;
  call.op = &op;
  call.module = has_script() ? recording->began.module : running_module();
  recording->is_mask = op.makes_mask && !inputs.empty() && inputs[0].toTensor().is_cpu();
  const bool is_changed = is_changed_by_mode();
  if (is_changed && step_) step_->is_no_example();
  recording->repeatable = !is_changed && is_repeatable(*recording, inputs);
  if (recording->repeatable) note_settings(call);
  note_arguments(*recording, inputs);
  if (op.is_library && recording->repeatable) begin_proof(*recording, inputs);
  recording->born = call.born = contents_so_far();
  call.device = device_of(inputs, step_ ? budget_->device : at::Device(at::kCPU));
  if (!recording->began.seconds) {
    if (step_ && call.device.is_cuda()) {
      recording->device_time = step_->start_time(recording->began.key, call.device);
    }
    recording->begin = now();
  }
  running_.push_back(recording.get());  // last: what throws before this ends the recording
  return recording;
}

void Block::on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* recording = static_cast<Recording*>(context);
  if (recording == nullptr) return;
  if (recording->is_function) return recording->block->end_scope(*recording);
  if (!recording->call) return recording->block->end_unrecorded(*recording, function);
  recording->measure(function.outputs());
  recording->block->end(*recording, function.outputs());
  recording->block->move_out();
}

// Whether an operator of a library runs: those that it calls are a part of it, as it may write what
// they make by kernels that nobody sees.
bool Block::is_in_library() const {
  return std::any_of(running_.begin(), running_.end(), [](const Recording* recording) {
    return recording->call && recording->call->op->is_library;
  });
}

// Of the operator that runs.
int32_t Block::running_module() const {
  // A script knows its modules from before.
  return modules_ && !has_script() ? modules_->running() : kNoModule;
}

void Block::begin_proof(Recording& recording, c10::ArrayRef<const c10::IValue> inputs) {
  if (Fakes::current() != nullptr) return;  // it has no values
  const auto key = key_of_arguments(inputs);
  if (!key) recording.repeatable = false;
  if (!key || recording.call->op->is_proven(*key)) return;
  // While a graph is captured, nothing can be compared.
  recording.repeatable = !checkpoint::GraphRng::current();
  if (recording.repeatable) recording.proof = std::make_unique<Proof>(*key, inputs);
}

void Block::end_proof(Recording& recording, const std::vector<c10::IValue>& outputs) {
  for (const auto& output : outputs) {
    for_tensors(output, [&](const at::Tensor& tensor, int64_t) {
      if (tensor.defined() && !has_bits(tensor)) recording.repeatable = false;
    });
  }
  if (!recording.proof) return;
  const std::vector<at::Tensor> changed = recording.proof->changed_arguments();
  for (const at::Tensor& tensor : changed) renew_everywhere(tensor);
  if (!changed.empty()) {
    recording.call->op->changes_arguments = recording.call->op->has_failed = true;
    recording.repeatable = false;
  }
  if (!recording.repeatable || outputs.empty()) return;
  if (step_) step_->begin_proof();
  recording.repeatable = recording.proof->succeeds(*recording.call, outputs);
  if (step_) step_->end_proof();
}

// Of memory that was written unseen, in this block and those around it.
void Block::renew_everywhere(const at::Tensor& tensor) {
  for (Block* block = this; block != nullptr; block = block->outer_) {
    if (is_plain(tensor) && block->table_.count(storage_of(tensor)) > 0) block->renew(tensor);
  }
}

std::unique_ptr<Block::RunningFunction> Block::begin_function(
    const Operator& op, const std::vector<c10::IValue>& inputs) {
  Block* block = active();
  if (block == nullptr || below_autograd() || checkpoint::in_region()) return nullptr;
  if (block->is_in_library()) return nullptr;
  if (!block->sees_results_ && !block->has_script()) block->watch(true);
  if (block->has_script() && block->passes(op, as_array(inputs), true)) {
    return nullptr;
  }
  auto recording = block->start(op, as_array(inputs));
  return std::make_unique<RunningFunction>(block->shared_from_this(), std::move(recording),
                                           inputs[0].toTensorVector());
}

void Block::RunningFunction::end(const std::vector<at::Tensor>& results) {
  if (!recording_) return;
  const std::vector<c10::IValue> outputs{new_ones(results, given_)};
  // One that changes its arguments is not what it was declared to be.
  if (results.empty()) recording_->call->op->has_failed = true;
  recording_->measure(outputs);
  block_->end(*recording_, outputs);
  recording_ = nullptr;
  block_->move_out();
}

void Block::RunningFunction::cancel() {
  if (!recording_) return;
  auto& running = block_->running_;
  running.erase(std::remove(running.begin(), running.end(), recording_.get()), running.end());
  recording_ = nullptr;
}

// Notes that its results were made in this block; they get no call to recompute them by.
void Block::end_unrecorded(Recording& recording, const at::RecordFunction& function) {
  const auto running = std::find(running_.begin(), running_.end(), &recording);
  if (running != running_.end()) {  // see start_write(): its results pass
    running_.erase(running);
    return end_write(recording);
  }
  const auto& inputs = recording.inputs;
  for (const auto& output : function.outputs()) {
    for_tensors(output, [&](const at::Tensor& tensor, int64_t) {
      if (!is_plain(tensor) || table_.find(storage_of(tensor)) != table_.end()) return;
      if (std::find(inputs.begin(), inputs.end(), storage_of(tensor)) != inputs.end()) {
        return void(entry_of(tensor));  // written in place, or a view
      }
      const std::shared_ptr<Content>& content = renew(tensor).content;
      if (!scopes_.empty() && scopes_.back()->made) scopes_.back()->made->push_back(content);
    });
  }
}

// Calls that are no operator's are of autograd.Functions: while one runs its forward, and takes
// what that returns and saves.
std::unique_ptr<Block::Recording> Block::begin_scope(const at::RecordFunction& function) {
  Block* block = active();
  if (block == nullptr || below_autograd()) return nullptr;
  auto scope = std::make_unique<Recording>();
  scope->block = block;
  scope->is_function = true;
  block->look_at_given(*scope, function);
  if (!block->sees_results_) return nullptr;
  const bool looks_at_made = block->step_ && !block->step_->has_script();
  if (!looks_at_made && scope->given.empty()) return nullptr;
  if (looks_at_made) scope->made = std::make_unique<std::vector<std::shared_ptr<Content>>>();
  block->scopes_.push_back(scope.get());
  return scope;
}

// Whether something is recomputed to what this tensor holds, or from it.
bool Block::may_be_repeated(const at::Tensor& tensor) const {
  if (!tensor.defined() || !is_plain(tensor)) return false;
  const auto found = table_.find(storage_of(tensor));
  if (found == table_.end()) return false;
  const std::lock_guard<Lock> lock(contents_mutex());
  return found->second.content->call || found->second.content->pins > 0;
}

// A Function's kernel may write what it was given without a word (ctx.mark_dirty): Triton's and
// numpy's do. Then an operator's second call does not give what is there. Its first call with
// arguments of these shapes tells.
void Block::look_at_given(Recording& scope, const at::RecordFunction& function) {
  if (Fakes::current() != nullptr) return;  // it has no values
  std::vector<Given> given;
  size_t position = 0;
  for (const auto& input : function.inputs()) {
    for_tensors(input, [&](const at::Tensor& tensor, int64_t) {
      if (may_be_repeated(tensor)) given.push_back({tensor, position, 0});
      ++position;
    });
  }
  if (given.empty()) return;
  scope.key = FunctionKey::of(function.name(), function.inputs());
  std::optional<ArgumentBits> written = written_by(scope.key);
  // Where nobody can look, it may write all.
  if (!sees_results_ || checkpoint::GraphRng::current())
    written = written.value_or(~ArgumentBits());
  for (Given& one : given) {
    if (!written) {
      one.bits = bits_of(one.tensor);
      scope.given.push_back(one);
    } else if (written->test(std::min(one.position, written->size() - 1))) {
      note_hidden_write(one.tensor);
    }
  }
}

// Contents that it saved, or that have a call, are known already. What is left is either a result,
// which is soon freed or saved, or is kept on ctx.
void Block::end_scope(Recording& scope) {
  scopes_.erase(std::remove(scopes_.begin(), scopes_.end(), &scope), scopes_.end());
  ArgumentBits written;
  for (const auto& [tensor, position, bits] : scope.given) {
    const auto found = table_.find(storage_of(tensor));
    if (found == table_.end()) continue;
    const std::shared_ptr<Content> content = found->second.content;
    const bool is_written = bits_of(tensor) != bits;
    if (is_written) written.set(std::min(position, written.size() - 1));
    std::shared_ptr<Call> call;  // freed without the mutex
    bool waits;
    {
      const std::lock_guard<Lock> lock(contents_mutex());
      waits = content->holders > 0 && !content->is_decided();
      if (is_written && waits) call = std::move(content->call);
    }
    if (waits) decide(content);
    if (is_written) renew_everywhere(tensor);
  }
  if (!scope.given.empty()) note_function(scope.key, written);
  if (!scope.made) return;
  const auto is_known = [](const std::shared_ptr<Content>& content) {
    return content->storage.expired() || content->call || content->holders > 0;
  };
  auto& made = *scope.made;
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    made.erase(std::remove_if(made.begin(), made.end(), is_known), made.end());
  }
  if (!made.empty()) step_->keeps(made);
}

// Keeps the result of bernoulli_ on the CPU as bits.
void Block::keep_mask(Recording& recording) {
  Call& call = *recording.call;
  recording.repeatable = recording.repeatable && call.references[0].overwritten;
  if (!recording.repeatable) return;
  const Pause pause;
  const at::NoGradGuard no_grad;
  try {
    call.mask = pack_mask(recording.written[0].tensor);
  } catch (const std::exception&) {  // there is no memory for it
    recording.repeatable = false;
    return;
  }
  constexpr double kCopies = 4;  // filling a tensor from bits takes about as long as 4 copies
  const double filling = kCopies * seconds_of_copy(call.references[0].content->bytes);
  call.seconds = std::min(call.seconds, filling);
  call.measured = std::min(call.measured, filling);
}

void Block::end(Recording& recording, const std::vector<c10::IValue>& outputs) {
  running_.erase(std::find(running_.begin(), running_.end(), &recording));
  Call& call = *recording.call;
  if (recording.is_mask) keep_mask(recording);
  if (call.op->is_library && recording.repeatable) end_proof(recording, outputs);
  int depth = 1;
  for (const auto& reference : call.references) {
    if (reference.overwritten) continue;
    if (reference.content->call) depth = std::max(depth, reference.content->depth + 1);
  }
  // Where the caller has statistics, they are among the arguments, and this output is empty.
  if (call.op->is_package_batch_norm && outputs.size() == 2 && is_plain(outputs[1].toTensor()) &&
      outputs[1].toTensor().numel() > 0) {
    // The batch norm is recomputed from the statistics of its forward.
    made(recording, outputs[1].toTensor(), 1, -1);
    if (recording.repeatable) {
      recording.repeatable = refer(recording, outputs[1].toTensor(), kStatistics, -1);
    }
  }
  // If a plan has made the chain too long, its end is kept from now on, and the trace says so to
  // the next plan. The step still counts as planned.
  const bool is_traced = recording.repeatable;
  if (depth > (step_ ? kDeepestPlanned : kDeepest)) recording.repeatable = false;
  end_write(recording);
  for (size_t i = 0; i < outputs.size(); ++i) {
    for_tensors(outputs[i], [&](const at::Tensor& tensor, int64_t element) {
      made(recording, tensor, i, element);
      if (const auto found = table_.find(storage_of(tensor)); found != table_.end()) {
        found->second.content->depth = depth;
      }
    });
  }
  if (!step_) return;
  const int64_t excess =
      step_->ended(is_traced ? &call : nullptr, recording.began, std::move(recording.device_time));
  if (excess > 0) drop_oldest(budget_->device, excess, Gives::kUnneeded);
}

void Block::made(Recording& recording, const at::Tensor& tensor, size_t output, int64_t element) {
  if (!is_plain(tensor)) return;
  const auto* storage = storage_of(tensor);
  const bool is_written = recording.writes(storage);
  const auto found = table_.find(storage);
  const bool is_known = found != table_.end();
  if (is_known && found->second.content->born <= recording.born && !is_written) return;  // a view
  Entry& entry =
      is_known && found->second.content->born > recording.born ? found->second : renew(tensor);
  entry.see(tensor);
  const std::shared_ptr<Content> content = entry.content;
  const Operator& op = *recording.call->op;
  if (content->op == nullptr || (op.is_library && !content->call)) content->op = &op;
  if (content->call || content->is_decided()) return;  // settled by an operator inside this one

  int64_t written = -1;
  for (size_t i = 0; i < recording.call->references.size(); ++i) {
    const auto& reference = recording.call->references[i];
    if (reference.written && reference.content->storage._unsafe_get_target() == storage) {
      written = static_cast<int64_t>(i);
    }
  }
  const bool is_statistics = op.is_package_batch_norm && output == 1;
  uint64_t bits = 0;
  const bool has_values = op.is_library && !is_fake(tensor.storage());
  if (has_values && recording.repeatable && tensor.is_cpu()) bits = bits_of(tensor);
  bool waits;
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    if (recording.repeatable && !is_statistics && is_written == (written >= 0)) {
      content->call = recording.call;
      Call::Made& made = recording.call->made.emplace_back();
      made.content = content;
      made.output = output;
      made.element = element;
      made.reference = written;
      made.geometry.assign(tensor);
      made.bits = bits;
    }
    waits = content->holders > 0;
  }
  if (waits) decide(content);
}

// What each storage holds now.

bool Block::Recording::writes(const c10::StorageImpl* storage) const {
  return std::any_of(written.begin(), written.end(),
                     [&](const Written& one) { return one.storage == storage; });
}

std::shared_ptr<Content> Block::make_content(const at::Tensor& tensor, bool external) {
  auto content = std::allocate_shared<Content>(Pool<Content>(), tensor.storage(), external);
  const bool is_made = !running_.empty() && running_.back()->call;
  content->module = is_made ? running_.back()->call->module : running_module();
  if (step_) content->alone = step_->alone();
  return content;
}

// Gives the tensor's storage, known or not, a new content.
Block::Entry& Block::renew(const at::Tensor& tensor) {
  Entry& entry = table_[tensor.storage().unsafeGetStorageImpl()];
  const bool external = entry.content && entry.content->external;
  if (entry.content) {
    const std::lock_guard<Lock> lock(contents_mutex());
    entry.content->overwritten = true;
  }
  entry.content = make_content(tensor, external);
  entry.counter = {};
  return entry;
}

void Block::Entry::see(const at::Tensor& tensor) {
  counter = tensor.unsafeGetTensorImpl()->version_counter();
  version = checkpoint::version_of(tensor);
}

Block::Entry& Block::entry_of(const at::Tensor& tensor) {
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto [found, is_new] = table_.emplace(storage, Entry{});
  Entry& entry = found->second;
  if (is_new) {
    // It was made before this block, unless a running operator may have made it or it has an
    // autograd history. A view of a parameter has none: its memory is the parameter's.
    const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
    const bool has_history = base.requires_grad() && !base.is_leaf();
    const bool external = running_.empty() && !has_history;
    entry.content = make_content(tensor, external);
    entry.content->is_alias = external && step_ && step_->is_alias(tensor.storage());
  } else if (entry.counter.enabled() && entry.counter.current_version() != entry.version) {
    renew(tensor);  // changed, but by no operator of this thread
  } else {
    // Renew it where an operator that still runs has already changed it in place.
    for (const Recording* recording : running_) {
      if (entry.content->born > recording->born) continue;
      for (const auto& written : recording->written) {
        // Views may have version counters of their own.
        if (written.storage != storage || written.has_other_storage()) continue;
        if (checkpoint::version_of(written.tensor) > written.version) {
          renew(tensor);
          break;
        }
      }
    }
  }
  entry.see(tensor);
  return entry;
}

void Block::note_hidden_writes(const Operator& op, const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  const bool trains = op.is_torch_batch_norm && trains_batch_norm(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!op.may_write(i) && !(trains && is_running_statistic(i))) continue;
    for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t) { note_hidden_write(tensor); });
  }
}

// Of memory that is about to be written unseen, in this block and those around it.
void Block::note_hidden_write(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return;
  // If the operator around this one writes there too, made() gives the new content its call.
  const Writing writing(storage_of(tensor));
  for (Block* block = this; block != nullptr; block = block->outer_) {
    if (block->table_.count(storage_of(tensor)) == 0) continue;
    block->before_write(tensor);
    block->renew(tensor);
  }
}

// Copies the tensor's memory, about to be written, if dropped contents are computed from it.
void Block::before_write(const at::Tensor& tensor) {
  const auto found = table_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == table_.end()) return;
  const std::shared_ptr<Content> content = found->second.content;
  if (mover_) mover_->before_write(content);
  c10::intrusive_ptr<c10::StorageImpl> held;
  {
    const std::lock_guard<Lock> lock(contents_mutex());
    held = content->held;
    if (content->pins == 0 || held.get() != tensor.storage().unsafeGetStorageImpl()) return;
  }
  c10::Storage copy;
  try {
    copy = copy_of(c10::Storage(held));
  } catch (const std::exception&) {
    // What calls this does not let errors through.
    const std::lock_guard<Lock> lock(contents_mutex());
    copy_failed_ = std::current_exception();
    return;
  }
  const std::lock_guard<Lock> lock(contents_mutex());
  held = content->give_up();
  content->hold_alone(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim(copy.unsafeReleaseStorageImpl()));
  content->copied = true;
  content->made_on = current_stream(content->device);
}

// Removes the entries of storages that were freed, once the table has grown.
void Block::sweep() {
  if (table_.size() < sweep_at_) return;
  for (auto entry = table_.begin(); entry != table_.end();) {
    entry = entry->second.content->storage.expired() ? table_.erase(entry) : std::next(entry);
  }
  sweep_at_ = std::max<size_t>(1024, 2 * table_.size());
}

}  // namespace memsave_ext::remat

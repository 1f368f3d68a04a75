// The part of a block that records operators as they run.
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "checkpoint/recomputing.h"
#include "checkpoint/saved.h"
#include "remat/block.h"
#include "remat/fakes.h"
#include "remat/mask.h"
#include "remat/policy.h"
#include "remat/tensors.h"

namespace memsave_ext::remat {
namespace {

// The longest chain of calls of which no result was kept.
constexpr int kDeepest = 32;
constexpr int kDeepestPlanned =
    1000;  // plans keep what shortens chains; the stack must not overflow
// The argument of this package's batch norm that takes the statistics.
constexpr size_t kStatistics = 4;

bool below_autograd() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
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

}  // namespace

void Block::Recording::measure(const at::RecordFunction& function) {
  if (call->device.is_cuda()) {
    if (device_time) device_time->stop();
    call->measured = std::numeric_limits<double>::infinity();
    return;
  }
  const double seconds = now() - begin;
  call->measured = call->seconds = seconds;
  if (Fakes::current() != nullptr) return;  // what operators are known to take is measured
  int64_t bytes = 0;
  for (const auto& output : function.outputs()) {
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
  Block* block = active();
  if (block == nullptr) return nullptr;
  const Operator* op = Operator::of(function);
  if (op == nullptr || op->is_composite) return nullptr;
  const bool is_recorded = !below_autograd() && !in_region() && at::GradMode::is_enabled();
  if (is_recorded && op->is_view) {
    // A view is another geometry of its argument's content, so that one must be known.
    for (const auto& input : function.inputs()) {
      for_tensors(input, [&](const at::Tensor& tensor, int64_t) {
        if (is_plain(tensor)) block->entry_of(tensor);
      });
    }
    return nullptr;
  }
  if (is_recorded) return block->start(*op, function);
  if (op->any_writes || op->is_torch_batch_norm) block->note_hidden_writes(*op, function);
  if (below_autograd()) return nullptr;
  auto recording = std::make_unique<Recording>();
  recording->block = block;
  return recording;
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
  reference.geometry.assign(tensor);
  reference.version = entry.counter;
  reference.noted = entry.version;
  reference.written = written;
  reference.overwritten = overwritten;
  if (reference.geometry.is_wrapped_number) {
    reference.number = tensor.storage().getWeakStorageImpl().lock();
  }
  return true;
}

std::unique_ptr<Block::Recording> Block::start(const Operator& op,
                                               const at::RecordFunction& function) {
  ++recorded_;
  sweep();
  auto recording = std::make_unique<Recording>();
  if (step_) recording->key = step_->began(op, function);
  recording->block = this;
  const auto inputs = function.inputs();
  recording->call = std::make_shared<Call>();
  Call& call = *recording->call;
  call.op = &op;
  call.module = modules_.back();
  // What is never recomputed needs no arguments recorded.
  recording->repeatable = op.is_repeatable && (!op.is_heavy || step_);
  const bool is_mask = op.makes_mask && !inputs.empty() && inputs[0].toTensor().is_cpu();
  if (op.is_random && !is_mask && recording->repeatable) {
    call.random = Random::of(op, inputs);
    recording->repeatable = call.random.has_value();
  }
  const bool trains = op.is_torch_batch_norm && trains_batch_norm(inputs);
  if (op.is_torch_batch_norm && !trains && inputs.size() > 3 && inputs[3].isTensor()) {
    recording->repeatable = false;  // it reads running statistics, which change unseen
  }
  if (recording->repeatable) {
    const Settings settings = Settings::capture(op.is_pointwise ? settings_.get() : nullptr);
    if (!settings_ || !(*settings_ == settings)) settings_ = std::make_shared<Settings>(settings);
    call.settings = settings_;
    call.steps_before = steps_so_far();
    call.arguments.reserve(inputs.size());
    call.references.reserve(inputs.size());
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool writes = i < op.writes.size() && op.writes[i];
    // A batch norm is recomputed without its running statistics.
    const bool left_out =
        (trains && is_running_statistic(i)) || (op.is_own_batch_norm && (i == 5 || i == 6));
    if (writes || left_out) {
      for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t) {
        if (!is_plain(tensor)) return;
        entry_of(tensor);
        before_write(tensor);
        recording->written.emplace_back(tensor, version_of(tensor));
      });
    }
    if (!recording->repeatable) {
      for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t) {
        if (is_plain(tensor)) entry_of(tensor);
      });
      continue;
    }
    if (!holds_tensors(inputs[i])) {
      call.arguments.push_back(inputs[i]);
      continue;
    }
    call.arguments.emplace_back();
    if (inputs[i].isTensorList()) {
      call.arguments.back() = std::vector<at::Tensor>(inputs[i].toTensorList().size());
    } else if (inputs[i].isOptionalTensorList()) {
      recording->repeatable = recording->repeatable && !writes;
      call.arguments.back() = c10::List<std::optional<at::Tensor>>();
      auto list = call.arguments.back().toOptionalTensorList();
      list.resize(inputs[i].toOptionalTensorList().size());
    }
    if (left_out) continue;
    for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t element) {
      recording->repeatable = refer(*recording, tensor, i, element) && recording->repeatable;
    });
  }
  recording->born = contents_so_far();
  running_.push_back(recording.get());
  call.device = device_of(inputs, step_ ? budget_->device : at::Device(at::kCPU));
  if (step_ && call.device.is_cuda()) {
    recording->device_time = step_->start_time(recording->key, call.device);
  }
  recording->begin = now();
  return recording;
}

void Block::on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* recording = static_cast<Recording*>(context);
  if (recording == nullptr) return;
  if (!recording->call) return recording->block->end_unrecorded(function);
  recording->measure(function);
  recording->block->end(*recording, function);
}

// Notes that its results were made in this block; they get no call to recompute them by.
void Block::end_unrecorded(const at::RecordFunction& function) {
  for (const auto& output : function.outputs()) {
    for_tensors(output, [&](const at::Tensor& tensor, int64_t) {
      if (is_plain(tensor) && table_.find(storage_of(tensor)) == table_.end()) renew(tensor);
    });
  }
}

// Keeps the result of bernoulli_ on the CPU as bits.
void Block::keep_mask(Recording& recording) {
  Call& call = *recording.call;
  recording.repeatable = recording.repeatable && call.references[0].overwritten;
  if (!recording.repeatable) return;
  const Pause pause;
  const at::NoGradGuard no_grad;
  call.mask = pack_mask(recording.written[0].first);
  constexpr double kCopies = 4;  // filling a tensor from bits takes about as long as 4 copies
  const double filling = kCopies * seconds_of_copy(call.references[0].content->bytes);
  call.seconds = std::min(call.seconds, filling);
  call.measured = std::min(call.measured, filling);
}

void Block::end(Recording& recording, const at::RecordFunction& function) {
  running_.erase(std::find(running_.begin(), running_.end(), &recording));
  Call& call = *recording.call;
  if (call.op->makes_mask && !call.random) keep_mask(recording);
  int depth = 1;
  for (const auto& reference : call.references) {
    if (reference.overwritten) continue;
    if (reference.content->call) depth = std::max(depth, reference.content->depth + 1);
  }
  const auto outputs = function.outputs();
  // Statistics that were given are among the arguments, and this output is empty.
  if (call.op->is_own_batch_norm && outputs.size() == 2 && is_plain(outputs[1].toTensor()) &&
      outputs[1].toTensor().numel() > 0) {
    // The batch norm is recomputed from the statistics of its forward.
    made(recording, outputs[1].toTensor(), 1, -1);
    if (recording.repeatable) {
      recording.repeatable = refer(recording, outputs[1].toTensor(), kStatistics, -1);
    }
  }
  // Where a plan makes a chain too long, the step is still the one that was planned: what ends the
  // chain has to be kept, of which the next plan knows.
  const bool is_traced = recording.repeatable;
  if (depth > (step_ ? kDeepestPlanned : kDeepest)) recording.repeatable = false;
  // Memory that was written gets a new content, returned or not, before any is decided on: nothing
  // can be computed from what it held.
  for (const auto& [tensor, before] : recording.written) {
    const auto found = table_.find(storage_of(tensor));
    if (found == table_.end() || found->second.content->born <= recording.born) renew(tensor);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    for_tensors(outputs[i], [&](const at::Tensor& tensor, int64_t element) {
      made(recording, tensor, i, element);
      if (const auto found = table_.find(storage_of(tensor)); found != table_.end()) {
        found->second.content->depth = depth;
      }
    });
  }
  if (!step_) return;
  step_->ended(is_traced ? &call : nullptr, recording.key, std::move(recording.device_time));
  make_room();
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
  if (content->op == nullptr) content->op = recording.call->op;
  if (content->call || content->decided) return;  // settled by an operator inside this one

  int64_t written = -1;
  for (size_t i = 0; i < recording.call->references.size(); ++i) {
    const auto& reference = recording.call->references[i];
    if (reference.written && reference.content->storage._unsafe_get_target() == storage) {
      written = static_cast<int64_t>(i);
    }
  }
  const bool own_statistics = recording.call->op->is_own_batch_norm && output == 1;
  bool waits;
  {
    const std::lock_guard<std::mutex> lock(contents_mutex());
    if (recording.repeatable && !own_statistics && is_written == (written >= 0)) {
      content->call = recording.call;
      recording.call->made.push_back({content, output, element, written, Geometry::of(tensor)});
    }
    waits = content->holders > 0;
  }
  if (waits) decide(content);
}

}  // namespace memsave_ext::remat

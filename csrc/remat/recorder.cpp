// The part of a block that follows operators.
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "checkpoint/recomputing.h"
#include "checkpoint/saved.h"
#include "remat/block.h"
#include "remat/recompute.h"

namespace memsave_ext::remat {
namespace {

// How long chains of calls get, of which nothing was saved.
constexpr int kDeepest = 32;
// The argument of this package's batch norm.
constexpr size_t kStatistics = 4;

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool below_autograd() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

template <typename Visit>
void for_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor(), -1);
  } else if (value.isTensorList()) {
    const auto list = value.toTensorList();
    for (size_t i = 0; i < list.size(); ++i) visit(list.get(i), static_cast<int64_t>(i));
  } else if (value.isOptionalTensorList()) {
    const auto list = value.toOptionalTensorList();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::optional<at::Tensor> tensor = list.get(i);
      if (tensor) visit(*tensor, static_cast<int64_t>(i));
    }
  }
}

bool holds_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

}  // namespace

void Block::Recording::measure(double seconds, const at::RecordFunction& function) {
  int64_t bytes = 0;
  for (const auto& output : function.outputs()) {
    for_tensors(output, [&](const at::Tensor& tensor, int64_t) {
      if (is_plain(tensor)) bytes += static_cast<int64_t>(tensor.numel() * tensor.itemsize());
    });
  }
  constexpr int64_t kMeasurable = 1 << 16;
  std::atomic<double>& least = call->op->seconds_per_byte;
  if (bytes >= kMeasurable && seconds / bytes < least) least = seconds / bytes;
  call->seconds = std::min(seconds, 2 * least * bytes);
}

bool Block::Recording::writes(const c10::StorageImpl* storage) const {
  return std::any_of(written.begin(), written.end(), [&](const auto& pair) {
    return pair.first.storage().unsafeGetStorageImpl() == storage;
  });
}

// A new content of memory that is known or not.
Block::Entry& Block::renew(const at::Tensor& tensor) {
  Entry& entry = table_[tensor.storage().unsafeGetStorageImpl()];
  const bool external = entry.content && entry.content->external;
  if (entry.content) {
    const std::lock_guard<std::mutex> lock(contents_mutex());
    entry.content->overwritten = true;
  }
  entry.content = std::make_shared<Content>(tensor.storage(), external);
  entry.content->module = modules_.back();
  entry.tensor = nullptr;
  return entry;
}

Block::Entry& Block::entry_of(const at::Tensor& tensor) {
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto [found, is_new] = table_.try_emplace(storage);
  Entry& entry = found->second;
  const uint32_t version = version_of(tensor);
  if (is_new) {
    // Made by an operator that runs, or before this block.
    const bool has_history = tensor.requires_grad() && !tensor.is_leaf();
    const bool external = running_.empty() && !has_history;
    entry.content = std::make_shared<Content>(tensor.storage(), external);
    entry.content->module = modules_.back();
  } else if (entry.tensor == tensor.unsafeGetTensorImpl() && entry.version != version) {
    renew(tensor);  // by a change that no operator of this thread made
  } else {
    // In the middle of an operator that changes it in place.
    for (const Recording* recording : running_) {
      if (entry.content->born > recording->born) continue;
      for (const auto& [written, before] : recording->written) {
        if (written.storage().unsafeGetStorageImpl() == storage && version > before) {
          renew(tensor);
          break;
        }
      }
    }
  }
  entry.tensor = tensor.unsafeGetTensorImpl();
  entry.version = version;
  return entry;
}

std::unique_ptr<at::ObserverContext> Block::on_start(const at::RecordFunction& function) {
  Block* block = active();
  if (block == nullptr) return nullptr;
  const Operator* op = Operator::of(function);
  if (op == nullptr || op->is_composite) return nullptr;
  if (below_autograd() || in_region()) {
    if (op->any_writes) block->note_hidden_writes(*op, function);
    return nullptr;
  }
  return block->start(*op, function);
}

void Block::note_hidden_writes(const Operator& op, const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size() && i < op.writes.size(); ++i) {
    if (!op.writes[i]) continue;
    for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t) {
      if (!is_plain(tensor)) return;
      if (table_.find(storage_of(tensor)) == table_.end()) return;
      // The operator around this one, if it writes there, too, says how.
      before_write(tensor);
      renew(tensor);
    });
  }
}

// Dropped contents that are computed from this memory get a copy of it as it is.
void Block::before_write(const at::Tensor& tensor) {
  const auto found = table_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == table_.end()) return;
  const std::shared_ptr<Content> content = found->second.content;
  c10::intrusive_ptr<c10::StorageImpl> held;
  {
    const std::lock_guard<std::mutex> lock(contents_mutex());
    held = content->held;
    if (content->pins == 0 || held.get() != tensor.storage().unsafeGetStorageImpl()) return;
  }
  c10::Storage copy = copy_of(c10::Storage(held));
  const std::lock_guard<std::mutex> lock(contents_mutex());
  std::swap(held, content->held);
  content->held = c10::intrusive_ptr<c10::StorageImpl>::reclaim(copy.unsafeReleaseStorageImpl());
  content->copied = true;
}

bool Block::refer(Recording& recording, const at::Tensor& tensor, size_t argument,
                  int64_t element) {
  if (!tensor.defined()) return true;
  if (!is_plain(tensor)) return false;
  Entry& entry = entry_of(tensor);
  recording.call->references.push_back(
      {argument, element, entry.content, Geometry::of(tensor),
       tensor.unsafeGetTensorImpl()->version_counter(), entry.version,
       argument < recording.call->op->writes.size() && recording.call->op->writes[argument]});
  return true;
}

std::unique_ptr<Block::Recording> Block::start(const Operator& op,
                                               const at::RecordFunction& function) {
  ++recorded_;
  sweep();
  auto recording = std::make_unique<Recording>();
  recording->block = this;
  const auto inputs = function.inputs();
  recording->call = std::make_shared<Call>();
  Call& call = *recording->call;
  call.op = &op;
  call.module = modules_.back();
  recording->repeatable = op.is_repeatable;
  const bool trains =
      op.is_torch_batch_norm && inputs.size() > 5 && inputs[5].isBool() && inputs[5].toBool();
  if (op.is_torch_batch_norm && !trains && inputs.size() > 3 && inputs[3].isTensor()) {
    recording->repeatable = false;  // it reads statistics, which change unseen
  }
  call.arguments.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool writes = i < op.writes.size() && op.writes[i];
    // Batch norms are computed again without their running statistics.
    const bool left_out =
        (trains && (i == 3 || i == 4)) || (op.is_own_batch_norm && (i == 5 || i == 6));
    if (writes || left_out) {
      for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t) {
        if (!is_plain(tensor)) return;
        entry_of(tensor);
        before_write(tensor);
        recording->written.emplace_back(tensor, version_of(tensor));
      });
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
    if (left_out || !recording->repeatable) continue;
    for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t element) {
      recording->repeatable = refer(*recording, tensor, i, element) && recording->repeatable;
    });
  }
  recording->born = contents_so_far();
  running_.push_back(recording.get());
  recording->begin = std::chrono::steady_clock::now();
  return recording;
}

void Block::on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* recording = static_cast<Recording*>(context);
  if (recording == nullptr) return;
  const auto end = std::chrono::steady_clock::now();
  recording->measure(std::chrono::duration<double>(end - recording->begin).count(), function);
  recording->block->end(*recording, function);
}

void Block::end(Recording& recording, const at::RecordFunction& function) {
  running_.erase(std::find(running_.begin(), running_.end(), &recording));
  Call& call = *recording.call;
  int depth = 1;
  for (const auto& reference : call.references) {
    if (reference.content->call) depth = std::max(depth, reference.content->depth + 1);
  }
  if (depth > kDeepest) recording.repeatable = false;
  const auto outputs = function.outputs();
  if (call.op->is_own_batch_norm && outputs.size() == 2 && is_plain(outputs[1].toTensor())) {
    // It is computed again from the statistics of its forward.
    made(recording, outputs[1].toTensor(), 1, -1);
    if (recording.repeatable) {
      recording.repeatable = refer(recording, outputs[1].toTensor(), kStatistics, -1);
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    for_tensors(outputs[i], [&](const at::Tensor& tensor, int64_t element) {
      made(recording, tensor, i, element);
      if (const auto found = table_.find(storage_of(tensor)); found != table_.end()) {
        found->second.content->depth = depth;
      }
    });
  }
  // What was written and not returned.
  for (const auto& [tensor, before] : recording.written) {
    const auto found = table_.find(storage_of(tensor));
    if (found == table_.end() || found->second.content->born <= recording.born) renew(tensor);
  }
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
  entry.tensor = tensor.unsafeGetTensorImpl();
  entry.version = version_of(tensor);
  const std::shared_ptr<Content> content = entry.content;
  if (content->op == nullptr) content->op = recording.call->op;
  if (content->call || content->decided) return;  // by an operator inside of this one

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
      recording.call->made.push_back({content, output, element, written});
    }
    waits = content->holders > 0;
  }
  if (waits) decide(content);
}

}  // namespace memsave_ext::remat

// The part of a block that tracks which content each storage has now.
#include <algorithm>

#include "checkpoint/saved.h"
#include "remat/block.h"
#include "remat/recompute.h"
#include "remat/tensors.h"
#include "streams.h"

namespace memsave_ext::remat {

bool Block::Recording::writes(const c10::StorageImpl* storage) const {
  return std::any_of(written.begin(), written.end(), [&](const auto& pair) {
    return pair.first.storage().unsafeGetStorageImpl() == storage;
  });
}

// Gives the tensor's storage, known or not, a new content.
Block::Entry& Block::renew(const at::Tensor& tensor) {
  Entry& entry = table_[tensor.storage().unsafeGetStorageImpl()];
  const bool external = entry.content && entry.content->external;
  if (entry.content) {
    const std::lock_guard<std::mutex> lock(contents_mutex());
    entry.content->overwritten = true;
  }
  entry.content = std::make_shared<Content>(tensor.storage(), external);
  entry.content->module = modules_.back();
  entry.counter = {};
  return entry;
}

void Block::Entry::see(const at::Tensor& tensor) {
  counter = tensor.unsafeGetTensorImpl()->version_counter();
  version = version_of(tensor);
}

Block::Entry& Block::entry_of(const at::Tensor& tensor) {
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto [found, is_new] = table_.try_emplace(storage);
  Entry& entry = found->second;
  const uint32_t version = version_of(tensor);
  if (is_new) {
    // It was made before this block, unless a running operator may have made it or it has an
    // autograd history.
    const bool has_history = tensor.requires_grad() && !tensor.is_leaf();
    const bool external = running_.empty() && !has_history;
    entry.content = std::make_shared<Content>(tensor.storage(), external);
    entry.content->is_alias = external && step_ && step_->is_alias(tensor.storage());
    entry.content->module = modules_.back();
  } else if (entry.counter.enabled() && entry.counter.current_version() != entry.version) {
    renew(tensor);  // changed, but by no operator of this thread
  } else {
    // Renew it where an operator that still runs has already changed it in place.
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
  entry.see(tensor);
  return entry;
}

void Block::note_hidden_writes(const Operator& op, const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  const bool trains = op.is_torch_batch_norm && trains_batch_norm(inputs);
  for (size_t i = 0; i < inputs.size() && i < op.writes.size(); ++i) {
    if (!op.writes[i] && !(trains && is_running_statistic(i))) continue;
    for_tensors(inputs[i], [&](const at::Tensor& tensor, int64_t) {
      if (!is_plain(tensor)) return;
      if (table_.find(storage_of(tensor)) == table_.end()) return;
      // If the operator around this one writes there too, made() gives the new content its call.
      before_write(tensor);
      renew(tensor);
    });
  }
}

// Copies the tensor's memory, about to be written, if dropped contents are computed from it.
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

#include "remat/content.h"

#include <algorithm>
#include <atomic>
#include <unordered_map>

#include "locks.h"
#include "remat/fakes.h"
#include "streams.h"

namespace memsave_ext::remat {

Geometry Geometry::of(const at::Tensor& tensor) {
  Geometry geometry;
  geometry.assign(tensor);
  return geometry;
}

void Geometry::assign(const at::Tensor& tensor) {
  sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  strides.assign(tensor.strides().begin(), tensor.strides().end());
  offset = tensor.storage_offset();
  dtype = tensor.dtype();
  keys = tensor.key_set();
  is_wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

bool Geometry::fits(const at::Tensor& tensor) const {
  return tensor.dtype() == dtype && tensor.sizes() == at::IntArrayRef(sizes) &&
         tensor.strides() == at::IntArrayRef(strides) && tensor.storage_offset() == offset;
}

checkpoint::ByteRange Geometry::range() const {
  return checkpoint::ByteRange::of(sizes, strides, offset, dtype.itemsize());
}

int64_t Geometry::extent() const {
  const checkpoint::ByteRange bytes = range();
  return bytes.begin == bytes.end ? 0 : bytes.end;
}

at::Tensor Geometry::view(c10::Storage storage) const {
  if (is_fake(storage)) return fake_view(std::move(storage));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW,
                                                               std::move(storage), keys, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  if (is_wrapped_number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

at::Tensor Geometry::fake_view(c10::Storage storage) const {
  TORCH_CHECK(Fakes::current() != nullptr,
              "remat: the graph of a predicted step cannot be used outside of the prediction");
  const c10::DispatchKeySet flags{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative};
  const c10::DispatchKeySet meta{c10::DispatchKey::Meta, c10::DispatchKey::AutogradMeta,
                                 c10::DispatchKey::ADInplaceOrView};
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, std::move(storage), meta | (keys & flags), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  at::Tensor fake = Fakes::current()->make(tensor);
  if (is_wrapped_number) fake.unsafeGetTensorImpl()->set_wrapped_number(true);
  return fake;
}

bool is_plain_by_all(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() != nullptr && !tensor.is_quantized() &&
         !tensor.is_nested() && !tensor._is_zerotensor() &&
         !tensor.key_set().has(c10::DispatchKey::Functionalize) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         // A fake tensor would call Python to be asked for its device.
         (tensor.key_set().has_any(c10::python_ks)
              ? Fakes::current() != nullptr && is_fake(tensor.storage())
              : !tensor.is_meta());
}

namespace {

std::atomic<uint64_t> contents{0};

// By storage: how often contents from outside of a block are pinned. Guarded by contents_mutex();
// any_needed is its size, to be read without.
auto& needed = *new std::unordered_map<const c10::StorageImpl*, int64_t>();
std::atomic<size_t> any_needed{0};

// By storage: contents_so_far() when is_needed() told an optimizer that it may step it. Guarded by
// contents_mutex().
auto& may_step = *new std::unordered_map<const c10::StorageImpl*, uint64_t>();
std::atomic<int> drops_in_backward{0};

auto& being_written = *new std::vector<const c10::StorageImpl*>();

constexpr int kStates = static_cast<int>(State::kBack) + 1;

constexpr uint8_t bit(State state) { return uint8_t{1} << static_cast<int>(state); }

// By state: those that it may become. All may become kOpen, when nobody needs them any more.
constexpr uint8_t kNext[kStates] = {
    /* kOpen */ bit(State::kOpen) | bit(State::kKept) | bit(State::kDropped),
    /* kKept */ bit(State::kOpen) | bit(State::kLeaving) | bit(State::kDropped),
    /* kLeaving */ bit(State::kOpen) | bit(State::kKept) | bit(State::kAway),
    /* kDropped */ bit(State::kOpen) | bit(State::kRecomputed),
    /* kRecomputed */ bit(State::kOpen) | bit(State::kDropped),
    /* kAway */ bit(State::kOpen) | bit(State::kBack),
    /* kBack */ bit(State::kOpen) | bit(State::kAway),
};

}  // namespace

Content::Content(const c10::Storage& storage, bool external)
    : storage(storage.getWeakStorageImpl()),
      bytes(static_cast<int64_t>(storage.nbytes())),
      device(is_fake(storage) ? at::Device(at::kCPU) : storage.device()),
      born(++contents),
      external(external),
      made_on(current_stream(device)) {}

void Content::become(State next) {
  TORCH_INTERNAL_ASSERT((kNext[static_cast<int>(state_)] & bit(next)) != 0,
                        "remat: a content of state ", static_cast<int>(state_), " became one of ",
                        static_cast<int>(next));
  state_ = next;
}

void Content::set_alone(bool now) {
  if (alone && now != is_alone) *alone += now ? bytes : -bytes;
  is_alone = now;
}

bool Content::is_let_go() const {
  if (is_alone) return true;
  // A storage's Python object, which a prediction asks for, holds the storage.
  const bool has_object = held && held->device().is_meta() && held->pyobj_slot()->load_pyobj();
  if (held) return held.use_count() == (has_object ? 2u : 1u) + (is_leaving() ? 1u : 0u);
  return overwritten || storage.expired();
}

bool Content::held_by_block_alone() const {
  if (!held || !held->resizable()) return false;
  const bool has_object = held->pyobj_slot()->load_pyobj() != nullptr;
  if (held->device().is_meta()) return held.use_count() == (has_object ? 2u : 1u);  // as above
  return held.use_count() == 1 && !has_object;
}

c10::intrusive_ptr<c10::StorageImpl> Content::give_up() {
  set_alone(false);
  return std::move(held);
}

void Content::come_back(c10::intrusive_ptr<c10::StorageImpl> memory) {
  become(is_away() ? State::kBack : State::kRecomputed);
  recomputed = memory;
  given = c10::VariableVersion(0);
  made_on = current_stream(device);
  hold_alone(std::move(memory));
  ++fill;
  unopened = holders;
}

c10::intrusive_ptr<c10::StorageImpl> Content::give_up_again() {
  become(is_away() ? State::kAway : State::kDropped);
  return give_up();
}

void Content::hold_alone(c10::intrusive_ptr<c10::StorageImpl> memory) {
  held = std::move(memory);
  set_alone(true);
}

c10::intrusive_ptr<c10::StorageImpl> Content::memory() const {
  if (is_changed()) return {};
  if (held && !is_lost()) return held;
  return recomputed ? recomputed->lock() : c10::intrusive_ptr<c10::StorageImpl>();
}

uint64_t contents_so_far() { return contents; }

Lock& contents_mutex() {
  static auto& mutex = *new Lock(LockOrder::kContents);  // holders may outlive static destruction
  return mutex;
}

void pin(Content& content) {
  ++content.pins;
  if (!content.external) return;
  ++needed[content.storage._unsafe_get_target()];
  any_needed = needed.size();
}

void unpin(Content& content) {
  --content.pins;
  if (!content.external) return;
  const auto found = needed.find(content.storage._unsafe_get_target());
  if (--found->second == 0) needed.erase(found);
  any_needed = needed.size();
}

bool is_needed(const at::Tensor& tensor) {
  if ((any_needed == 0 && drops_in_backward == 0) || !is_plain(tensor)) return false;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const std::lock_guard<Lock> lock(contents_mutex());
  if (needed.count(storage) > 0) return true;
  if (drops_in_backward > 0) may_step[storage] = contents_so_far();
  return false;
}

bool may_be_stepped(const Call& call, const Reference& reference) {
  const auto* storage = reference.content->storage._unsafe_get_target();
  const auto found = may_step.find(storage);
  if (found != may_step.end() && call.born <= found->second) return true;
  return checkpoint::step_since(call.steps_before, storage, reference.geometry.range()).has_value();
}

DropsInBackward::DropsInBackward() { ++drops_in_backward; }

DropsInBackward::~DropsInBackward() {
  if (--drops_in_backward > 0) return;
  const std::lock_guard<Lock> lock(contents_mutex());
  may_step.clear();
}

Writing::Writing(const c10::StorageImpl* storage) : storage_(storage) {
  const std::lock_guard<Lock> lock(contents_mutex());
  being_written.push_back(storage);
}

Writing::~Writing() {
  if (storage_ == nullptr) return;
  const std::lock_guard<Lock> lock(contents_mutex());
  being_written.erase(std::find(being_written.begin(), being_written.end(), storage_));
}

bool is_being_written(const Content& content) {
  const auto* storage = content.storage._unsafe_get_target();
  return std::find(being_written.begin(), being_written.end(), storage) != being_written.end();
}

void release_unused(Content& content, Freed& freed,
                    std::vector<std::shared_ptr<Content>>& contents) {
  const auto release = [&](Content& unused) {
    if (unused.holders > 0 || unused.pins > 0) return;
    if (unused.held) freed.push_back(unused.give_up());
    // Nothing is left of a copy, nor of memory that it was recomputed into or brought back to.
    unused.copied = false;
    unused.recomputed.reset();
    unused.fill = 0;
    unused.become(State::kOpen);
    unused.pending.reset();
    if (unused.away) {
      unused.set_alone(false);  // it may be on its way back
      store::discard(std::move(unused.away));
    }
    for (auto& need : unused.needs) {
      unpin(*need);
      contents.push_back(std::move(need));
    }
    unused.needs.clear();
  };
  size_t next = contents.size();
  release(content);
  for (; next < contents.size(); ++next) release(*contents[next]);
}

}  // namespace memsave_ext::remat

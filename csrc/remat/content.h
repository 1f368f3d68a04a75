// A content: what a storage holds between two writes, and how to recompute it.
//
// Contents belong to storages, not tensors, because views and aliases share memory and a change in
// place of one of them changes all. A tensor is a content and a geometry.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/stepped.h"
#include "checkpoint/surroundings.h"
#include "remat/operators.h"
#include "remat/random.h"
#include "store/store.h"

namespace memsave_ext::remat {

struct Content;
struct Call;
using Contents = c10::SmallVector<std::shared_ptr<Content>, 3>;

// Whether a saved tensor's memory is dropped, or why it is kept.
enum class Verdict : int {
  kDropped,
  kInput,     // made outside of the block: a parameter or an input
  kNotAgain,  // not repeatable (random numbers, a collective), or a kernel or region made it unseen
  kHeavy,     // bound by arithmetic, such as a matrix product
  kNoGain,    // recomputing it would keep about as much memory, or is not cheap for its size
  kFits,      // the budget has room for it
  kMoved,     // its memory is dropped, and comes back from a store
  kNotMoved,  // there was no room in the store
  kFailed,    // a library's operator made it, and has failed its proof; see proof.h
};

// What has become of a content. content.cpp has the ways from one to another.
enum class State : uint8_t {
  kOpen,        // not decided on; `held` once a tensor of it is saved, or a dropped one needs it
  kKept,        // decided on: its holders have its memory
  kLeaving,     // kept, while its memory is copied to a store
  kDropped,     // recomputed when a holder asks for it
  kRecomputed,  // dropped, and its memory is there again until its holders have opened it
  kAway,        // its values are in a store
  kBack,        // away, and its memory is there again until its holders have opened it
};

// How a tensor lies in its storage.
struct Geometry {
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;  // including the conjugate and negative bits
  // Whether it is a Python number that became a tensor, which decides dtypes by other rules.
  bool is_wrapped_number = false;

  static Geometry of(const at::Tensor& tensor);
  void assign(const at::Tensor& tensor);
  checkpoint::ByteRange range() const;
  int64_t extent() const;  // bytes from the start of the storage to the tensor's end
  bool fits(const at::Tensor& tensor) const;  // whether it is of this dtype and lies like this
  // Returns a tensor of this geometry on `storage`, without autograd history.
  at::Tensor view(c10::Storage storage) const;

 private:
  at::Tensor fake_view(c10::Storage storage) const;
};

// Whether a tensor is just memory with a geometry: strided, with real memory (not meta), no wrapper
// of other tensors; or, while a step is predicted, a fake of one.
bool is_plain_by_all(const at::Tensor& tensor);
// Of tensors on a CPU or GPU that are no more than that.
inline const uint64_t kUsualKeys =
    (c10::DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit}) |
     c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::AutogradFunctionality,
                          c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Conjugate,
                          c10::DispatchKey::Negative}) |
     c10::autocast_dispatch_keyset)
        .raw_repr();
inline bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const bool is_usual = (impl.key_set().raw_repr() & ~kUsualKeys) == 0 && impl.unsafe_storage() &&
                        !impl.has_symbolic_sizes_strides();
  return is_usual || is_plain_by_all(tensor);
}

// A tensor among the arguments of a call.
struct Reference {
  size_t argument;  // position of the argument
  int64_t element;  // position in an argument that is a list; else -1
  std::shared_ptr<Content> content;
  Geometry geometry;
  c10::VariableVersion version;  // version counter, shared with the tensor
  uint32_t noted;                // the version at the call
  bool written;                  // by the operator
  bool overwritten;              // written in full, without reading what was there
  // Holds the memory of a Python number that became a tensor, which nobody else does.
  c10::intrusive_ptr<c10::StorageImpl> number;

  // Whether the content's memory has been written since the call, also by writes that the recorder
  // did not see (those that it sees begin a new content).
  bool changed() const { return version.enabled() && version.current_version() != noted; }
};

// An operator that was called, with what it takes to call it again.
struct Call {
  const Operator* op = nullptr;
  at::Device device{at::kCPU};                 // of its tensors
  c10::SmallVector<c10::IValue, 6> arguments;  // None in place of tensors, which are references
  c10::SmallVector<Reference, 2> references;
  std::optional<Random> random;  // set where a second call must draw the same numbers
  std::shared_ptr<const checkpoint::Settings>
      settings;               // under which it was called; shared by many
  uint64_t steps_before = 0;  // steps_so_far() when it was called
  uint64_t born = 0;          // contents_so_far() then
  // Its result as bits, which are unpacked in place of a second call; undefined for a real call.
  at::Tensor mask;
  double seconds = 0;  // of one call, or 0 while the operator's first calls are not trusted
  // Seconds of this call by the host's clock, whatever they are worth; on CUDA, where that clock
  // only sees launches, those of an earlier step, or infinite.
  double measured = 0;
  int32_t module = -1;  // number of the module that called it; -1 for none
  int32_t number = -1;  // its position in the trace of the block's step; -1 without
  // A content that it made, which may be gone by now.
  struct Made {
    std::weak_ptr<Content> content;
    size_t output;      // position among the values it returned
    int64_t element;    // position in a value that is a list; else -1
    int64_t reference;  // written in place: position of the argument in `references`; else -1
    Geometry geometry;  // of the tensor that was returned
    // A hash of its values, where they are on the CPU and a library's operator made them; else 0.
    uint64_t bits = 0;
  };
  c10::SmallVector<Made, 1> made;
};

// Guarded by contents_mutex(), except for what never changes.
struct Content : std::enable_shared_from_this<Content> {
  // The storage it was made in. The weak reference keeps its address from being given to another.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const int64_t bytes;
  const c10::Device device;
  const uint64_t born;           // its number, counted over all contents
  const bool external;           // made outside of this block: a parameter or an input
  bool is_alias = false;         // see Step::is_alias(); such a one is external, too
  std::shared_ptr<Call> call;    // which made it; null: it cannot be recomputed
  int depth = 0;                 // length of the chain of calls back to contents without one
  int32_t module = -1;           // number of the module that made it; -1 for none
  const Operator* op = nullptr;  // that made it; null where none was seen

  // Its memory, where it is kept or was recomputed; null where it is dropped or nobody saved it.
  c10::intrusive_ptr<c10::StorageImpl> held;
  int64_t extent = 0;  // how many bytes of `held`, from its start, dropped contents read
  // The stream that filled its memory (of an external one: that first used it); null on a CPU.
  std::optional<c10::Stream> made_on;
  bool overwritten = false;  // the storage has been written since
  bool copied = false;       // `held` is a copy from before the storage was written
  bool relied_on = false;    // dropped contents are recomputed through its call, not from it
  std::vector<std::weak_ptr<Content>> relied_on_by;  // these, until it is decided on
  std::optional<checkpoint::Pending> pending;        // set while it is to be recomputed
  Verdict verdict = Verdict::kFits;                  // what was decided, or came of it later
  int dropped_depth = 0;        // of a dropped one: dropped ones in its chain, with itself
  int64_t holders = 0;          // saved tensors of it
  int64_t pins = 0;             // dropped contents that need it
  Contents needs;               // of a dropped one: the contents it pins
  bool held_on_the_way = true;  // recomputed on the way to another content, it is held, too
  int32_t number = -1;          // its position in the trace of the block's step; -1 without
  int32_t save = -1;            // until it has one: which of the step's saved tensors was its first
  // Bytes of all contents that only the block holds; null without a budget.
  std::shared_ptr<int64_t> alone;
  bool is_alone = false;  // only the block holds it, and it is counted there
  // The memory that it was recomputed into, which a node may use still when it is held no more.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> recomputed;
  uint64_t fill = 0;  // how often it was recomputed, or brought back
  // Of tensors on the memory that came back the latest time: who is given one may keep it, as
  // autograd does that makes a gradient of it, and write there.
  c10::VariableVersion given{c10::VariableVersion::DISABLED};
  uint64_t walk = 0;                  // number of the latest walk that has visited it
  int64_t unopened = 0;               // holders that have not opened the latest recompute
  std::shared_ptr<store::Away> away;  // in kLeaving, kAway and kBack

  Content(const c10::Storage& storage, bool external);
  State state() const { return state_; }
  void become(State next);  // needs the mutex
  bool is_decided() const { return state_ != State::kOpen; }
  // Whether its holders recompute it, or have it brought back.
  bool is_dropped() const { return state_ >= State::kDropped; }
  bool is_away() const { return state_ >= State::kAway; }
  bool is_leaving() const { return state_ == State::kLeaving; }
  // Whether it is dropped, and its memory is there.
  bool has_come_back() const { return state_ == State::kRecomputed || state_ == State::kBack; }
  // Whether its memory is that in which it was made, if it is there: neither a copy nor recomputed.
  bool is_original() const { return !copied && fill == 0; }
  // Gives up `held`, which is returned. Needs the mutex.
  c10::intrusive_ptr<c10::StorageImpl> give_up();
  // Has memory again that was recomputed or brought back, and gives it up again. Need the mutex.
  void come_back(c10::intrusive_ptr<c10::StorageImpl> memory);
  c10::intrusive_ptr<c10::StorageImpl> give_up_again();
  // Holds memory that nobody else refers to. Needs the mutex.
  void hold_alone(c10::intrusive_ptr<c10::StorageImpl> memory);
  // Its memory, held or still in use after a recompute, with its values; null where it has to be
  // recomputed. Needs the mutex.
  c10::intrusive_ptr<c10::StorageImpl> memory() const;
  void set_alone(bool now);  // needs the mutex
  // Whether nobody but the block could have its values still. Needs the mutex.
  bool is_let_go() const;
  // Whether its memory is free once it is given up: nobody else refers to it, not even an operator
  // that runs, and no Python object, for which the GIL would be waited for. Needs the mutex.
  bool held_by_block_alone() const;
  // Whether its values are gone: overwritten, without a copy or a recompute. Needs the mutex.
  bool is_lost() const { return overwritten && is_original() && !is_away(); }
  // Whether the memory that came back has been written by who was given it. Needs the mutex.
  bool is_changed() const { return fill > 0 && given.current_version() > 0; }

 private:
  State state_ = State::kOpen;
};

// How many contents have been created in this process.
uint64_t contents_so_far();

// Under it no tensor is freed and no operator called: rule 3 of CONTRIBUTING.md.
Lock& contents_mutex();

// Storages to free once the mutex is released. Declare it before the lock.
using Freed = c10::SmallVector<c10::intrusive_ptr<c10::StorageImpl>, 2>;

// The caller of these three holds the mutex.

// Notes that a dropped content needs this one, or no longer does.
void pin(Content& content);
void unpin(Content& content);

// Where no saved tensor and no dropped content needs `content`, releases its memory, and then
// likewise the contents that it pinned, which are added to `contents`. The caller destroys `freed`
// and `contents` without the mutex.
void release_unused(Content& content, Freed& freed,
                    std::vector<std::shared_ptr<Content>>& contents);

// While it exists, an operator is about to write a storage, or writes it: nothing else begins to be
// recomputed from it.
class Writing {
 public:
  explicit Writing(const c10::StorageImpl* storage);
  ~Writing();
  Writing(Writing&& other) noexcept : storage_(std::exchange(other.storage_, nullptr)) {}
  Writing& operator=(Writing&&) = delete;

 private:
  const c10::StorageImpl* storage_;  // null where it was moved away
};
bool is_being_written(const Content& content);  // needs the mutex

// Returns null where the tensor is not plain.
inline const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Calls visit(tensor, element) for each; `element` is the position in a list, else -1.
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

inline bool holds_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

// For an optimizer that steps in backward: whether dropped values that backward still needs are
// computed from this tensor's memory. Only memory that was made outside of a block counts. An
// optimizer that is told no may step it at once, so that nothing more is dropped that would be
// computed from it.
bool is_needed(const at::Tensor& tensor);

// Whether an optimizer has stepped this argument of a call since, or was told that it may.
bool may_be_stepped(const Call& call, const Reference& reference);

// While one exists, blocks may drop in backward what they have kept until then.
class DropsInBackward {
 public:
  DropsInBackward();
  ~DropsInBackward();
  DropsInBackward(const DropsInBackward&) = delete;
  DropsInBackward& operator=(const DropsInBackward&) = delete;
};

}  // namespace memsave_ext::remat

#include "remat/recompute.h"

#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "checkpoint/call.h"
#include "checkpoint/recomputing.h"
#include "locks.h"
#include "remat/again.h"
#include "remat/fakes.h"
#include "remat/memory.h"
#include "remat/proof.h"
#include "remat/random.h"
#include "streams.h"

namespace memsave_ext::remat {
namespace {

// As memsave_ext/checkpoint/errors.py takes it.
auto facts_of(const Geometry& geometry) {
  return std::make_tuple(std::vector<int64_t>(geometry.sizes.begin(), geometry.sizes.end()),
                         std::vector<int64_t>(geometry.strides.begin(), geometry.strides.end()),
                         c10::typeMetaToScalarType(geometry.dtype));
}

// Recomputes one content, and everything that is needed on the way. What is on the way is freed
// after its last use, unless saved tensors wait for it.
class Recomputation {
 public:
  explicit Recomputation(Block& block) : block_(block) {}

  c10::Storage memory(const std::shared_ptr<Content>& content) {
    wanted_ = content.get();
    {
      const std::lock_guard<Lock> lock(contents_mutex());
      count_uses(*content);
    }
    return use(content);
  }

 private:
  // Counts how often each content that is to be recomputed will be used. The caller holds
  // contents_mutex().
  void count_uses(const Content& content) {
    if (auto memory = content.memory()) {
      alive_.push_back(std::move(memory));
      return;
    }
    if (++uses_[&content] > 1 || !content.call || content.is_away()) return;
    if (!calls_.insert(content.call.get()).second) return;
    for (const auto& reference : content.call->references) {
      if (!reference.overwritten) count_uses(*reference.content);
    }
  }

  // Returns the memory of a content, recomputed where necessary, for one use of it.
  c10::Storage use(const std::shared_ptr<Content>& content) {
    if (auto memory = ready(*content)) return *memory;
    if (computed_.count(content.get()) == 0) {
      if (is_away(*content)) {
        keep(content, block_.mover()->bring_back(content));
      } else {
        TORCH_INTERNAL_ASSERT(content->call, "remat: a content that was not kept has no call");
        run(*content->call);
      }
    }
    const auto found = computed_.find(content.get());
    TORCH_INTERNAL_ASSERT(found != computed_.end(), "remat: a call did not make its content");
    c10::Storage storage = found->second;
    if (--uses_[content.get()] <= 0) computed_.erase(found);
    return storage;
  }

  static bool is_away(const Content& content) {
    const std::lock_guard<Lock> lock(contents_mutex());
    return content.is_away();
  }

  // Returns the memory of a content if it is there, for use on the current stream.
  static std::optional<c10::Storage> ready(Content& content) {
    Freed freed;
    c10::intrusive_ptr<c10::StorageImpl> memory;
    std::optional<c10::Stream> made_on;
    {
      const std::lock_guard<Lock> lock(contents_mutex());
      if (content.has_come_back() && content.is_changed()) {
        freed.push_back(content.give_up_again());
      }
      memory = content.memory();
      made_on = content.made_on;
    }
    if (!memory) return std::nullopt;
    c10::Storage storage(std::move(memory));
    use_here(storage, made_on);
    return storage;
  }

  void run(Call& call) {
    call.op->check_is_there();
    std::vector<c10::IValue> stack(call.arguments.begin(), call.arguments.end());
    // Memory that the operator writes: the content's own after its last use, or a copy.
    std::unordered_map<const Content*, c10::Storage> written;
    std::vector<c10::Storage> storages;
    size_t last_argument = stack.size();
    for (const auto& reference : call.references) {
      c10::Storage storage =
          reference.overwritten ? empty_for(*reference.content) : argument(call, reference);
      if (!reference.overwritten) check_unchanged(call, reference, storage);
      if (reference.written && !reference.overwritten) {
        const auto [memory, is_new] = written.try_emplace(reference.content.get(), storage);
        if (is_new && !is_last_use(*reference.content)) memory->second = copy_of(storage);
        storage = memory->second;
      }
      storages.push_back(storage);
      set(stack, reference, reference.geometry.view(std::move(storage)),
          reference.argument != last_argument);
      last_argument = reference.argument;
    }
    const checkpoint::SettingsGuard settings(*call.settings, !call.op->makes_no_products);
    if (block_.step() != nullptr) block_.step()->repeats();
    const double begin = now();
    std::optional<RandomGuard> random;
    if (call.random) random.emplace(*call.random, *call.op, stack);
    if (call.mask.defined()) {
      unpack_mask(call.mask, call.references[0].geometry.dtype, storages[0]);
    } else {
      call.op->call(stack);
    }
    random.reset();
    if (block_.step() != nullptr) block_.step()->repeated(call);
    // On CUDA this was the time of launches; a time of its own would be two events in each step.
    block_.ran_again(call, call.device.is_cuda() ? call.seconds : now() - begin);
    for (const auto& made : call.made) {
      const std::shared_ptr<Content> content = made.content.lock();
      if (!content || is_away(*content)) continue;
      if (made.reference >= 0) {
        keep(content, storages[made.reference]);
      } else {
        keep(content, result(call, stack, made).storage());
      }
    }
  }

  c10::Storage argument(const Call& call, const Reference& reference) {
    bool is_lost;
    {
      const std::lock_guard<Lock> lock(contents_mutex());
      is_lost = reference.content->is_lost() && !reference.content->call;
    }
    if (is_lost) throw_changed(call, reference);
    return use(reference.content);
  }

  // Whether nobody will read a content's recomputed memory after the use that it was just given
  // for.
  bool is_last_use(const Content& content) const {
    const auto found = uses_.find(&content);
    if (found == uses_.end() || found->second > 0) return false;
    const std::lock_guard<Lock> lock(contents_mutex());
    return !content.held;
  }

  // Stores a recomputed content; it stays in memory if saved tensors of it still wait for it.
  void keep(const std::shared_ptr<Content>& content, const c10::Storage& storage) {
    const auto uses = uses_.find(content.get());
    if (uses != uses_.end() && uses->second > 0) computed_.insert_or_assign(content.get(), storage);
    const std::lock_guard<Lock> lock(contents_mutex());
    if (!content->is_dropped() || content->has_come_back() || content->holders == 0) return;
    if (content.get() != wanted_ && !content->held_on_the_way) return;
    content->come_back(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl()));
  }

  // Returns the result that the content was made of. Of another dtype or layout its bytes would be
  // taken for other values.
  static at::Tensor result(const Call& call, const std::vector<c10::IValue>& stack,
                           const Call::Made& made) {
    const c10::IValue& value = stack[made.output];
    at::Tensor tensor =
        made.element < 0 ? value.toTensor() : value.toTensorList().get(made.element);
    if (!made.geometry.fits(tensor)) {
      call.op->has_failed = call.op->is_library;
      checkpoint::throw_error("remat_other_result", call.op->name.name, facts_of(made.geometry),
                              facts_of(Geometry::of(tensor)));
    }
    // A library's operator has given the same twice, which says nothing of what it depends on now.
    if (made.bits != 0 && made.bits != bits_of(tensor)) {
      call.op->has_failed = true;
      checkpoint::throw_error("remat_other_values", call.op->name.name);
    }
    return tensor;
  }

  static void set(std::vector<c10::IValue>& stack, const Reference& reference,
                  const at::Tensor& tensor, bool is_first) {
    c10::IValue& argument = stack[reference.argument];
    if (reference.element < 0) {
      argument = tensor;
      return;
    }
    // The list is copied first, because the call's own must not change.
    if (argument.isOptionalTensorList()) {
      if (is_first) argument = argument.toOptionalTensorList().copy();
      argument.toOptionalTensorList().set(reference.element, tensor);
    } else {
      if (is_first) argument = argument.toTensorList().copy();
      argument.toTensorList().set(reference.element, tensor);
    }
  }

  void check_unchanged(const Call& call, const Reference& reference, const c10::Storage& storage) {
    {
      const std::lock_guard<Lock> lock(contents_mutex());
      const Content& content = *reference.content;
      // What was moved was read from memory that nobody may have written meanwhile, but for those
      // whom the block has seen.
      const bool was_moved = content.is_away() && !content.overwritten;
      const bool is_in_place = content.held.get() == storage.unsafeGetStorageImpl();
      if (!was_moved && (!content.is_original() || !is_in_place)) return;
    }
    if (reference.changed()) throw_changed(call, reference);
    const auto& schema = call.op->handle.schema();
    const auto stepped = checkpoint::step_since(call.steps_before, storage.unsafeGetStorageImpl(),
                                                reference.geometry.range());
    if (stepped) {
      const auto& sizes = reference.geometry.sizes;
      checkpoint::throw_error("remat_stepped", schema.name(),
                              schema.arguments()[reference.argument].name(),
                              std::vector<int64_t>(sizes.begin(), sizes.end()), *stepped);
    }
    if (static_cast<int64_t>(storage.nbytes()) < reference.geometry.extent()) {
      checkpoint::throw_error("remat_given_back", schema.name(),
                              schema.arguments()[reference.argument].name());
    }
  }

  [[noreturn]] static void throw_changed(const Call& call, const Reference& reference) {
    const auto& schema = call.op->handle.schema();
    const auto& sizes = reference.geometry.sizes;
    checkpoint::throw_error(
        "remat_changed", schema.name(), schema.arguments()[reference.argument].name(),
        std::vector<int64_t>(sizes.begin(), sizes.end()), static_cast<int64_t>(reference.noted),
        static_cast<int64_t>(reference.version.current_version()));
  }

  Block& block_;
  const Content* wanted_ = nullptr;
  // The calls that hold these contents, and so their keys here, are alive until the end.
  std::unordered_map<const Content*, c10::Storage> computed_;
  std::unordered_map<const Content*, int64_t> uses_;  // that are still to come
  std::unordered_set<const Call*> calls_;
  Freed alive_;  // what was there at the beginning, and so needs no call
};

}  // namespace

c10::Storage memory_of(Block& block, const std::shared_ptr<Content>& content) {
  const std::lock_guard<RecursiveLock> lock(block.again_mutex());
  const checkpoint::RecomputeScope recomputing(checkpoint::Again::kOperators);
  const AgainScope again;
  return Recomputation(block).memory(content);
}

}  // namespace memsave_ext::remat

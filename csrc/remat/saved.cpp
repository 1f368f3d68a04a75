#include "remat/saved.h"

#include <pybind11/pybind11.h>

#include <optional>

#include "checkpoint/call.h"
#include "checkpoint/tensors.h"
#include "locks.h"
#include "remat/pool.h"
#include "remat/recompute.h"
#include "streams.h"

namespace memsave_ext::remat {
namespace {

// What autograd saves of its own results has a graph already, which would hold itself by it.
at::Tensor without_graph(const at::Tensor& tensor) {
  return tensor.is_leaf() ? tensor : checkpoint::detached(tensor);
}

class BlockSaved final : public checkpoint::Saved {
 public:
  BlockSaved(std::shared_ptr<Block> block, Block::Saving saving, const at::Tensor& tensor)
      : block_(std::move(block)),
        content_(std::move(saving.content)),
        number_(saving.number),
        geometry_(Geometry::of(tensor)),
        version_(tensor.unsafeGetTensorImpl()->version_counter()),
        noted_(checkpoint::version_of(tensor)),
        opened_(saving.fill) {
    if (content_->external) tensor_ = without_graph(tensor);
  }

  ~BlockSaved() override {
    block_->released(*content_, number_, release());
    store::empty_trash();
  }

  at::Tensor open() override {
    block_->opened(*content_, number_);
    if (auto tensor = open_held()) return *tensor;
    std::optional<pybind11::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    c10::Storage storage = memory_of(*block_, content_);
    if (block_->step()) block_->step()->recomputed();
    no_gil.reset();
    // Counts this holder as served: it does not ask again in this backward.
    if (auto tensor = open_held()) return *tensor;
    return geometry_.view(std::move(storage));
  }

 private:
  // Returns whether this was the content's last holder.
  bool release() {
    Freed freed;
    std::vector<std::shared_ptr<Content>> contents;
    const std::lock_guard<Lock> lock(contents_mutex());
    --content_->holders;
    if (content_->fill != opened_) close(freed);
    release_unused(*content_, freed, contents);
    return content_->holders == 0;
  }

  // Returns the tensor if the content's memory is there.
  std::optional<at::Tensor> open_held() {
    Freed freed;
    c10::intrusive_ptr<c10::StorageImpl> held;
    std::optional<c10::Stream> made_on;
    c10::VariableVersion given;
    bool original, is_read_once;
    {
      const std::lock_guard<Lock> lock(contents_mutex());
      held = content_->held && !content_->is_changed() ? content_->held : content_->memory();
      if (!held) return std::nullopt;
      given = content_->given;
      original = content_->is_original();
      is_read_once =
          original || content_->is_away();  // and so speaks of the version it was saved as
      made_on = content_->made_on;
      if (content_->fill != opened_) {
        opened_ = content_->fill;
        close(freed);
      }
    }
    if (!freed.empty() && block_->step()) block_->step()->given_up(freed);
    if (is_read_once && version_.enabled() && version_.current_version() != noted_) {
      checkpoint::throw_error("remat_saved_changed",
                              std::vector<int64_t>(geometry_.sizes.begin(), geometry_.sizes.end()),
                              static_cast<int64_t>(noted_),
                              static_cast<int64_t>(version_.current_version()));
    }
    c10::Storage storage(std::move(held));
    if (original && tensor_.defined() && geometry_.fits(tensor_) &&
        tensor_.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
      return tensor_;
    }
    // Of an original autograd's own rules speak: who saved it was ordered after it.
    if (!original) use_here(storage, made_on);
    at::Tensor tensor = geometry_.view(std::move(storage));
    // Whoever is given it, a region for one, sees later changes of the memory by its version; so is
    // seen where he changes it.
    const c10::VariableVersion& version = original ? version_ : given;
    if (version.enabled()) tensor.unsafeGetTensorImpl()->set_version_counter(version);
    return tensor;
  }

  // Counts one holder less that waits for the recomputed memory, and frees it after the last one.
  void close(Freed& freed) {
    if (--content_->unopened == 0 && content_->has_come_back()) {
      freed.push_back(content_->give_up_again());
    }
  }

  const std::shared_ptr<Block> block_;
  const std::shared_ptr<Content> content_;
  const int32_t number_;  // among the saved tensors of the step
  const Geometry geometry_;
  const c10::VariableVersion version_;
  const uint32_t noted_;
  // One from outside of the block, which comes back as the object that it was.
  at::Tensor tensor_;
  uint64_t opened_;  // the content's `fill` that this holder has opened last
};

}  // namespace

// Keeps a tensor that the block cannot drop as a content. Checks its version, because torch does
// not where there are hooks.
class KeptSaved final : public checkpoint::Saved {
 public:
  explicit KeptSaved(const at::Tensor& tensor)
      : tensor_(without_graph(tensor)), noted_(checkpoint::version_of(tensor)) {}

  at::Tensor open() override {
    const uint32_t now = checkpoint::version_of(tensor_);
    if (now != noted_) {
      checkpoint::throw_error("remat_saved_changed", tensor_.sizes().vec(),
                              static_cast<int64_t>(noted_), static_cast<int64_t>(now));
    }
    return tensor_;
  }

 private:
  const at::Tensor tensor_;
  const uint32_t noted_;
};

bool BlockPacker::takes_next() {
  return block_->step() == nullptr || Block::active() != block_.get() ||
         block_->step()->must_pack();
}

std::shared_ptr<checkpoint::Saved> BlockPacker::pack(at::Tensor& tensor) {
  // In a backward with create_graph, inside of the block, nothing is dropped.
  if (Block::active() != block_.get()) return std::make_shared<KeptSaved>(tensor);
  Block::Saving saving = block_->save(tensor);
  if (!saving.content) return std::make_shared<KeptSaved>(tensor);
  auto saved =
      std::allocate_shared<BlockSaved>(Pool<BlockSaved>(), block_, std::move(saving), tensor);
  if (block_->step()) block_->step()->check();
  return saved;
}

}  // namespace memsave_ext::remat

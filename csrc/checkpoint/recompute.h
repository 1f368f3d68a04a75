// One recompute of a region: fills the values of one backward and compares with the forward.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "checkpoint/region.h"
#include "compat.h"

namespace memsave_ext::checkpoint {

// One run of the function for its saved tensors.
class Recompute {
 public:
  Recompute(Region& region, const BackwardKey& key);

  // The recompute saves `tensor`. Returns false when it was the last one needed: time to stop.
  bool save(const at::Tensor& tensor);
  bool stopped() const { return stopped_; }
  // Throws where forward and recompute differ. `reads`: of tensors that have changed in between.
  void check(const std::vector<Read>& reads) const;

 private:
  struct Difference {
    size_t position;
    Metadata saved, recomputed;
  };
  struct Mutation {  // of a tensor from outside that both runs save
    size_t position;
    Metadata metadata;
    uint32_t in_forward, in_recompute;
  };

  Region& region_;
  BackwardKey key_;
  size_t needed_;  // number of positions up to the last one with a holder
  size_t count_ = 0;
  const bool forward_finished_;
  bool may_stop_;
  bool stopped_ = false;
  std::vector<Difference> different_;
  std::vector<Mutation> mutated_;
};

// Hands what the recompute's graph saves to `run`, which outlives the hooks' scope.
class RecomputePacker final : public Packer {
 public:
  explicit RecomputePacker(Recompute& run) : run_(run) {}
  std::shared_ptr<Saved> pack(at::Tensor& tensor) override;

 private:
  Recompute& run_;
};

// Operations that save a tensor first and fill it then, without moving its version counter: a
// recompute stopped at that save hands out what was in the memory before (pytorch#193671).
bool fills_after_saving(const torch::autograd::Node& node);

// Whether the node that saved last in the forward, numbered `sequence_nr` - 1, is such an
// operation. Looks at the outputs' graph down to that number, which is the tail only.
bool last_save_is_filled_later(PyObject* outputs, uint64_t sequence_nr);

// Stopping is an exception through C++ and Python, some 15 us. It is not worth it where the last
// saved tensors are small and at most two operations follow. By sizes, not by a clock: the same
// program must call its functions the same number of times on every machine.
bool worth_stopping(uint64_t sequence_nr, int64_t numel);

}  // namespace memsave_ext::checkpoint

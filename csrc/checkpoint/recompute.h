// One recompute of a region: fills the values of one backward and compares with the forward.
#pragma once

#include <vector>

#include "checkpoint/region.h"

namespace memsave_ext {

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

}  // namespace memsave_ext

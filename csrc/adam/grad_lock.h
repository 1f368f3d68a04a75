// The lock that torch holds while it accumulates into a parameter's gradient. Post-accumulate hooks
// run after that, without it.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

#include "compat.h"

namespace memsave_ext::adam {

class GradLock {
 public:
  // Locks the gradient of the parameter whose torch::autograd::impl::grad_accumulator() this is.
  // Where that is null, as the parameter requires no gradient, nothing is locked.
  explicit GradLock(NodePtr accumulator) : accumulator_(std::move(accumulator)) {
    if (accumulator_) lock_ = std::unique_lock((*accumulator_).*OfNode::mutex());
  }

 private:
  struct OfNode : torch::autograd::Node {
    static auto mutex() -> std::mutex torch::autograd::Node::* { return &OfNode::mutex_; }
  };

  NodePtr accumulator_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace memsave_ext::adam

// torch's lock of a gradient, with which it adds to it. Hooks run after that, without it.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

#include "compat.h"

namespace memsave_ext::adam {

class GradLock {
 public:
  // Of a parameter with this torch::autograd::impl::grad_accumulator(): none where it requires no
  // gradient.
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

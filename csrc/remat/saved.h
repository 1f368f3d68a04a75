// The pack hook of a block: what autograd holds in place of the tensors it saves.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "checkpoint/hooks.h"
#include "remat/block.h"

namespace memsave_ext::remat {

class BlockPacker final : public checkpoint::Packer {
 public:
  explicit BlockPacker(std::shared_ptr<Block> block) : block_(std::move(block)) {}
  bool takes_next() override;
  std::shared_ptr<checkpoint::Saved> pack(at::Tensor& tensor) override;

 private:
  const std::shared_ptr<Block> block_;
};

}  // namespace memsave_ext::remat

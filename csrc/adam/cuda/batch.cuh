// The arguments of a launch of steps, all given by value. There is no copy to the device, and no
// memory that would have to outlive the call, so that a CUDA graph can capture it.
#pragma once

#include <cstdint>

#include "adam/kernels.h"
#include "adam/math.h"

namespace memsave_ext::adam {

// Which block of a launch works on which elements: tensors are cut into chunks of one length, and
// each block works on one chunk. For host and device, so that it can be checked without a device.

constexpr int64_t kShortestChunk = 2048;  // elements: some vectors for every thread of a block
constexpr int64_t kLongestChunk = 65536;

// Returns a chunk length that makes enough blocks for the largest devices, where there are enough
// elements.
inline int64_t chunk_length(int64_t elements) {
  constexpr int64_t kBlocks = 2048;
  int64_t length = kShortestChunk;
  while (length < kLongestChunk && length * kBlocks < elements) length *= 2;
  return length;
}

MEMSAVE_EXT_INLINE int64_t chunks_of(int64_t elements, int64_t length) {
  return (elements + length - 1) / length;
}

struct Chunk {
  int tensor;
  int64_t begin;  // its first element in the tensor
  int count;
};

// Returns chunk `index` of all tensors in a row. first_chunk of each tensor is the number of chunks
// before its own; tensors without elements are never found.
template <typename Tensor>
MEMSAVE_EXT_INLINE Chunk find_chunk(const Tensor* tensors, int count, int64_t length,
                                    uint32_t index) {
  int low = 0, high = count;  // the tensor is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tensors[middle].first_chunk <= index ? low : high) = middle;
  }
  const int64_t begin = (index - tensors[low].first_chunk) * length;
  const int64_t left = tensors[low].numel - begin;
  return {low, begin, static_cast<int>(left < length ? left : length)};
}

// What the tensors of one parameter group share.
struct Recipe {
  Options options;
  double step;
  Powers powers;  // of `step`; unset where the step is on the device
  const float* device_lr;
  uint32_t first_block;  // 0, but for a part of a parameter, which is launched alone
};

// The fields are as in Item. All formats share this struct though they need different fields:
// launches of fewer tensors cost less than another kind of batch would.
struct BatchedTensor {
  void* param;
  void* param_low_part;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  union {  // blockwise states have no amsgrad
    void* max_exp_avg_sq;
    float* exp_avg_scale;
  };
  float* exp_avg_sq_scale;
  const float* device_step;
  const double* factor;
  const float* skip;
  int64_t numel : 56;
  int64_t recipe : 8;
  uint32_t first_chunk;
  uint32_t position;
};

struct Batch {
  static constexpr int kRecipes = 5;
  static constexpr int kTensors = 37;

  int64_t chunk_length;
  int tensor_count;
  Recipe recipes[kRecipes];
  BatchedTensor tensors[kTensors];
};

static_assert(sizeof(Batch) <= 4096, "what every device takes as a kernel's arguments");

// Fills batches with items, and calls launch(batch, blocks) for each when it is full. finish()
// launches the last.
template <typename Launch>
class Batcher {
 public:
  explicit Batcher(const Launch& launch) : launch_(launch) { clear(); }

  void add(const Item& item) {
    if (item.numel == 0) return;
    if (batch_.tensor_count == Batch::kTensors) finish();
    int recipe = find_recipe(item);
    if (recipe == Batch::kRecipes) {
      finish();
      recipe = 0;
    }
    if (recipe == recipe_count_) add_recipe(item);
    add_tensor(item, recipe);
    elements_ += item.numel;
  }

  void finish() {
    if (batch_.tensor_count == 0) return;
    batch_.chunk_length = chunk_length(elements_);
    uint32_t chunks = 0;
    for (int i = 0; i < batch_.tensor_count; ++i) {
      batch_.tensors[i].first_chunk = chunks;
      chunks += static_cast<uint32_t>(chunks_of(batch_.tensors[i].numel, batch_.chunk_length));
    }
    launch_(batch_, chunks);
    clear();
  }

 private:
  void clear() {
    batch_.tensor_count = recipe_count_ = 0;
    elements_ = 0;
  }

  // Returns the index of the item's recipe, or the number of recipes where it has none yet.
  int find_recipe(const Item& item) const {
    int i = 0;
    for (; i < recipe_count_; ++i) {
      const Recipe& recipe = batch_.recipes[i];
      if (item.options == options_[i] && item.device_lr == recipe.device_lr &&
          item.first_block == recipe.first_block &&
          (item.device_step != nullptr || item.step == recipe.step)) {
        break;
      }
    }
    return i;
  }

  void add_recipe(const Item& item) {
    options_[recipe_count_] = item.options;
    Recipe& recipe = batch_.recipes[recipe_count_++];
    recipe.options = *item.options;
    recipe.device_lr = item.device_lr;
    recipe.first_block = static_cast<uint32_t>(item.first_block);
    recipe.step = item.device_step != nullptr ? 0 : item.step;  // 0 is no item's `step`
    if (item.device_step == nullptr) recipe.powers = powers(*item.options, item.step);
  }

  void add_tensor(const Item& item, int recipe) {
    BatchedTensor& tensor = batch_.tensors[batch_.tensor_count++];
    tensor.param = item.param;
    tensor.param_low_part = item.param_low_part;
    tensor.grad = item.grad;
    tensor.exp_avg = item.exp_avg;
    tensor.exp_avg_sq = item.exp_avg_sq;
    if (in_blocks(item.state_format)) {
      tensor.exp_avg_scale = item.exp_avg_scale;
    } else {
      tensor.max_exp_avg_sq = item.max_exp_avg_sq;
    }
    tensor.exp_avg_sq_scale = item.exp_avg_sq_scale;
    tensor.device_step = item.device_step;
    tensor.factor = item.factor;
    tensor.skip = item.skip;
    tensor.numel = item.numel;
    tensor.recipe = recipe;
    tensor.position = item.position;
  }

  const Launch& launch_;
  Batch batch_;
  int recipe_count_;
  int64_t elements_;
  const Options* options_[Batch::kRecipes];  // of each recipe
};

}  // namespace memsave_ext::adam

// What a launch is given by value: neither copies to the device nor memory that would have to
// outlive the call, so that a CUDA graph can capture it.
#pragma once

#include <cstdint>

#include "adam/chunks.cuh"
#include "adam/kernels.h"

namespace memsave_ext::adam {

// What tensors of one group share.
struct Recipe {
  Options options;
  double step;
  Powers powers;  // of the step, where it is not on the device
  const float* device_lr;
};

struct BatchedTensor {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;
  const float* device_step;
  int64_t numel;
  uint32_t first_chunk;
  int recipe;
};

struct Batch {
  static constexpr int kRecipes = 8;
  static constexpr int kTensors = 53;

  int64_t chunk_length;
  int tensor_count;
  Recipe recipes[kRecipes];
  BatchedTensor tensors[kTensors];
};

static_assert(sizeof(Batch) <= 4096, "what every device takes as a kernel's arguments");

// Fills batches with items, and gives launch(batch, blocks) those that are full.
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
    BatchedTensor& tensor = batch_.tensors[batch_.tensor_count++];
    tensor = {item.param,          item.grad,        item.exp_avg, item.exp_avg_sq,
              item.max_exp_avg_sq, item.device_step, item.numel};
    tensor.recipe = recipe;
    elements_ += item.numel;
  }

  void finish() {
    if (batch_.tensor_count == 0) return;
    batch_.chunk_length = chunk_length(elements_);
    uint32_t chunks = 0;
    for (int i = 0; i < batch_.tensor_count; ++i) {
      batch_.tensors[i].first_chunk = chunks;
      chunks += chunks_of(batch_.tensors[i].numel, batch_.chunk_length);
    }
    launch_(batch_, chunks);
    clear();
  }

 private:
  void clear() {
    batch_.tensor_count = recipe_count_ = 0;
    elements_ = 0;
  }

  // The number of recipes where none of them is the item's.
  int find_recipe(const Item& item) const {
    int i = 0;
    for (; i < recipe_count_; ++i) {
      const Recipe& recipe = batch_.recipes[i];
      if (item.options == options_[i] && item.device_lr == recipe.device_lr &&
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
    recipe.step = item.device_step != nullptr ? 0 : item.step;  // 0: no other item's step
    if (item.device_step == nullptr) recipe.powers = powers(*item.options, item.step);
  }

  const Launch& launch_;
  Batch batch_;
  int recipe_count_;
  int64_t elements_;
  const Options* options_[Batch::kRecipes];  // of the recipes
};

}  // namespace memsave_ext::adam

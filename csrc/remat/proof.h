// Proves that an operator of another library does the same twice, before its results are dropped
// for the first time. Its schema says that it changes nothing; of state that it keeps, or random
// numbers that it draws, it says nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <bitset>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "checkpoint/rng.h"
#include "remat/content.h"

namespace memsave_ext::remat {

// A hash of the memory between a tensor's first byte and its last; never 0.
uint64_t bits_of(const at::Tensor& tensor);
// Whether bits_of() is only of the tensor's values. Tensors of the host are hashed without a copy.
bool has_bits(const at::Tensor& tensor);

// A hash of shapes, types and all else that the operator is given but values of tensors. Nothing
// where an argument is of a kind that may keep state.
std::optional<uint64_t> key_of_arguments(c10::ArrayRef<const c10::IValue> arguments);

// An autograd.Function, and how the tensors lie that it is given.
struct FunctionKey {
  uint64_t name = 0, arguments = 0;

  // While the Function's apply() runs.
  static FunctionKey of(std::string_view name, c10::ArrayRef<const c10::IValue> arguments);
};
using ArgumentBits = std::bitset<64>;  // of these tensors; the last one is for all that follow, too
// Which of them a Function writes unseen, as far as one of this name has done so, whatever it was
// given; nothing where none has run yet with what lies like this.
std::optional<ArgumentBits> written_by(const FunctionKey& key);
void note_function(const FunctionKey& key, const ArgumentBits& written);

class Proof {
 public:
  // Before the operator runs.
  Proof(uint64_t key, c10::ArrayRef<const c10::IValue> arguments);

  // After it: runs it a second time, on copies of its arguments, as it would be repeated, and
  // compares. On success the operator is proven for this key, and the call has the state of the
  // generators before it, if it has drawn numbers. Else the operator has failed, for good, unless
  // there was no memory for the second run.
  bool succeeds(Call& call, const std::vector<c10::IValue>& results) const;
  // After it has run: which of its arguments have other bits.
  std::vector<at::Tensor> changed_arguments() const;

 private:
  bool is_same(Call& call, const std::vector<at::Tensor>& given,
               const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& copies,
               std::vector<c10::IValue>& stack) const;

  const uint64_t key_;
  const std::vector<c10::IValue> arguments_;  // after the call the stack holds only the results
  const std::shared_ptr<const checkpoint::RngState> generators_;
  const std::vector<uint64_t> before_;  // bits_of() each tensor among the arguments
};

}  // namespace memsave_ext::remat

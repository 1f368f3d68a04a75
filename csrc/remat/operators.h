// What the recorder knows of an operator; looked up once for each.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <atomic>
#include <optional>
#include <vector>

namespace memsave_ext::remat {

struct Operator {
  explicit Operator(const c10::OperatorName& name);

  c10::OperatorName name;
  c10::OperatorHandle handle;  // of nothing once it is_gone
  std::vector<bool> writes;    // by argument, from the schema; true for all of a collective's
  bool any_writes = false;
  // It only calls other operators, and those are recorded instead.
  bool is_composite = false;
  // A hash of its name, without the underscore of one that writes: of fake tensors torch's
  // composites compute anew what they change in place otherwise, as the sum of a product and a
  // bias.
  uint64_t key = 0;
  // It makes a tensor of numbers alone, as ones(), by calls of other operators, which are not seen
  // where tensors are fake.
  bool is_factory = false;
  // Its results share the memory of its arguments.
  bool is_view = false;
  // A second call with the same arguments and random numbers gives the same values: it leaves no
  // memory uninitialised and talks to no other process. What a library says has to be proved.
  bool is_repeatable = true;
  // Of another library, which says that it changes nothing; see proof.h.
  bool is_library = false;
  // A user's autograd.Function, declared to be pure; see functions.h. It is a library's, too.
  bool is_function = false;
  // Keys of autocast that have a kernel: there it calls the operator, or another, once more.
  c10::DispatchKeySet casts;
  // It draws random numbers.
  bool is_random = false;
  // Position of its generator argument, if it has one.
  std::optional<size_t> generator;
  // Position of the state that cuDNN's recurrent nets draw from and advance, of which their schemas
  // do not say that it is written.
  std::optional<size_t> dropout_state;
  bool makes_mask = false;  // it fills a tensor with zeros and ones (bernoulli_)
  // It writes without reading what was there.
  bool overwrites = false;
  // Bound by arithmetic, such as a matrix product: never cheap to recompute.
  bool is_heavy = false;
  // It multiplies no matrices, so that the precision of products does not matter.
  bool makes_no_products = false;
  // torch's native, cuDNN or MIOpen batch norm. In training it writes its running statistics
  // (arguments 3 and 4), which the schema does not say; otherwise it reads them.
  bool is_torch_batch_norm = false;
  // This package's batch_norm_forward.
  bool is_package_batch_norm = false;

  // The shortest time measured for a byte of its results: a busy machine can only make it longer.
  mutable std::atomic<double> seconds_per_byte{1};
  mutable std::atomic<int> measured{0};  // how many times

  // Its library has been destroyed. One that is defined anew by this name is another operator.
  mutable std::atomic<bool> is_gone{false};
  // Of a library's.
  mutable std::atomic<bool> has_failed{false};  // its proof, or differed when it was repeated
  mutable std::atomic<bool> changes_arguments{false};  // of which its schema is silent
  mutable std::atomic<bool> draws{false};  // random numbers, of which its schema is silent
  bool may_write() const { return any_writes || is_torch_batch_norm || changes_arguments; }
  bool may_write(size_t argument) const {
    return (argument < writes.size() && writes[argument]) || changes_arguments;
  }
  // Whether a second run has given the same. `key`: of arguments, see key_of_arguments().
  bool is_proven(uint64_t key) const;
  void proved(uint64_t key) const;
  // Throws where it is gone.
  void check_is_there() const;
  // Calls it with these arguments, in whose place are its results then.
  void call(std::vector<c10::IValue>& stack) const;

  // Returns null where the call is of no operator of the dispatcher. The result is never freed.
  static const Operator* of(const at::RecordFunction& call);
  // The same, by name. Throws where there is no such operator.
  static const Operator* named(const c10::OperatorName& name);
  // Has torch tell which operators go. Called once.
  static void watch_libraries();

 private:
  static const Operator* look_up(const at::RecordFunction& call);
  static const Operator* look_up(const char* key, const c10::OperatorName& name);
};

// Both are for the arguments of torch's batch norm (is_torch_batch_norm).
inline bool trains_batch_norm(c10::ArrayRef<const c10::IValue> arguments) {
  return arguments.size() > 5 && arguments[5].isBool() && arguments[5].toBool();
}
inline bool is_running_statistic(size_t argument) { return argument == 3 || argument == 4; }

}  // namespace memsave_ext::remat

// What the recorder knows of an operator, looked up once each.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <atomic>
#include <optional>
#include <vector>

namespace memsave_ext::remat {

struct Operator {
  explicit Operator(const c10::OperatorName& name);

  c10::OperatorHandle handle;
  std::vector<bool> writes;  // by argument, as the schema says; all of a collective's
  bool any_writes = false;
  // It only calls other operators, which are recorded themselves.
  bool is_composite = false;
  // Its results are the memory of its arguments.
  bool is_view = false;
  // Called again with the same arguments, and random numbers, it gives the same values: it reads no
  // uninitialised memory, talks to no other process and is not somebody else's.
  bool is_repeatable = true;
  // It draws random numbers, from the generator in this argument if it has one.
  bool is_random = false;
  std::optional<size_t> generator;
  bool makes_mask = false;  // zeros and ones, in place
  // What it writes does not depend on what was there.
  bool overwrites = false;
  // Bound by arithmetic, such as a matrix product: never cheap to compute again.
  bool is_heavy = false;
  // A training forward of torch's batch norm, which writes its running statistics (the arguments 3
  // and 4) without saying so. The others of torch read them.
  bool is_torch_batch_norm = false;
  bool is_own_batch_norm = false;

  // The least that was measured of a byte of its results: a clock on a busy machine only adds.
  mutable std::atomic<double> seconds_per_byte{1};
  mutable std::atomic<int> measured{0};  // times

  // Null for what is not an operator of the dispatcher. Never freed.
  static const Operator* of(const at::RecordFunction& call);

 private:
  static const Operator* look_up(const at::RecordFunction& call);
};

// Of the arguments of torch's batch norm.
inline bool trains_batch_norm(c10::ArrayRef<const c10::IValue> arguments) {
  return arguments.size() > 5 && arguments[5].isBool() && arguments[5].toBool();
}
inline bool is_running_statistic(size_t argument) { return argument == 3 || argument == 4; }

}  // namespace memsave_ext::remat

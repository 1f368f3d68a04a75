// What the recorder knows of an operator, looked up once each.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <atomic>
#include <vector>

namespace memsave_ext::remat {

struct Operator {
  explicit Operator(const c10::OperatorName& name);

  c10::OperatorHandle handle;
  std::vector<bool> writes;  // by argument, as the schema says; all of a collective's
  bool any_writes = false;
  // It only calls other operators, which are recorded themselves.
  bool is_composite = false;
  // Called again with the same arguments it gives the same values: it draws no random numbers,
  // reads no uninitialised memory and talks to no other process.
  bool is_repeatable = true;
  // Bound by arithmetic, such as a matrix product: never cheap to compute again.
  bool is_heavy = false;
  // A training forward of torch's batch norm, which writes its running statistics (the arguments 3
  // and 4) without saying so. The others of torch read them.
  bool is_torch_batch_norm = false;
  bool is_own_batch_norm = false;

  // The least that was measured of a byte of its results: a clock on a busy machine only adds.
  mutable std::atomic<double> seconds_per_byte{1};

  // Null for what is not an operator of the dispatcher. Never freed.
  static const Operator* of(const at::RecordFunction& call);
};

}  // namespace memsave_ext::remat

// The emulated kernels, as work that is queued on the stream they are given. What is not as long as
// its tensor here has the tensor's first byte in every use.
#include "adam/kernels.h"

#include <c10/util/ArrayRef.h>

#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "batch_norm/kernels.h"
#include "clocks.h"
#include "loss_head/kernels.h"

namespace {

using emulated::Use;

struct Uses {
  std::vector<Use> all;

  void read(const void* data, size_t bytes = 1) { add(data, bytes, false); }
  void write(const void* data, size_t bytes = 1) { add(data, bytes, true); }
  void add(const void* data, size_t bytes, bool writes) {
    if (data != nullptr && bytes > 0) all.push_back({data, bytes, writes});
  }
};

void run(const char* what, void* stream, Uses uses, std::function<void()> work) {
  work();
  emulated::queue(reinterpret_cast<intptr_t>(stream), what, std::move(uses.all), std::move(work));
}

}  // namespace

namespace memsave_ext::adam {

extern const Kernels checked_kernels;

namespace {

// Items that outlive the call, for the replays of a graph.
struct Kept {
  Kept(const Item* first, int64_t count) : items(first, first + count), options(count) {
    for (int64_t i = 0; i < count; ++i) {
      if (items[i].options == nullptr) continue;
      options[i] = *items[i].options;
      items[i].options = &options[i];
    }
  }

  std::vector<Item> items;
  std::vector<Options> options;
};

size_t bytes_of(const Item& item) {
  return static_cast<size_t>(item.numel) * vector::item_size(item.param_type);
}

void step(const Item* items, int64_t count, void* stream) {
  Uses uses;
  for (const Item& item : c10::ArrayRef<Item>(items, count)) {
    uses.read(item.grad, bytes_of(item));
    uses.write(item.param, bytes_of(item));
    uses.write(item.param_low_part);
    for (const void* state : {item.exp_avg, item.exp_avg_sq, item.max_exp_avg_sq})
      uses.write(state);
    uses.write(item.exp_avg_scale);
    uses.write(item.exp_avg_sq_scale);
    uses.read(item.device_step);
    uses.read(item.device_lr);
    uses.read(item.factor);
    uses.read(item.skip);
  }
  const auto kept = std::make_shared<Kept>(items, count);
  run("a step", stream, std::move(uses),
      [kept, count, stream] { cuda_kernels.step(kept->items.data(), count, stream); });
}

void advance(float* const* steps, const float* const* skips, int64_t count, void* stream) {
  Uses uses;
  for (int64_t i = 0; i < count; ++i) {
    uses.write(steps[i]);
    if (skips != nullptr) uses.read(skips[i]);
  }
  std::vector<float*> of(steps, steps + count);
  std::vector<const float*> skip(count);
  if (skips != nullptr) skip.assign(skips, skips + count);
  run("an advance of steps", stream, std::move(uses),
      [of, skip, count, stream] { cuda_kernels.advance(of.data(), skip.data(), count, stream); });
}

void measure(const Item* items, int64_t count, const Measure& to, void* workspace, void* stream) {
  Uses uses;
  for (int64_t i = 0; i < count; ++i) uses.read(items[i].grad, bytes_of(items[i]));
  uses.read(to.grad_scale);
  uses.write(to.squares, count * sizeof(double));
  uses.write(to.factors, count * sizeof(double));
  uses.write(to.skips, count * sizeof(float));
  uses.write(to.found_inf);
  uses.write(workspace);
  const auto kept = std::make_shared<Kept>(items, count);
  run("a measure", stream, std::move(uses), [kept, count, to, workspace, stream] {
    cuda_kernels.measure(kept->items.data(), count, to, workspace, stream);
  });
}

}  // namespace

const Kernels checked_kernels = {step, advance, measure, cuda_kernels.measure_workspace};

}  // namespace memsave_ext::adam

namespace {

// A kernel of a table: what it is given by value and reference is kept, pointers are uses, by
// whether they are const.
template <typename Kernels, auto table, auto field>
struct Queued;

template <typename Kernels, auto table, typename... A, void (*Kernels::*field)(A...)>
struct Queued<Kernels, table, field> {
  static void call(A... arguments) {
    Uses uses;
    (use(uses, arguments), ...);
    void* const stream = std::get<sizeof...(A) - 1>(std::tie(arguments...));
    run("a kernel", stream, std::move(uses),
        [kept = std::make_tuple(arguments...)] { std::apply(table->*field, kept); });
  }

  static void use(Uses& uses, const void* data) { uses.read(data); }
  static void use(Uses& uses, void* data) { uses.write(data); }
  static void use(Uses&, double) {}
  static void use(Uses& uses, const memsave_ext::batch_norm::Running& running) {
    uses.write(running.mean);
    uses.write(running.var);
  }
  static void use(Uses& uses, const memsave_ext::batch_norm::Problem& problem) {
    for (const void* data : {problem.input, problem.residual, problem.weight, problem.bias}) {
      uses.read(data);
    }
    uses.write(problem.workspace);
  }
  static void use(Uses& uses, const memsave_ext::loss_head::Chunk& chunk) {
    uses.write(chunk.logits);
    uses.read(chunk.target);
    uses.read(chunk.probabilities);
    uses.read(chunk.class_weight);
  }
};

}  // namespace

namespace memsave_ext::batch_norm {

template <auto field>
constexpr auto queued = Queued<Kernels, &cuda_kernels, field>::call;

extern const Kernels checked_kernels;
const Kernels checked_kernels = {
    queued<&Kernels::moments>,          queued<&Kernels::forward>,
    queued<&Kernels::running>,          queued<&Kernels::normalize>,
    queued<&Kernels::backward>,         queued<&Kernels::backward_sums>,
    queued<&Kernels::backward_input>,   cuda_kernels.workspace_bytes,
    cuda_kernels.take_affine_like_input};

}  // namespace memsave_ext::batch_norm

namespace memsave_ext::loss_head {

template <auto field>
constexpr auto queued = Queued<Kernels, &cuda_kernels, field>::call;

extern const Kernels checked_kernels;
const Kernels checked_kernels = {queued<&Kernels::reduce>, queued<&Kernels::gradient>};

}  // namespace memsave_ext::loss_head

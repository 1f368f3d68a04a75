#include "remat/operators.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "locks.h"
#include "remat/functions.h"

namespace memsave_ext::remat {
namespace {

bool starts_with(std::string_view text, std::string_view beginning) {
  return text.substr(0, beginning.size()) == beginning;
}

bool any_begins(std::string_view name, std::initializer_list<std::string_view> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(),
                     [&](std::string_view beginning) { return starts_with(name, beginning); });
}

template <size_t count>
bool is_one_of(std::string_view name, const std::string_view (&names)[count]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool is_collective(std::string_view name) {
  return any_begins(name, {"c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::"});
}

// Namespaces of operators that come with torch, and of which some keep state or leave values open.
bool is_torchs(std::string_view name) {
  static constexpr std::string_view names[] = {"_dtensor",       "_inductor_test",
                                               "_native",        "_quantized",
                                               "_test",          "aten",
                                               "debug_mode_ops", "debugprims",
                                               "export",         "flex_lib",
                                               "fsdp",           "inductor",
                                               "inductor_prims", "mkl",
                                               "mkldnn",         "mkldnn_prepacked",
                                               "onednn",         "onnx",
                                               "onnx_symbolic",  "prepacked",
                                               "prim",           "prims",
                                               "profiler",       "quantization",
                                               "quantized",      "quantized_decomposed",
                                               "rngprims",       "sparse",
                                               "static_runtime", "streams"};
  const std::string_view space = name.substr(0, name.find("::"));
  return is_one_of(space, names);
}

// What other libraries call operators that wait for other processes, and the arguments of these.
bool may_communicate(const c10::FunctionSchema& schema) {
  static constexpr std::string_view words[] = {
      "all_reduce", "allreduce",      "all_gather", "allgather", "all_to_all",
      "alltoall",   "reduce_scatter", "barrier",    "nccl",      "p2p"};
  const std::string_view name = schema.name();
  if (std::any_of(std::begin(words), std::end(words),
                  [&](std::string_view word) { return name.find(word) != name.npos; })) {
    return true;
  }
  const auto& arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    const std::string& called = argument.name();
    return called == "group" || called == "group_name" || called == "process_group" ||
           called == "pg" || argument.type()->str().find("ProcessGroup") != std::string::npos;
  });
}

// Operators that return uninitialised memory, or that exchange or resize storages.
bool leaves_values_open(std::string_view name) {
  return any_begins(name, {"aten::empty", "aten::new_empty", "aten::_empty", "aten::resize",
                           "aten::_resize", "aten::set_", "aten::_cudnn_init", "aten::pin_memory",
                           "aten::_pin_memory", "aten::record_stream", "aten::_efficientzero"});
}

// Operators that write arguments, or read a file, of which their schemas are silent.
bool has_unseen_effects(std::string_view name) {
  static constexpr std::string_view names[] = {"aten::_native_batch_norm_legit",
                                               "aten::_batch_norm_with_update",
                                               "aten::batch_norm_update_stats",
                                               "aten::batch_norm_gather_stats",
                                               "aten::batch_norm_gather_stats_with_counts",
                                               "aten::from_file"};
  return is_one_of(name, names);
}

// Operators that fill a tensor without reading it.
bool is_filling(std::string_view name) {
  static constexpr std::string_view names[] = {
      "aten::bernoulli_", "aten::cauchy_", "aten::copy_",      "aten::exponential_",
      "aten::fill_",      "aten::zero_",   "aten::normal_",    "aten::geometric_",
      "aten::uniform_",   "aten::random_", "aten::log_normal_"};
  return is_one_of(name, names);
}

// Frequent operators that compute no element alone, and multiply no matrices.
bool is_reducing_or_moving(std::string_view name) {
  static constexpr std::string_view names[] = {"aten::_log_softmax",
                                               "aten::_softmax",
                                               "aten::_to_copy",
                                               "aten::avg_pool2d",
                                               "aten::bernoulli_",
                                               "aten::cat",
                                               "aten::clone",
                                               "aten::copy_",
                                               "aten::embedding",
                                               "aten::fill_",
                                               "aten::gather",
                                               "aten::index",
                                               "aten::index_select",
                                               "aten::max_pool2d_with_indices",
                                               "aten::mean",
                                               "aten::native_batch_norm",
                                               "aten::native_dropout",
                                               "aten::native_group_norm",
                                               "aten::native_layer_norm",
                                               "aten::nll_loss_forward",
                                               "aten::repeat",
                                               "aten::stack",
                                               "aten::sum",
                                               "aten::upsample_nearest2d",
                                               "aten::zero_",
                                               "memsave_ext::batch_norm_forward"};
  return is_one_of(name, names);
}

bool is_heavy_name(std::string_view name) {
  static constexpr std::string_view exact[] = {
      "aten::mm",    "aten::addmm", "aten::bmm",     "aten::baddbmm",  "aten::addbmm",
      "aten::mv",    "aten::addmv", "aten::dot",     "aten::vdot",     "aten::addr",
      "aten::sort",  "aten::topk",  "aten::argsort", "aten::kthvalue", "aten::_addmm_activation",
      "aten::cumsum"};
  if (is_one_of(name, exact)) return true;
  if (any_begins(name, {"aten::linalg_", "aten::_linalg", "aten::_fft", "aten::fft_",
                        "aten::unique", "aten::_unique", "aten::_scaled_dot", "aten::_flash",
                        "aten::_efficient_attention", "aten::mkldnn_", "aten::_cdist",
                        "aten::_thnn_fused", "aten::_cudnn_rnn", "aten::_scaled_mm",
                        "aten::_grouped_mm", "aten::_int_mm", "mkldnn::", "quantized::"})) {
    return true;
  }
  return name.find("conv") != std::string_view::npos;
}

}  // namespace

Operator::Operator(const c10::OperatorName& name)
    : name(name),
      handle(c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(),
                                                            name.overload_name.c_str())) {
  const bool is_in_place = !name.name.empty() && name.name.back() == '_';
  key = std::hash<std::string_view>()(
      std::string_view(name.name).substr(0, name.name.size() - (is_in_place ? 1 : 0)));
  const bool collective = is_collective(name.name);
  const bool is_recorded_stream = name.name == "aten::record_stream";
  for (const auto& argument : handle.schema().arguments()) {
    const auto* alias = argument.alias_info();
    if (argument.name() == "generator") generator = writes.size();
    if (argument.name() == "dropout_state") dropout_state = writes.size();
    // Its schema says that record_stream writes; it changes no value.
    const bool is_written = alias != nullptr && alias->isWrite() && !is_recorded_stream;
    writes.push_back(collective || is_written);
    any_writes = any_writes || writes.back();
  }
  for (const auto& result : handle.schema().returns()) {
    is_view = is_view || (!any_writes && result.alias_info() != nullptr);
  }
  makes_no_products = handle.hasTag(at::Tag::pointwise) || is_reducing_or_moving(name.name);
  is_random = generator || handle.hasTag(at::Tag::nondeterministic_seeded);
  overwrites = is_filling(name.name);
  makes_mask = name.name == "aten::bernoulli_";
  is_composite = handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  is_torch_batch_norm = name.name == "aten::native_batch_norm" ||
                        name.name == "aten::cudnn_batch_norm" ||
                        name.name == "aten::miopen_batch_norm";
  is_package_batch_norm = name.name == "memsave_ext::batch_norm_forward";
  const bool is_known = any_begins(name.name, {"aten::", "prims::"}) || is_package_batch_norm;
  is_function = is_function_name(name);
  is_library = is_function ||
               (!collective && !any_writes && !is_torchs(name.name) &&
                !starts_with(name.name, "memsave_ext::") && !may_communicate(handle.schema()));
  is_repeatable =
      is_library || (is_known && !leaves_values_open(name.name) && !has_unseen_effects(name.name));
  for (const c10::DispatchKey key : c10::autocast_dispatch_keyset) {
    if (!is_function && handle.hasKernelForDispatchKey(key)) casts = casts.add(key);
  }
  is_heavy = !is_function && is_heavy_name(name.name);
  const auto& arguments = handle.schema().arguments();
  is_factory = is_known && is_repeatable && !is_random &&
               std::none_of(arguments.begin(), arguments.end(), [](const auto& argument) {
                 return argument.type()->str().find("Tensor") != std::string::npos;
               });
}

namespace {

Lock& proofs_mutex() {
  static auto& mutex = *new Lock(LockOrder::kOperators);
  return mutex;
}

// Keys of arguments, by operator.
auto& proofs() {
  static auto& all = *new std::unordered_map<const Operator*, std::unordered_set<uint64_t>>();
  return all;
}

}  // namespace

bool Operator::is_proven(uint64_t key) const {
  const std::lock_guard<Lock> lock(proofs_mutex());
  return proofs()[this].count(key) > 0;
}

void Operator::proved(uint64_t key) const {
  const std::lock_guard<Lock> lock(proofs_mutex());
  proofs()[this].insert(key);
}

void Operator::check_is_there() const {
  TORCH_CHECK(!is_gone, "memsave_ext.remat: ", name.name,
              " is to be computed again, but its library has been destroyed since the forward, as "
              "where a torch.library.custom_op is defined once more. Run the forward again.");
}

void Operator::call(std::vector<c10::IValue>& stack) const {
  if (is_function) return call_function(stack);
  handle.callBoxed(stack);
}

namespace {

Lock& all_mutex() {
  static auto& mutex = *new Lock(LockOrder::kOperators);
  return mutex;
}

// By the address of the schema's name.
auto& all() {
  static auto& operators = *new std::unordered_map<const char*, const Operator*>();
  return operators;
}

std::atomic<uint64_t> gone{0};  // how many

class Leaving final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& handle) override {
    const std::lock_guard<Lock> lock(all_mutex());
    const auto found = all().find(handle.schema().name().c_str());
    if (found == all().end()) return;
    found->second->is_gone = true;
    all().erase(found);
    ++gone;
  }
};

}  // namespace

const Operator* Operator::of(const at::RecordFunction& call) {
  // This thread's cache of look_up(), keyed by the address of the schema's name, which lives as
  // long as the operator.
  thread_local std::array<std::pair<const char*, const Operator*>, 256> recent{};
  thread_local uint64_t recent_until = 0;
  if (const uint64_t now = gone.load(std::memory_order_relaxed); now != recent_until) {
    recent.fill({});
    recent_until = now;
  }
  const char* name = call.name();
  auto& [key, op] = recent[(reinterpret_cast<uintptr_t>(name) >> 4) % recent.size()];
  if (key != name) {
    const Operator* found = look_up(call);
    if (found == nullptr) return nullptr;  // a Function's name, which is freed
    op = found;
    key = name;
  }
  return op;
}

const Operator* Operator::named(const c10::OperatorName& name) {
  const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
  return look_up(handle.schema().name().c_str(), name);
}

const Operator* Operator::look_up(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  return name ? look_up(call.name(), *name) : nullptr;
}

// `key`: the address of the schema's name.
const Operator* Operator::look_up(const char* key, const c10::OperatorName& name) {
  {
    const std::lock_guard<Lock> lock(all_mutex());
    if (const auto found = all().find(key); found != all().end()) return found->second;
  }
  // The dispatcher, which is asked, calls Leaving under its own mutex.
  auto made = std::make_unique<Operator>(name);
  const std::lock_guard<Lock> lock(all_mutex());
  const auto [found, is_new] = all().try_emplace(key, made.get());
  if (is_new) made.release();  // NOLINT: never freed
  return found->second;
}

void Operator::watch_libraries() {
  static auto& listening = *new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Leaving>()));
  (void)listening;
}

}  // namespace memsave_ext::remat

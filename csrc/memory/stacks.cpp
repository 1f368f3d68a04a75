#include "memory/stacks.h"

#include <ATen/record_function.h>
#include <Python.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <string_view>
#include <utility>

namespace memsave_ext::memory {
namespace {

thread_local int watchers = 0;
thread_local int stack_watchers = 0;  // of them, those that want stacks
thread_local at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

// Operators call operators; all of them are given the stack and the name of the outermost one. The
// engine's record of a node of backward counts as one around those that the node calls.
constexpr std::string_view kNode = "autograd::engine::evaluate_function: ";
thread_local int depth = 0;  // of operators, within a node
thread_local std::shared_ptr<const Origin> of_outermost;

struct Outer : at::ObserverContext {
  Outer(int depth, std::shared_ptr<const Origin> origin)
      : depth(depth), origin(std::move(origin)) {}
  int depth;
  std::shared_ptr<const Origin> origin;
};

std::shared_ptr<torch::CapturedTraceback> stack_here() {
  // A thread that Python does not know has no stack.
  if (PyGILState_GetThisThreadState() == nullptr) return nullptr;
  return torch::CapturedTraceback::gather(true, false, false);
}

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  std::string_view name = function.name();
  const bool is_node = name.substr(0, kNode.size()) == kNode;
  if (depth > 0 && !is_node) {
    ++depth;
    return nullptr;
  }
  if (is_node) name.remove_prefix(kNode.size());
  auto outer = std::make_unique<Outer>(depth, std::move(of_outermost));
  depth = is_node ? 0 : 1;
  of_outermost = std::make_shared<Origin>(
      Origin{stack_watchers > 0 ? stack_here() : nullptr, std::string(name)});
  return outer;
}

void end_operator(const at::RecordFunction&, at::ObserverContext* context) {
  if (auto* const outer = static_cast<Outer*>(context)) {
    depth = outer->depth;
    of_outermost = std::move(outer->origin);
  } else {
    --depth;
  }
}

}  // namespace

std::vector<std::tuple<std::string, int64_t, std::string>> Origin::frames() const {
  std::vector<std::tuple<std::string, int64_t, std::string>> frames;
  if (!stack) return frames;
  const torch::SymbolizedTracebacks symbols = torch::symbolize({stack.get()});
  for (const uint64_t i : symbols.tracebacks.at(0)) {
    const auto& frame = symbols.all_frames.at(i);
    frames.emplace_back(frame.filename, static_cast<int64_t>(frame.lineno), frame.funcname);
  }
  return frames;
}

void watch_operators(bool stacks) {
  if (stacks) ++stack_watchers;
  if (watchers++ > 0) return;
  callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin_operator, &end_operator)
                                            .scopes({at::RecordScope::FUNCTION}));
}

void unwatch_operators(bool stacks) {
  if (stacks) --stack_watchers;
  if (--watchers > 0) return;
  at::removeCallback(callback);
}

std::shared_ptr<const Origin> origin_here() {
  return std::make_shared<Origin>(
      Origin{stack_here(), of_outermost ? of_outermost->operator_name : std::string()});
}

std::shared_ptr<const Origin> origin_of_operator() {
  if (of_outermost) return of_outermost;
  return PyGILState_Check() ? origin_here() : nullptr;
}

}  // namespace memsave_ext::memory

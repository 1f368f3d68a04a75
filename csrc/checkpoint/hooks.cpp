#include "checkpoint/hooks.h"

#include <c10/core/SafePyObject.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "checkpoint/call.h"
#include "compat.h"

namespace memsave_ext::checkpoint {

namespace py = pybind11;
using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

namespace {

struct SavedObject {
  PyObject_HEAD std::shared_ptr<Saved> saved;
};

struct Hook {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::shared_ptr<Packer> packer;  // null once its scope has ended
};

PyObject* stop = nullptr;
PyObject* unpack_hook = nullptr;

void dealloc_saved(PyObject* self) {
  reinterpret_cast<SavedObject*>(self)->saved.~shared_ptr();
  Py_TYPE(self)->tp_free(self);
}

void dealloc_hook(PyObject* self) {
  reinterpret_cast<Hook*>(self)->packer.~shared_ptr();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject saved_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject hook_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* pack(PyObject* self, PyObject* const* args, size_t, PyObject*) {
  HANDLE_TH_ERRORS
  const std::shared_ptr<Packer> packer = packer_of(self);
  at::Tensor tensor = THPVariable_Unpack(args[0]);
  if (packer) {
    if (auto saved = packer->pack(tensor)) return wrap_saved(std::move(saved)).release().ptr();
  }
  return THPVariable_Wrap(tensor);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(object) != &saved_type) {  // kept as it is
    Py_INCREF(object);
    return object;
  }
  const std::shared_ptr<Saved> saved = reinterpret_cast<SavedObject*>(object)->saved;
  return THPVariable_Wrap(saved->open());
  END_HANDLE_TH_ERRORS
}

PyMethodDef unpack_definition = {"unpack", unpack, METH_O, nullptr};

std::atomic<bool> hooks_enabled{false};

class PackerHooks final : public SavedVariableHooks {
 public:
  explicit PackerHooks(std::shared_ptr<Packer> packer) : packer_(std::move(packer)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const std::shared_ptr<Packer> packer = std::exchange(packer_, nullptr);
    value_ = tensor;
    saved_ = packer->pack(value_);
    if (saved_) value_.reset();
  }

  at::Tensor call_unpack_hook() override { return saved_ ? saved_->open() : value_; }

  // Asked for by compiled autograd, which traces only hooks in Python.
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override {
    const pybind11::gil_scoped_acquire gil;
    Py_INCREF(unpack_function());
    pybind11::object data =
        saved_ ? wrap_saved(saved_)
               : pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(value_));
    return std::make_pair(c10::SafePyObject(unpack_function(), getPyInterpreter()),
                          c10::SafePyObject(data.release().ptr(), getPyInterpreter()));
  }

 private:
  std::shared_ptr<Packer> packer_;
  std::shared_ptr<Saved> saved_;  // set, or value_ is
  at::Tensor value_;
};

class HookEngine final : public Engine {
 public:
  explicit HookEngine(Engine& torchs) : torchs_(torchs) {}

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto& tls = at::SavedTensorDefaultHooks::get_tls_state();
    if (tls.is_tracing || tls.disabled_error_message) {
      return torchs_.get_default_saved_variable_hooks();
    }
    if (auto packer = EngineHookGuard::packer()) {
      if (!packer->takes_next()) return nullptr;
      return std::make_unique<PackerHooks>(std::move(packer));
    }
    if (!tls.stack.empty() && hooks_enabled.load(std::memory_order_relaxed)) {
      if (auto packer = packer_of(tls.stack.top().first.ptr(getPyInterpreter()))) {
        return std::make_unique<PackerHooks>(std::move(packer));
      }
    }
    return torchs_.get_default_saved_variable_hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    if (!alone_) {
      return torchs_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    }
    // With two roots, of which one leads nowhere, the graph's root only hands on gradients.
    auto more_roots = roots;
    auto more_inputs = inputs;
    more_roots.emplace_back();
    more_inputs.push_back(inputs.front());
    try {
      return Engine::execute(more_roots, more_inputs, keep_graph, create_graph, accumulate_grad,
                             outputs);
    } catch (python_error& error) {
      error.restore();
      throw;
    }
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, NodePtr graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    if (!alone_) {
      return torchs_.execute_with_graph_task(graph_task, std::move(graph_root),
                                             std::move(input_buffer));
    }
    run_here(graph_task, graph_root.get(), input_buffer);
    return graph_task->future_result_;
  }

  // From now on this thread alone runs all nodes, as the other threads of torch's engine are gone.
  void run_alone() { alone_ = true; }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return torchs_.make_anomaly_metadata();
  }

  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
                           const NodePtr& node, std::exception& error) override {
    torchs_.thread_on_exception(graph_task, node, error);
  }

  void thread_init(int device, const std::shared_ptr<torch::autograd::ReadyQueue>& ready_queue,
                   bool should_increment) override {
    torchs_.thread_init(device, ready_queue, should_increment);
  }

#if MEMSAVE_EXT_HAS_NODE_CREATION_HOOKS
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks()
      override {
    return torchs_.get_node_creation_hooks();
  }
#endif

 protected:
  // thread_init() calls it once it has made this thread one of the CPU's.
  void thread_main(const std::shared_ptr<torch::autograd::GraphTask>& task) override {
    Engine::thread_main(alone_ ? running_ : task);
  }

 private:
  // Does what torch's engine does on the thread of a backward on a CPU. That one asks first whether
  // the process was forked after it had started threads.
  void run_here(std::shared_ptr<torch::autograd::GraphTask> task, torch::autograd::Node* root,
                torch::autograd::InputBuffer& inputs) {
    constexpr int kCpu = -1;  // torch's number of a thread that runs nodes of the CPU
    task->owner_ = kCpu;
    const auto outer_queue =
        std::exchange(task->cpu_ready_queue_, std::make_shared<torch::autograd::ReadyQueue>());
    const auto outer = std::exchange(running_, task);
    evaluate_function(task, root, inputs, task->cpu_ready_queue_);
    if (task->outstanding_tasks_ == 0) {
      task->future_result_->markCompleted(task->captured_vars_);
    } else {
      Engine::thread_init(kCpu, task->cpu_ready_queue_, false);
    }
    running_ = outer;
    init_local_ready_queue(outer_queue);
  }

  Engine& torchs_;
  bool alone_ = false;
  std::shared_ptr<torch::autograd::GraphTask> running_;  // the innermost, where it is alone
};

HookEngine* installed = nullptr;

Engine& get_installed() { return *installed; }

thread_local EngineHookGuard* innermost = nullptr;

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: autograd's threads may outlive static destruction.
    installed = new HookEngine(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub(get_installed);
  });
}

}  // namespace

void init_hooks() {
  saved_type.tp_name = "memsave_ext._C.Saved";
  saved_type.tp_basicsize = sizeof(SavedObject);
  saved_type.tp_flags = Py_TPFLAGS_DEFAULT;
  saved_type.tp_dealloc = dealloc_saved;
  hook_type.tp_name = "memsave_ext._C.PackHook";
  hook_type.tp_basicsize = sizeof(Hook);
  hook_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  hook_type.tp_dealloc = dealloc_hook;
  hook_type.tp_vectorcall_offset = offsetof(Hook, vectorcall);
  hook_type.tp_call = PyVectorcall_Call;
  if (PyType_Ready(&saved_type) < 0 || PyType_Ready(&hook_type) < 0) {
    throw py::error_already_set();
  }
  // Not an Exception: the function's own handlers are not meant for it.
  stop = PyErr_NewException("memsave_ext._C.StopRecompute", PyExc_BaseException, nullptr);
  unpack_hook = PyCFunction_New(&unpack_definition, nullptr);
  if (stop == nullptr || unpack_hook == nullptr) throw py::error_already_set();
  at::SavedTensorDefaultHooks::lazy_initialize();
}

py::object wrap_saved(std::shared_ptr<Saved> saved) {
  auto* object = reinterpret_cast<SavedObject*>(saved_type.tp_alloc(&saved_type, 0));
  if (object == nullptr) throw py::error_already_set();
  new (&object->saved) std::shared_ptr<Saved>(std::move(saved));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

std::shared_ptr<Packer> packer_of(PyObject* hook) {
  // Atomically: another thread may leave the hook's scope meanwhile.
  return Py_TYPE(hook) == &hook_type ? std::atomic_load(&reinterpret_cast<Hook*>(hook)->packer)
                                     : nullptr;
}

PyObject* unpack_function() { return unpack_hook; }

PyObject* stop_exception() { return stop; }

void throw_stop() {
  const py::gil_scoped_acquire gil;
  PyErr_SetNone(stop);
  throw py::error_already_set();
}

HookGuard::HookGuard(std::shared_ptr<Packer> packer) {
  auto* hook = reinterpret_cast<Hook*>(hook_type.tp_alloc(&hook_type, 0));
  if (hook == nullptr) throw py::error_already_set();
  hook->vectorcall = pack;
  new (&hook->packer) std::shared_ptr<Packer>(std::move(packer));
  hook_ = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
  const auto reference_to = [](PyObject* object) {
    Py_INCREF(object);
    return c10::SafePyObject(object, getPyInterpreter());
  };
  at::SavedTensorDefaultHooks::push_hooks(reference_to(hook_.ptr()), reference_to(unpack_hook));
}

HookGuard::~HookGuard() {
  at::SavedTensorDefaultHooks::pop_hooks();
  std::atomic_store(&reinterpret_cast<Hook*>(hook_.ptr())->packer, std::shared_ptr<Packer>());
}

EngineHookGuard::EngineHookGuard(std::shared_ptr<Packer> packer)
    : packer_(std::move(packer)),
      depth_(at::SavedTensorDefaultHooks::get_tls_state().stack.size()),
      outer_(innermost) {
  install_engine();
  innermost = this;
}

EngineHookGuard::~EngineHookGuard() { innermost = outer_; }

std::shared_ptr<Packer> EngineHookGuard::packer() {
  if (innermost == nullptr) return nullptr;
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  return hooks.size() > innermost->depth_ ? nullptr : innermost->packer_;
}

void run_backwards_alone() {
  install_engine();
  installed->run_alone();
}

PyObject* run_backward(PyObject*, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"tensors", "grad_tensors",      "keep_graph",      "create_graph",
                                "inputs",  "allow_unreachable", "accumulate_grad", nullptr};
  PyObject *tensors = nullptr, *grads = nullptr, *inputs = nullptr;
  int keep_graph = 0, create_graph = 0, allow_unreachable = 0, accumulate = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!pp|O!pp", const_cast<char**>(names),
                                   &PyTuple_Type, &tensors, &PyTuple_Type, &grads, &keep_graph,
                                   &create_graph, &PyTuple_Type, &inputs, &allow_unreachable,
                                   &accumulate)) {
    return nullptr;
  }
  torch::autograd::edge_list roots, outputs;
  torch::autograd::variable_list gradients;
  const auto tensors_in = [](PyObject* tuple) {
    std::vector<at::Tensor> found;
    for (Py_ssize_t i = 0; tuple != nullptr && i < PyTuple_GET_SIZE(tuple); ++i) {
      PyObject* item = PyTuple_GET_ITEM(tuple, i);
      if (item == Py_None) {
        found.emplace_back();
        continue;
      }
      TORCH_CHECK_NOT_IMPLEMENTED(THPVariable_Check(item), "edges of gradients");
      found.push_back(THPVariable_Unpack(item));
    }
    return found;
  };
  for (const auto& tensor : tensors_in(tensors)) {
    roots.push_back(torch::autograd::impl::gradient_edge(tensor));
    TORCH_CHECK(roots.back().function, "element ", roots.size() - 1,
                " of tensors does not require grad and does not have a grad_fn");
  }
  for (const auto& gradient : tensors_in(grads)) gradients.push_back(gradient);
  for (const auto& input : tensors_in(inputs)) {
    TORCH_CHECK(input.requires_grad(), "One of the differentiated Tensors does not require grad");
    if (accumulate) input.retain_grad();
    auto function = input.grad_fn();
    if (!function) function = torch::autograd::impl::try_get_grad_accumulator(input);
    if (function) {
      outputs.emplace_back(std::move(function), input.output_nr());
    } else {  // of a graph that has none of it
      outputs.emplace_back(make_node<torch::autograd::Identity>(), 0);
    }
  }
  torch::autograd::variable_list found;
  {
    const py::gil_scoped_release released;
    found = installed->execute(roots, gradients, keep_graph, create_graph, accumulate, outputs);
  }
  if (inputs == nullptr || accumulate || outputs.empty()) Py_RETURN_NONE;
  py::tuple results(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    TORCH_CHECK(allow_unreachable || found[i].defined(),
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior.");
    results[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(found[i]));
  }
  return results.release().ptr();
  END_HANDLE_TH_ERRORS
}

bool use_engine_hooks(bool enabled) {
  if (enabled) install_engine();
  return hooks_enabled.exchange(enabled);
}

}  // namespace memsave_ext::checkpoint

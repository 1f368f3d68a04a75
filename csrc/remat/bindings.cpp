#include "remat/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/hooks.h"
#include "checkpoint/recomputing.h"
#include "memory/active.h"
#include "plan/move.h"
#include "plan/plan.h"
#include "remat/account.h"
#include "remat/fakes.h"
#include "remat/functions.h"
#include "remat/known_bytes.h"
#include "remat/lived.h"
#include "remat/pause.h"
#include "remat/saved.h"
#include "store/store.h"

namespace memsave_ext::remat {

namespace py = pybind11;

namespace {

std::string name_of(const Operator* op) { return op == nullptr ? "" : op->name.name; }

std::string name_at(const plan::Trace& trace, const Place& place) {
  return place.call < 0 ? "" : name_of(trace.calls[place.call].op);
}

int64_t bytes_of(const plan::Trace& trace, const std::vector<int32_t>& contents) {
  int64_t bytes = 0;
  for (const int32_t content : contents) bytes += trace.contents[content].bytes;
  return bytes;
}

int64_t largest_of(const plan::Trace& trace, const std::vector<int32_t>& contents) {
  int64_t bytes = 0;
  for (const int32_t content : contents) bytes = std::max(bytes, trace.contents[content].bytes);
  return bytes;
}

// Tuples of a module's number, an operator's name and bytes.
py::list by_maker(const plan::Trace& trace, const std::vector<int32_t>& contents) {
  std::map<Maker, int64_t> sums;
  for (const int32_t number : contents) {
    const auto& content = trace.contents[number];
    sums[{content.module, content.op}] += content.bytes;
  }
  py::list rows;
  for (const auto& [maker, bytes] : sums) {
    rows.append(py::make_tuple(maker.first, name_of(maker.second), bytes));
  }
  return rows;
}

// The device whose memory counts. In a prediction fake tensors are on the meta device.
at::Device counted(const at::Device& device) {
  return Fakes::current() != nullptr ? at::Device(at::kMeta) : device;
}

std::shared_ptr<Block> make_block(std::optional<bool> everything, const at::Device& device,
                                  const std::shared_ptr<store::Store>& store, int64_t most_moved) {
  if (!everything) return std::make_shared<Block>(Drops::kNothing);
  if (*everything && store) return std::make_shared<Block>(Drops::kBoth, store, most_moved);
  if (*everything) return std::make_shared<Block>(Drops::kEverything);
  // A plan needs the time of each operator. On other devices than these the clock sees launches.
  const bool is_timed = device.is_cpu() || device.is_cuda() || device.is_meta();
  if (!is_timed) return std::make_shared<Block>(Drops::kCheap);
  return std::make_shared<Block>(Budget{0, 0, false, false, device});
}

// pybind11 looks for other libraries' casts before it takes None for a null pointer: 12,000
// instructions in each step.
std::shared_ptr<store::Store> store_in(const py::object& given) {
  return given.is_none() ? nullptr : given.cast<std::shared_ptr<store::Store>>();
}

// A block and its saved-tensor hooks, as memsave_ext/remat/recorder.py uses them.
class Recorder {
 public:
  Recorder(std::optional<bool> everything, const at::Device& device,
           const std::shared_ptr<store::Store>& store, int64_t most_moved)
      : block_(make_block(everything, counted(device), store, most_moved)) {}
  Recorder(int64_t bytes, double share, bool strict, bool is_more, const at::Device& device,
           const std::shared_ptr<store::Store>& store, int64_t most_moved)
      : block_(std::make_shared<Block>(
            Budget{bytes, share, strict, is_more, counted(device), store, most_moved})) {}

  // A block that was not left stays open, since its thread refers to it; the hooks keep it alive.
  ~Recorder() { (void)hooks_.release(); }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void tell_modules(py::object model) {
    modules_ = std::make_shared<Modules>(std::move(model));
    block_->tell_modules(modules_);
  }

  void open(std::optional<int64_t> bytes, bool retry) {
    auto hooks =
        std::make_unique<checkpoint::EngineHookGuard>(std::make_shared<BlockPacker>(block_));
    block_->open(bytes, retry);
    hooks_ = std::move(hooks);
    state_ = State::kOpen;
  }
  bool restart() { return block_->is_innermost() && block_->step()->restart(); }
  // Whether the block records here, and no other saved-tensor hooks lie above its own.
  bool suspend() {
    const auto packer = checkpoint::EngineHookGuard::packer();
    if (!block_->is_innermost() || dynamic_cast<BlockPacker*>(packer.get()) == nullptr)
      return false;
    block_->suspend();
    hooks_.reset();
    state_ = State::kSuspended;
    return true;
  }
  void resume() {
    if (state_ != State::kSuspended) return;
    state_ = State::kOpen;
    hooks_ = std::make_unique<checkpoint::EngineHookGuard>(std::make_shared<BlockPacker>(block_));
    block_->resume();
  }
  void close() {
    if (!block_->is_innermost()) {
      throw std::runtime_error(
          "remat: a `with remat()` must be left in the thread that entered it, and after those "
          "inside it");
    }
    state_ = State::kClosed;
    block_->close();
    hooks_.reset();
  }
  void undo_open() {
    resume();
    if (state_ == State::kOpen) close();
  }
  std::vector<std::string> modules() const {
    return modules_ ? modules_->names() : std::vector<std::string>();
  }

  void count(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gradients,
             int64_t missing) {
    block_->step()->count(tensors, gradients, missing);
  }

  void of_model(int64_t number) { block_->step()->of_model(number); }

  // False, and counts nothing, where it holds anything but plain tensors.
  bool count_model(const py::handle& model, const py::list& states) {
    std::optional<Lived> lived = lived_in(model, states);
    if (lived) count(lived->tensors, lived->gradients, lived->missing);
    return lived.has_value();
  }

  bool is_newly_short() { return block_->step()->is_newly_short(); }

  py::dict budget() const {
    if (block_->step() == nullptr) {
      throw std::runtime_error("remat: this `with remat()` was not entered");
    }
    Step& step = *block_->step();
    py::dict figures;
    figures["budget"] = step.budget();
    figures["peak"] = step.peak();
    figures["least"] = step.least();
    figures["before"] = step.before();
    figures["curve"] = step.curve();
    figures["waiting"] = step.waiting();
    const std::optional<plan::Plan> plan = step.plan();
    py::list plans;
    figures["plan"] = py::none();
    if (const auto known = step.followed()) {
      // Made of an earlier step: what has come since, such as an optimizer's states, counts now.
      const int64_t more = step.before() - known->before;
      const auto described = [more](const plan::Plan& plan) {
        return py::make_tuple(plan.peak + more, plan.seconds);
      };
      if (plan) figures["plan"] = described(*plan);
      for (const plan::Plan& other : step.plans()) plans.append(described(other));
    }
    figures["plans"] = std::move(plans);
    return figures;
  }

  // Where the plan with the least memory needs the most, and what holds it; see recorder.py.
  py::object limit() const {
    const std::shared_ptr<const Known> known = block_->step()->followed();
    if (known == nullptr) return py::none();
    const plan::Trace& trace = known->trace;
    const Limit limit = limit_of(trace, block_->step()->plans().back());
    py::dict figures;
    figures["in_forward"] = limit.place.in_forward;
    figures["operator"] = name_at(trace, limit.place);
    figures["others"] = limit.others + block_->step()->before() - known->before;
    figures["made"] = limit.made;
    figures["held"] = limit.held;
    figures["on_context"] = limit.on_context;
    figures["kept"] = by_maker(trace, limit.kept);
    figures["recomputed"] = by_maker(trace, limit.recomputed);
    std::vector<int32_t> held = limit.kept, logits, rest;
    held.insert(held.end(), limit.recomputed.begin(), limit.recomputed.end());
    const std::vector<int32_t> of_loss = logits_of(trace);
    for (const int32_t content : held) {
      const bool is_logits = std::find(of_loss.begin(), of_loss.end(), content) != of_loss.end();
      (is_logits ? logits : rest).push_back(content);
    }
    figures["logits"] = bytes_of(trace, logits);
    figures["largest_logits"] = largest_of(trace, of_loss);
    figures["largest"] = largest_of(trace, rest);
    return py::object(std::move(figures));
  }

  // Where the step needed another peak than was planned, by more than a hundredth.
  py::object deviation() const {
    const auto deviation = block_->step()->deviation();
    if (!deviation) return py::none();
    py::object in_forward = py::none();
    if (deviation->place) in_forward = py::bool_(deviation->place->in_forward);
    return py::make_tuple(in_forward, name_of(deviation->op), deviation->measured,
                          deviation->foreseen);
  }

  // As remat_plans() takes it, and the plan's decisions.
  py::tuple trace() const {
    const plan::Trace trace = block_->step()->trace();
    py::list contents, calls, moments, decisions;
    for (const auto& c : trace.contents) {
      contents.append(py::make_tuple(c.bytes, c.call, c.saved, c.let_go, c.opened, c.closed));
    }
    for (const auto& call : trace.calls) {
      const auto list = [](const auto& numbers) {
        return std::vector<int32_t>(numbers.begin(), numbers.end());
      };
      calls.append(py::make_tuple(call.seconds, list(call.reads), list(call.makes),
                                  list(call.writes), call.temporary));
    }
    for (const auto& moment : trace.moments) {
      moments.append(py::make_tuple(moment.now, moment.peak));
    }
    if (const auto plan = block_->step()->plan()) {
      for (const plan::Decision decision : plan->decisions)
        decisions.append(static_cast<int>(decision));
    }
    return py::make_tuple(contents, calls, moments, trace.forward, decisions);
  }

  py::dict figures() const {
    const Tally tally = [this] {
      const py::gil_scoped_release no_gil;
      return block_->tally();
    }();
    py::list saved, again;
    for (const auto& [key, sum] : tally.saved) {
      const auto& [maker, verdict] = key;
      saved.append(py::make_tuple(maker.first, name_of(maker.second), static_cast<int>(verdict),
                                  sum.count, sum.bytes, sum.seconds));
    }
    for (const auto& [maker, sum] : tally.again) {
      again.append(
          py::make_tuple(maker.first, name_of(maker.second), sum.count, sum.bytes, sum.seconds));
    }
    py::dict figures;
    figures["operators"] = block_->operators();
    figures["passed"] = block_->passed();
    figures["planned"] = block_->step() != nullptr && block_->step()->plan().has_value();
    if (const Step* step = block_->step()) {
      const auto [known, planned] = step->known();
      figures["shapes"] = py::make_tuple(known, planned);
    }
    if (const Mover* mover = block_->mover()) {
      const MoveFigures moves = mover->figures();
      figures["moves"] = py::make_tuple(moves.moved, moves.brought_back, moves.not_moved,
                                        moves.waited, moves.failure, mover->store().name());
    }
    figures["given_back"] = py::make_tuple(tally.contents_given_back, tally.bytes_given_back);
    figures["saved"] = std::move(saved);
    figures["again"] = std::move(again);
    return figures;
  }

 private:
  enum class State { kClosed, kOpen, kSuspended };

  const std::shared_ptr<Block> block_;
  std::shared_ptr<Modules> modules_;                    // null without a model
  std::unique_ptr<checkpoint::EngineHookGuard> hooks_;  // null where it is not open
  State state_ = State::kClosed;
};

// Keeps the blocks that are open on this thread from recording. Not those that open later: a scope
// of Python that spans hooks of modules never ends where an interrupt comes, as no hook sees it.
class OpenBlocksPause {
 public:
  ~OpenBlocksPause() { end(); }

  void begin() {
    for (const auto& block : Block::all_open()) {
      block->begin_pause();
      blocks_.push_back(block);
    }
  }

  void end() {
    for (const auto& weak : std::exchange(blocks_, {})) {
      if (const auto block = weak.lock()) block->end_pause();
    }
  }

 private:
  std::vector<std::weak_ptr<Block>> blocks_;
};

// The step on fake tensors that has ended last, for expect() in another process; nothing where it
// has saved nothing.
std::optional<py::bytes> take_step(const Fakes& fakes) {
  const auto step = fakes.steps()->take_latest();
  if (!step || step->keys.empty()) return std::nullopt;
  return py::bytes(to_bytes(*step));
}

// Lets the device's steps begin with a plan for that step of a model. Returns the hash of its
// operators, by which remat_knows() finds it.
uint64_t expect(const at::Device& device, const std::string& bytes, int64_t model) {
  auto step = known_from_bytes(bytes);
  step->models = {model};
  const uint64_t last_key = step->keys.back();
  known_steps(device)->expect(std::move(step));
  return last_key;
}

// For tests: a trace as tuples of its fields.
using Positions = std::vector<int32_t>;
using ContentFields = std::tuple<int64_t, int32_t, bool, int32_t, int32_t, int32_t>;
using CallFields = std::tuple<double, Positions, Positions, Positions, int64_t>;
using MomentFields = std::tuple<int64_t, int64_t>;

plan::Trace trace_of(const std::vector<ContentFields>& contents,
                     const std::vector<CallFields>& calls, const std::vector<MomentFields>& moments,
                     int32_t forward) {
  plan::Trace trace;
  trace.forward = forward;
  for (const auto& [bytes, call, saved, let_go, opened, closed] : contents) {
    trace.contents.push_back({bytes, call, saved, let_go, opened, closed});
  }
  for (const auto& [seconds, reads, makes, writes, temporary] : calls) {
    plan::TraceCall& call = trace.calls.emplace_back();
    call.moment = static_cast<int32_t>(trace.calls.size()) - 1;
    call.seconds = seconds;
    call.reads.assign(reads.begin(), reads.end());
    call.makes.assign(makes.begin(), makes.end());
    call.writes.assign(writes.begin(), writes.end());
    call.temporary = temporary;
  }
  for (const auto& [now, peak] : moments) trace.moments.push_back({now, peak});
  return trace;
}

py::tuple as_tuple(const plan::Plan& plan) {
  std::vector<int> made;
  for (const plan::Decision decision : plan.decisions) made.push_back(static_cast<int>(decision));
  return py::make_tuple(plan.peak, plan.seconds, made);
}

// The plans of a trace; with decisions, only the plan with these.
py::list plans(const std::vector<ContentFields>& contents, const std::vector<CallFields>& calls,
               const std::vector<MomentFields>& moments, int32_t forward, int most_enumerated,
               const std::optional<std::vector<int>>& decisions) {
  const plan::Trace trace = trace_of(contents, calls, moments, forward);
  std::vector<plan::Plan> plans;
  if (decisions) {
    std::vector<plan::Decision> chosen;
    for (const int decision : *decisions) chosen.push_back(static_cast<plan::Decision>(decision));
    plans.push_back(plan::simulate(trace, std::move(chosen)));
  } else {
    plans = plan::plans_of(trace, most_enumerated);
  }
  py::list result;
  for (const auto& plan : plans) result.append(as_tuple(plan));
  return result;
}

// The plans of a trace that move contents, too, each with the seconds for which it waits and pairs
// of contents: when the first of a pair is opened, the second begins to come back. Where nothing
// `recomputes`, those that move alone.
py::list moving_plans(const std::vector<ContentFields>& contents,
                      const std::vector<CallFields>& calls,
                      const std::vector<MomentFields>& moments, int32_t forward, double out,
                      double back, int64_t most_moved, bool recomputes) {
  plan::Trace trace = trace_of(contents, calls, moments, forward);
  for (auto& content : trace.contents) content.must_be_kept |= content.saved && !recomputes;
  plan::MovingPlans made(trace, plan::plans_of(trace), store::Speed{out, back}, most_moved);
  py::list result;
  for (const plan::Plan& plan : made.plans) {
    const auto schedule = made.schedule(trace, plan);
    std::vector<std::pair<int32_t, int32_t>> back;
    const size_t contents = schedule ? schedule->back.size() : 0;
    for (size_t opened = 0; opened < contents; ++opened) {
      for (const int32_t other : schedule->back[opened]) back.emplace_back(opened, other);
    }
    result.append(py::make_tuple(as_tuple(plan), schedule ? schedule->waiting : 0.0, back));
  }
  return result;
}

}  // namespace

void bind(py::module_& m) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  give_way_to_cuda();
#endif
  Operator::watch_libraries();
  m.def("remat_forget", &forget_known_steps);
  // What torch takes to tell an observer of each operator, for the benchmark: no block takes less.
  m.def("remat_observe_nothing", [] {
    const auto nothing = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
      return nullptr;
    };
    return at::addThreadLocalCallback(
        at::RecordFunctionCallback(nothing).needsInputs(true).needsOutputs(true).scopes(
            {at::RecordScope::FUNCTION}));
  });
  m.def("remat_stop_observing", &at::removeCallback);
  py::class_<OpenBlocksPause>(m, "RematPause")
      .def(py::init<>())
      .def("__enter__", &OpenBlocksPause::begin)
      .def("__exit__", [](OpenBlocksPause& pause, const py::args&) { pause.end(); });
  m.def("remat_is_recording", [] { return Block::active() != nullptr; });
  m.def("remat_declare_function", [](const std::string& name) {
    return reinterpret_cast<uintptr_t>(Operator::named(declare_function(name)));
  });
  py::class_<Block::RunningFunction>(m, "RematRunningFunction")
      .def("end", &Block::RunningFunction::end, py::call_guard<py::gil_scoped_release>())
      .def("cancel", &Block::RunningFunction::cancel);
  m.def(
      "remat_begin_function",
      [](uintptr_t declared, std::vector<at::Tensor> tensors, py::object call, int64_t key) {
        const std::vector<c10::IValue> inputs{
            std::move(tensors),
            c10::IValue::make_capsule(c10::make_intrusive<FunctionCall>(std::move(call))), key};
        const py::gil_scoped_release no_gil;
        return Block::begin_function(*reinterpret_cast<const Operator*>(declared), inputs);
      },
      py::arg("declared"), py::arg("tensors"), py::arg("call"), py::arg("key"));
  m.def("remat_may_run_ahead", [] {
    return checkpoint::EngineHookGuard::packer() == nullptr && !checkpoint::in_region();
  });
  m.def("remat_knows", [](const at::Device& device, uint64_t last_key) {
    return known_steps(device)->knows(last_key);
  });
  m.def("remat_expect", &expect, py::arg("device"), py::arg("step"), py::arg("model"));
  m.def("remat_is_predicted", [] { return Fakes::current() != nullptr; });
  m.def("remat_is_predicted_for_cuda", [] {
    return Fakes::current() != nullptr && Fakes::current()->steps()->count.counts_all();
  });
  py::class_<Fakes>(m, "RematFakes")
      .def(py::init([](py::object make, py::object moved, bool counts_all) {
             auto steps = std::make_shared<KnownSteps>(at::Device(at::kMeta), counts_all);
             return std::make_unique<Fakes>(std::move(make), std::move(moved), std::move(steps));
           }),
           py::arg("make"), py::arg("moved"), py::arg("counts_all"))
      .def("enter", &Fakes::enter)
      .def("allocated",
           [](const Fakes& fakes, uintptr_t storage, int64_t size) {
             memory::TrackingLock lock;
             fakes.steps()->count.allocated(reinterpret_cast<void*>(storage), size);
           })
      .def("freed",
           [](const Fakes& fakes, uintptr_t storage) {
             memory::TrackingLock lock;
             fakes.steps()->count.freed(reinterpret_cast<void*>(storage));
           })
      .def("ran", &Fakes::ran)
      .def("copying", &Fakes::copying)
      .def("seconds", &Fakes::seconds)
      .def("take_step", &take_step)
      .def("knows_steps", [](const Fakes& fakes) { return fakes.steps()->any(); });
  py::class_<store::Store, std::shared_ptr<store::Store>>(m, "RematStore")
      .def_static(
          "in_folder",
          [](const std::string& folder, const at::Device& device) {
            const Pause pause;
            try {
              return device.is_cpu() ? store::in_folder(folder) : store::staged(device, folder);
            } catch (const std::system_error& error) {
              errno = error.code().value();
              PyErr_SetFromErrnoWithFilename(PyExc_OSError, folder.c_str());
              throw py::error_already_set();
            }
          },
          py::arg("folder"), py::arg("device"))
      .def_static(
          "predicted",
          [](std::string name, double out, double back) {
            const auto running = []() -> store::Prediction* { return Fakes::current(); };
            return store::predicted(std::move(name), store::Speed{out, back}, running);
          },
          py::arg("name"), py::arg("out"), py::arg("back"))
      .def_static(
          "in_host_memory",
          [](const at::Device& device) {
            const Pause pause;
            return store::in_host_memory(device);
          },
          py::arg("device"), py::call_guard<py::gil_scoped_release>())
      .def("used", &store::Store::used)
      .def("speed", [](store::Store& store) {
        const store::Speed speed = store.speed();
        return py::make_tuple(speed.out, speed.back);
      });
  py::class_<Recorder>(m, "RematRecorder")
      .def(py::init([](std::optional<bool> everything, const at::Device& device,
                       const py::object& store, int64_t most_moved) {
             return std::make_unique<Recorder>(everything, device, store_in(store), most_moved);
           }),
           py::arg("everything"), py::arg("device"), py::arg("store") = py::none(),
           py::arg("most_moved") = 0)
      .def(py::init([](int64_t bytes, double share, bool strict, bool is_more,
                       const at::Device& device, const py::object& store, int64_t most_moved) {
             return std::make_unique<Recorder>(bytes, share, strict, is_more, device,
                                               store_in(store), most_moved);
           }),
           py::arg("bytes"), py::arg("share"), py::arg("strict"), py::arg("is_more"),
           py::arg("device"), py::arg("store") = py::none(), py::arg("most_moved") = 0)
      .def("count", &Recorder::count)
      .def("of_model", &Recorder::of_model)
      .def("count_model", &Recorder::count_model)
      .def("budget", &Recorder::budget)
      .def("limit", &Recorder::limit)
      .def("deviation", &Recorder::deviation)
      .def("trace", &Recorder::trace)
      .def("is_newly_short", &Recorder::is_newly_short)
      .def("open", &Recorder::open, py::arg("bytes") = py::none(), py::arg("retry") = false)
      .def("close", &Recorder::close)
      .def("undo_open", &Recorder::undo_open)
      .def("restart", &Recorder::restart)
      .def("suspend", &Recorder::suspend)
      .def("resume", &Recorder::resume)
      .def("tell_modules", &Recorder::tell_modules)
      .def("modules", &Recorder::modules)
      .def("figures", &Recorder::figures);
  m.def("remat_moving_plans", &moving_plans, py::arg("contents"), py::arg("calls"),
        py::arg("moments"), py::arg("forward"), py::arg("out"), py::arg("back"),
        py::arg("most_moved"), py::arg("recomputes") = true);
  m.def("remat_plans", &plans, py::arg("contents"), py::arg("calls"), py::arg("moments"),
        py::arg("forward"), py::arg("most_enumerated") = 14, py::arg("decisions") = py::none());
}

}  // namespace memsave_ext::remat

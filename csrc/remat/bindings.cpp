#include "remat/bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "checkpoint/engine.h"
#include "remat/saved.h"

namespace memsave_ext::remat {

namespace py = pybind11;

namespace {

std::string name_of(const Operator* op) { return op == nullptr ? "" : op->handle.schema().name(); }

// A block and its saved-tensor hooks, as memsave_ext/rematerialization/recorder.py uses them.
class Recorder {
 public:
  explicit Recorder(std::optional<bool> everything)
      : block_(std::make_shared<Block>(!everything   ? Drops::kNothing
                                       : *everything ? Drops::kEverything
                                                     : Drops::kCheap)) {}

  // A block that was not left stays open, since its thread refers to it; the hooks keep it alive.
  ~Recorder() { (void)hooks_.release(); }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void open() {
    hooks_ = std::make_unique<EngineHookGuard>(std::make_shared<BlockPacker>(block_));
    block_->open();
  }
  void close() {
    if (!block_->is_innermost()) {
      throw std::runtime_error(
          "remat: a block is left in the thread that entered it, and after the blocks inside it");
    }
    block_->close();
    hooks_.reset();
  }
  void enter_module(int32_t number) { block_->enter_module(number); }
  void leave_module() { block_->leave_module(); }

  py::dict figures() const {
    SumsAgain sums_again;
    {
      const py::gil_scoped_release no_gil;
      sums_again = block_->sums_again();
    }
    py::list saved, again;
    for (const auto& [key, sum] : block_->sums()) {
      const auto& [maker, verdict] = key;
      saved.append(py::make_tuple(maker.first, name_of(maker.second), static_cast<int>(verdict),
                                  sum.count, sum.bytes, sum.seconds));
    }
    for (const auto& [maker, sum] : sums_again) {
      again.append(
          py::make_tuple(maker.first, name_of(maker.second), sum.count, sum.bytes, sum.seconds));
    }
    py::dict figures;
    figures["operators"] = block_->recorded();
    figures["saved"] = std::move(saved);
    figures["again"] = std::move(again);
    return figures;
  }

 private:
  const std::shared_ptr<Block> block_;
  std::unique_ptr<EngineHookGuard> hooks_;  // null where it is not open
};

}  // namespace

void bind(py::module_& m) {
  py::class_<Recorder>(m, "RematRecorder")
      .def(py::init<std::optional<bool>>())
      .def("open", &Recorder::open)
      .def("close", &Recorder::close)
      .def("enter_module", &Recorder::enter_module)
      .def("leave_module", &Recorder::leave_module)
      .def("figures", &Recorder::figures);
}

}  // namespace memsave_ext::remat

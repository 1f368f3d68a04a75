#include "remat/bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "checkpoint/engine.h"
#include "remat/saved.h"

namespace memsave_ext::remat {

namespace py = pybind11;

namespace {

// A block with its hooks, as Python enters and leaves it.
class Scope {
 public:
  explicit Scope(bool everything) : block_(std::make_shared<Block>(everything)) {}

  void enter() {
    install_engine();
    hooks_.emplace(std::make_shared<BlockPacker>(block_));
    block_->enter();
  }
  void leave() {
    block_->leave();
    hooks_.reset();
  }
  void enter_module(int32_t number) { block_->enter_module(number); }
  void leave_module() { block_->leave_module(); }

  // By module: bytes and counts by verdict, and the seconds that the dropped took.
  py::dict sums() const {
    py::dict result;
    for (const auto& [module, sums] : block_->sums()) {
      py::tuple bytes(kVerdicts), count(kVerdicts);
      for (int i = 0; i < kVerdicts; ++i) {
        bytes[i] = sums.bytes[i];
        count[i] = sums.count[i];
      }
      result[py::int_(module)] = py::make_tuple(bytes, count, sums.seconds);
    }
    return result;
  }
  py::tuple again() const {
    const Again& again = block_->again();
    return py::make_tuple(again.bytes.load(), again.operators.load(),
                          static_cast<double>(again.nanoseconds.load()) * 1e-9);
  }
  int64_t recorded() const { return block_->recorded(); }

 private:
  const std::shared_ptr<Block> block_;
  std::optional<HookGuard> hooks_;
};

}  // namespace

void bind(py::module_& m) {
  py::class_<Scope>(m, "RematBlock")
      .def(py::init<bool>())
      .def("enter", &Scope::enter)
      .def("leave", &Scope::leave)
      .def("enter_module", &Scope::enter_module)
      .def("leave_module", &Scope::leave_module)
      .def("sums", &Scope::sums)
      .def("again", &Scope::again)
      .def_property_readonly("recorded", &Scope::recorded);
}

}  // namespace memsave_ext::remat

// Contents of a predicted step, which have no memory: what their copies take, by the prediction's
// clock.
#include <algorithm>
#include <utility>

#include "store/store.h"

namespace memsave_ext::store {
namespace {

// The copies one way, one after the other.
struct PredictedBus {
  double bytes_per_second, free_from = 0;

  // Returns when a copy that may begin now is over.
  double copy(int64_t bytes, Prediction* prediction) {
    if (prediction == nullptr) return free_from;
    const double seconds = static_cast<double>(bytes) / bytes_per_second;
    prediction->copied(seconds);
    return free_from = std::max(prediction->seconds(), free_from) + seconds;
  }
};

struct PredictedCopies {
  PredictedCopies(Speed speed, Prediction* (*running)())
      : running(running), out{speed.out}, back{speed.back} {}

  Prediction* (*const running)();
  PredictedBus out, back;
  // A graph that outlives its prediction tells nobody.
  const Prediction* const prediction = running();
  Room room{[this](int64_t bytes) {
    Prediction* const now = running();
    if (now != nullptr && now == prediction) now->moved(bytes);
  }};
};

class Predicted final : public Away {
 public:
  Predicted(std::shared_ptr<PredictedCopies> shared, c10::intrusive_ptr<c10::StorageImpl> memory)
      : shared_(std::move(shared)),
        bytes_(static_cast<int64_t>(memory->nbytes())),
        source_(std::move(memory)),
        out_at_(shared_->out.copy(bytes_, shared_->running())) {}

  ~Predicted() override { shared_->room.give_back(bytes_); }

  bool is_out() override {
    const Prediction* const prediction = shared_->running();
    return prediction == nullptr || prediction->seconds() >= out_at_;
  }
  void wait_until_out() override { wait_until(out_at_); }
  c10::intrusive_ptr<c10::StorageImpl> take_source() override { return std::move(source_); }

  void begin_back(c10::Storage memory) override {
    if (into_) return;
    into_ = std::move(memory);
    back_at_ = shared_->back.copy(bytes_, shared_->running());
  }
  bool is_coming() override { return into_.has_value(); }
  c10::Storage end_back() override {
    wait_until(back_at_);
    c10::Storage memory = std::move(*into_);
    into_.reset();
    return memory;
  }
  void cancel() override {}

 private:
  void wait_until(double seconds) {
    if (Prediction* const prediction = shared_->running()) prediction->wait_until(seconds);
  }

  const std::shared_ptr<PredictedCopies> shared_;
  const int64_t bytes_;
  c10::intrusive_ptr<c10::StorageImpl> source_;
  const double out_at_;
  std::optional<c10::Storage> into_;
  double back_at_ = 0;
};

class PredictedStore final : public Store {
 public:
  PredictedStore(std::string name, Speed speed, Prediction* (*running)())
      : name_(std::move(name)),
        speed_(speed),
        shared_(std::make_shared<PredictedCopies>(speed, running)) {}

  bool takes(c10::Device) const override { return true; }  // fake memory, under any name
  std::shared_ptr<Away> put(c10::intrusive_ptr<c10::StorageImpl> memory,
                            const std::optional<c10::Stream>&, int64_t limit) override {
    if (!shared_->room.take(static_cast<int64_t>(memory->nbytes()), limit)) return nullptr;
    return std::make_shared<Predicted>(shared_, std::move(memory));
  }
  Speed speed() override { return speed_; }
  int64_t used() const override { return shared_->room.used(); }
  std::string name() const override { return name_; }

 private:
  const std::string name_;
  const Speed speed_;
  const std::shared_ptr<PredictedCopies> shared_;
};

}  // namespace

std::shared_ptr<Store> predicted(std::string name, Speed speed, Prediction* (*running)()) {
  return std::make_shared<PredictedStore>(std::move(name), speed, running);
}

}  // namespace memsave_ext::store

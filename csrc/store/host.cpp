// Contents of a CUDA device in pinned memory of the host. Copies each way have a stream of their
// own, and whoever must wait for one is a stream, too: of the host nothing but the order of calls
// is asked, so that it may run ahead of the device as ever.
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda_stream.h"
#include "locks.h"
#include "memory/active.h"
#include "store/device_copies.h"
#include "store/ranges.h"
#include "store/store.h"
#include "streams.h"

namespace memsave_ext::store {
namespace {

// What the speed is measured with.
constexpr int64_t kCopied = 16 << 20;
// Pieces of pinned memory: torch's allocator rounds up to powers of two, so that they are such, and
// each is as large as all before it, within these bounds.
constexpr int64_t kLeastPiece = 32 << 20;
constexpr int64_t kMostPiece = int64_t{1} << 30;
constexpr int64_t kPinnedUnit = 512;

// The last copy back that reads a part of pinned memory. One stream makes all of them, in the order
// of their numbers.
struct LastRead {
  uint64_t number = 0;
  std::shared_ptr<c10::Event> over = nullptr;

  bool operator<(const LastRead& other) const { return number < other.number; }
};

// Pinned memory, and which parts of it are taken.
class PinnedMemory {
 public:
  struct Part {
    size_t piece = 0;
    int64_t offset = 0, size = 0;
    at::Tensor memory;  // of the piece
    LastRead last;

    at::Tensor bytes(int64_t count) const { return memory.narrow(0, offset, count); }
  };

  // Nothing where no piece has so much left.
  std::optional<Part> take(int64_t bytes) {
    const int64_t size = rounded(bytes);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (const auto part = pieces_[i].free.take(size)) {
        return Part{i, part->first, size, pieces_[i].memory, part->second};
      }
    }
    return std::nullopt;
  }

  // Counts a piece that is to be added, with room for so many bytes, and returns its size; 0 where
  // all would have more bytes than `limit`.
  int64_t reserve(int64_t bytes, int64_t limit) {
    const int64_t least = rounded(bytes), most = limit - bytes_;
    int64_t size = kLeastPiece;
    while (size < least || (size < bytes_ && size < kMostPiece)) size *= 2;
    while (size > most && size / 2 >= least) size /= 2;
    if (size > most) return 0;
    bytes_ += size;
    return size;
  }

  void unreserve(int64_t size) { bytes_ -= size; }

  // `memory`: as large as reserve() said. Returns the part of it that has `bytes`.
  Part add(at::Tensor memory, int64_t bytes) {
    pieces_.push_back({std::move(memory), {}});
    pieces_.back().free.give_back(0, pieces_.back().memory.numel());
    const int64_t size = rounded(bytes);
    pieces_.back().free.take(size);
    return Part{pieces_.size() - 1, 0, size, pieces_.back().memory, {}};
  }

  void give_back(const Part& part, const LastRead& last) {
    pieces_[part.piece].free.give_back(part.offset, part.size, last);
  }

 private:
  struct Piece {
    at::Tensor memory;
    Ranges<LastRead> free;
  };

  static int64_t rounded(int64_t bytes) {
    return (std::max<int64_t>(bytes, 1) + kPinnedUnit - 1) / kPinnedUnit * kPinnedUnit;
  }

  std::vector<Piece> pieces_;
  int64_t bytes_ = 0;
};

// What the copies of a store share. Copies keep it alive.
struct OnHost {
  explicit OnHost(c10::Device device)
      : device(device),
        out(stream_for_copies(device)),
        back(stream_for_copies(device)),
        room([device](int64_t bytes) { memory::report_moved(device, bytes); }) {}

  const c10::Device device;
  const c10::Stream out, back;
  Room room;
  // For what follows, and the state of all copies.
  Lock mutex{LockOrder::kOnHost};
  std::condition_variable_any changed;
  PinnedMemory memory;
  uint64_t copies_back = 0;
};

using HostLock = std::lock_guard<Lock>;

class InHostMemory final : public Away {
 public:
  InHostMemory(std::shared_ptr<OnHost> shared, PinnedMemory::Part part,
               c10::intrusive_ptr<c10::StorageImpl> source, c10::Stream made_on)
      : shared_(std::move(shared)),
        part_(std::move(part)),
        bytes_(static_cast<int64_t>(source->nbytes())),
        source_(std::move(source)),
        made_on_(made_on),
        out_(made_on.device_type()) {}

  // Whoever frees memory that is still copied, or copied to, makes its own stream wait for that.
  ~InHostMemory() override {
    try {
      (void)take_source();
      if (into_ && !is_capturing(shared_->device)) last_.over->block(*into_on_);
    } catch (const std::exception&) {
      // The device has failed, of which others will tell.
    }
    into_.reset();
    const HostLock lock(shared_->mutex);
    shared_->memory.give_back(part_, std::max(last_, part_.last));
    shared_->room.give_back(bytes_);
  }

  void begin() {
    const AsideOfSteps aside;
    order_after(shared_->out, made_on_);
    if (part_.last.over) part_.last.over->block(shared_->out);
    const c10::StreamGuard on_stream(shared_->out);
    const c10::Storage source{c10::intrusive_ptr<c10::StorageImpl>(source_)};
    part_.bytes(bytes_).copy_(as_bytes(source), true);
    out_.record(shared_->out);
  }

  bool is_out() override {
    const HostLock lock(shared_->mutex);
    if (is_waited_for_) return true;
    if (!is_over_ && !is_capturing(shared_->device)) is_over_ = out_.query();
    return is_over_;
  }

  // The stream that made it waits, on which its memory will be used again, and the current one,
  // which may be about to write it. A stream that is captured cannot wait for what came before, nor
  // need it: captures begin when all is done, and take none of this memory.
  void wait_until_out() override {
    const HostLock lock(shared_->mutex);
    if (is_over_ || is_capturing(shared_->device)) return;
    const c10::Stream current = *current_stream(shared_->device);
    if (current != made_on_) out_.block(current);
    if (!std::exchange(is_waited_for_, true)) out_.block(made_on_);
  }

  c10::intrusive_ptr<c10::StorageImpl> take_source() override {
    if (source_ && !is_out()) wait_until_out();
    const HostLock lock(shared_->mutex);
    return std::move(source_);
  }

  // Copies without the lock (S2). Others who begin it meanwhile wait until that is queued.
  void begin_back(c10::Storage memory) override {
    {
      std::unique_lock<Lock> lock(shared_->mutex);
      shared_->changed.wait(lock, [this] { return !is_beginning_back_; });
      if (into_) return;
      is_beginning_back_ = true;
    }
    const auto ends = c10::make_scope_exit([this] {
      {
        const HostLock lock(shared_->mutex);
        is_beginning_back_ = false;
      }
      shared_->changed.notify_all();
    });
    const AsideOfSteps aside;
    const c10::Stream current = *current_stream(shared_->device);
    order_after(shared_->back, current);  // which may use until then what was in this memory
    out_.block(shared_->back);
    {
      const c10::StreamGuard on_stream(shared_->back);
      as_bytes(memory).copy_(part_.bytes(bytes_), true);
    }
    auto over = std::make_shared<c10::Event>(shared_->back.device_type());
    const HostLock lock(shared_->mutex);  // numbers have the order of the events
    over->record(shared_->back);
    last_ = {++shared_->copies_back, std::move(over)};
    into_ = std::move(memory);
    into_on_ = current;
  }

  bool is_coming() override {
    const HostLock lock(shared_->mutex);
    return into_.has_value();
  }

  c10::Storage end_back() override {
    const c10::Stream current = *current_stream(shared_->device);
    c10::Storage memory;
    bool is_other_stream = false;
    {
      const HostLock lock(shared_->mutex);
      last_.over->block(current);
      memory = std::move(*into_);
      into_.reset();
      is_other_stream = current != *into_on_;
    }
    if (is_other_stream) {
      const c10::impl::VirtualGuardImpl guard(current.device_type());
      guard.recordDataPtrOnStream(memory.data_ptr(), current);
    }
    return memory;
  }

  void cancel() override {}  // what has begun is on its stream

 private:
  const std::shared_ptr<OnHost> shared_;
  const PinnedMemory::Part part_;
  const int64_t bytes_;
  c10::intrusive_ptr<c10::StorageImpl> source_;
  const c10::Stream made_on_;
  c10::Event out_;
  bool is_over_ = false;        // the copy out, as the host knows
  bool is_waited_for_ = false;  // by the stream that it was made on
  bool is_beginning_back_ = false;
  std::optional<c10::Storage> into_;
  std::optional<c10::Stream> into_on_;
  LastRead last_;
};

Lock speeds_mutex{LockOrder::kHostSpeeds};
auto& speeds = *new std::map<c10::DeviceIndex, Speed>();

class HostStore final : public Store {
 public:
  explicit HostStore(c10::Device device)
      : device_(device), shared_(std::make_shared<OnHost>(device)) {}

  bool takes(c10::Device device) const override { return device == device_; }
  bool uses_streams() const override { return true; }

  std::shared_ptr<Away> put(c10::intrusive_ptr<c10::StorageImpl> memory,
                            const std::optional<c10::Stream>& made_on, int64_t limit) override {
    if (is_capturing(device_)) {
      throw std::runtime_error("copies to the host's memory cannot be captured in a CUDA graph");
    }
    const auto bytes = static_cast<int64_t>(memory->nbytes());
    if (!shared_->room.take(bytes, limit)) return nullptr;
    std::optional<PinnedMemory::Part> part;
    try {
      part = take_pinned(bytes, limit);
    } catch (const std::exception&) {
      shared_->room.give_back(bytes);
      throw;
    }
    if (!part) {
      shared_->room.give_back(bytes);
      return nullptr;
    }
    auto away = std::make_shared<InHostMemory>(shared_, std::move(*part), std::move(memory),
                                               made_on.value_or(*current_stream(device_)));
    away->begin();
    return away;
  }

  // Of its device, whatever becomes of the store.
  Speed speed() override {
    const HostLock lock(speeds_mutex);
    return speeds[device_.index()];
  }

  void measure_once() {
    if (speed().out > 0 || is_capturing(device_)) return;
    try {
      const Speed measured = measure();
      const HostLock lock(speeds_mutex);
      // Another thread may have measured meanwhile: each had a part of the bus.
      Speed& known = speeds[device_.index()];
      known = {std::max(known.out, measured.out), std::max(known.back, measured.back)};
    } catch (const c10::OutOfMemoryError&) {
      return;  // the next who asks for the store tries again
    }
  }

  int64_t used() const override { return shared_->room.used(); }

  std::string name() const override { return "the host's memory"; }

 private:
  // Nothing where the store would have more bytes than `limit`.
  std::optional<PinnedMemory::Part> take_pinned(int64_t bytes, int64_t limit) {
    int64_t size = 0;
    {
      const HostLock lock(shared_->mutex);
      if (auto part = shared_->memory.take(bytes)) return part;
      size = shared_->memory.reserve(bytes, limit);
    }
    if (size == 0) return std::nullopt;
    at::Tensor piece;
    try {
      const AsideOfSteps aside;
      piece = pinned_memory_of(size);
    } catch (const c10::Error& error) {
      const HostLock lock(shared_->mutex);
      shared_->memory.unreserve(size);
      throw std::runtime_error("the host has no more memory to be pinned: " + error.msg());
    }
    const HostLock lock(shared_->mutex);
    return shared_->memory.add(std::move(piece), bytes);
  }

  Speed measure() const {
    const AsideOfSteps aside;
    const auto bytes = at::TensorOptions().dtype(at::kByte);
    const at::Tensor there = pinned_memory_of(kCopied);
    const at::Tensor here = at::empty({kCopied}, bytes.device(device_));
    const auto rate = [&](const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from) {
      order_after(stream, *current_stream(device_));
      const c10::StreamGuard on_stream(stream);
      c10::Event begin(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
      c10::Event end(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
      to.copy_(from, true);  // the first one is slower
      begin.record(stream);
      to.copy_(from, true);
      end.record(stream);
      while (!begin.query() || !end.query()) end.synchronize();
      constexpr double kMilliseconds = 1e3;
      return kMilliseconds * kCopied / std::max(begin.elapsedTime(end), 1e-6);
    };
    const double out = rate(shared_->out, there, here);
    return {out, rate(shared_->back, here, there)};
  }

  const c10::Device device_;
  const std::shared_ptr<OnHost> shared_;
};

}  // namespace

std::shared_ptr<Store> in_host_memory(c10::Device device) {
  static Lock mutex(LockOrder::kHostStores);
  static auto& stores = *new std::map<c10::DeviceIndex, std::weak_ptr<HostStore>>();
  std::shared_ptr<HostStore> store;
  {
    const HostLock lock(mutex);
    auto& found = stores[device.index()];
    store = found.lock();
    if (!store) found = store = std::make_shared<HostStore>(device);
  }
  store->measure_once();
  return store;
}

}  // namespace memsave_ext::store

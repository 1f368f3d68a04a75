// Contents of a CUDA device in a file. A stream copies each to pinned memory, from which threads
// write it to the file, and read it back. The host waits for the disk.
#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda_stream.h"
#include "locks.h"
#include "store/device_copies.h"
#include "store/store.h"
#include "streams.h"

namespace memsave_ext::store {
namespace {

// Bytes of pinned memory that wait to be written, or those of one content that is larger.
constexpr int64_t kWaiting = 256 << 20;

class Staged final : public Away {
 public:
  // `in_file`: the copy of pinned memory that a stream fills, of which `out` tells.
  Staged(std::shared_ptr<Away> in_file, c10::intrusive_ptr<c10::StorageImpl> source,
         c10::Stream made_on, c10::Event out)
      : in_file_(std::move(in_file)),
        bytes_(static_cast<int64_t>(source->nbytes())),
        source_(std::move(source)),
        made_on_(made_on),
        out_(std::move(out)) {}

  // The stream that its memory is freed on waits for a copy that may not be over.
  ~Staged() override {
    try {
      if (source_ && !is_out()) out_.block(made_on_);
    } catch (const std::exception&) {
      // The device has failed, of which others will tell.
    }
  }

  int64_t bytes() const { return bytes_; }

  // Once it is in the file the copy to pinned memory is over, too.
  bool is_out() override { return in_file_->is_out(); }
  void wait_until_out() override { in_file_->wait_until_out(); }
  std::optional<std::string> failure() const override { return in_file_->failure(); }
  c10::intrusive_ptr<c10::StorageImpl> take_source() override {
    if (!is_out()) return {};
    return std::move(source_);
  }

  void begin_back(c10::Storage memory) override {
    const auto stream = current_stream(memory.device());
    {
      const std::lock_guard<Lock> lock(mutex_);
      if (into_) return;
      into_ = std::move(memory);
      into_on_ = stream;
    }
    try {
      at::Tensor pinned;
      {
        const AsideOfSteps aside;
        pinned = pinned_memory_of(bytes_);
      }
      in_file_->begin_back(pinned.storage());
    } catch (...) {  // nobody is to wait for it
      const std::lock_guard<Lock> lock(mutex_);
      into_.reset();
      throw;
    }
  }

  bool is_coming() override {
    const std::lock_guard<Lock> lock(mutex_);
    return into_.has_value();
  }

  c10::Storage end_back() override {
    const c10::Storage pinned = in_file_->end_back();
    std::optional<c10::Storage> memory;
    {
      const std::lock_guard<Lock> lock(mutex_);
      memory.swap(into_);
    }
    const AsideOfSteps aside;
    use_here(*memory, into_on_);
    as_bytes(*memory).copy_(as_bytes(pinned), true);
    return *memory;
  }

  void cancel() override { in_file_->cancel(); }

 private:
  const std::shared_ptr<Away> in_file_;
  const int64_t bytes_;
  c10::intrusive_ptr<c10::StorageImpl> source_;
  const c10::Stream made_on_;
  c10::Event out_;
  Lock mutex_{LockOrder::kOnHost};  // for what follows
  std::optional<c10::Storage> into_;
  std::optional<c10::Stream> into_on_;
};

class StagedStore final : public Store {
 public:
  StagedStore(c10::Device device, std::shared_ptr<Store> file)
      : device_(device), file_(std::move(file)), out_(stream_for_copies(device)) {}

  bool takes(c10::Device device) const override { return device == device_; }

  std::shared_ptr<Away> put(c10::intrusive_ptr<c10::StorageImpl> memory,
                            const std::optional<c10::Stream>& made_on, int64_t limit) override {
    if (is_capturing(device_)) {
      throw std::runtime_error("copies to a file cannot be captured in a CUDA graph");
    }
    const auto bytes = static_cast<int64_t>(memory->nbytes());
    if (bytes > limit - file_->used()) return nullptr;
    wait_for_room(bytes);
    const c10::Stream from = made_on.value_or(*current_stream(device_));
    c10::Event out(out_.device_type());
    at::Tensor pinned;
    {
      const AsideOfSteps aside;
      pinned = pinned_memory_of(bytes);
      order_after(out_, from);
      const c10::StreamGuard on_stream(out_);
      const c10::Storage source{c10::intrusive_ptr<c10::StorageImpl>(memory)};
      pinned.copy_(as_bytes(source), true);
      out.record(out_);
    }
    c10::Storage of_pinned = pinned.storage();
    pinned.reset();
    auto filled =
        c10::intrusive_ptr<c10::StorageImpl>::reclaim(of_pinned.unsafeReleaseStorageImpl());
    auto in_file = file_->put(std::move(filled), out_, limit);
    if (!in_file) {  // others were faster
      out.block(from);
      return nullptr;
    }
    auto away =
        std::make_shared<Staged>(std::move(in_file), std::move(memory), from, std::move(out));
    const std::lock_guard<Lock> lock(mutex_);
    waiting_.push_back(away);
    return away;
  }

  Speed speed() override { return file_->speed(); }
  int64_t used() const override { return file_->used(); }
  std::string name() const override { return file_->name(); }

 private:
  // Waits for the disk where much pinned memory is still to be written.
  void wait_for_room(int64_t bytes) {
    while (true) {
      int64_t sum = bytes;
      std::shared_ptr<Staged> oldest;
      std::vector<std::shared_ptr<Staged>> found;  // may be the last to let go, without the lock
      {
        const std::lock_guard<Lock> lock(mutex_);
        const auto is_written = [&](const std::weak_ptr<Staged>& weak) {
          const auto staged = weak.lock();
          if (!staged) return true;
          found.push_back(staged);
          if (staged->is_out()) return true;
          sum += staged->bytes();
          if (!oldest) oldest = staged;
          return false;
        };
        waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_written),
                       waiting_.end());
      }
      if (!oldest || sum <= kWaiting) return;
      oldest->wait_until_out();
    }
  }

  const c10::Device device_;
  const std::shared_ptr<Store> file_;
  const c10::Stream out_;
  Lock mutex_{LockOrder::kOnHost};  // for what follows
  std::vector<std::weak_ptr<Staged>> waiting_;
};

}  // namespace

std::shared_ptr<Store> staged(c10::Device device, const std::string& folder) {
  static Lock mutex(LockOrder::kHostStores);
  static auto& stores =
      *new std::map<std::pair<c10::DeviceIndex, std::string>, std::weak_ptr<Store>>();
  auto file = in_folder(folder);
  const std::lock_guard<Lock> lock(mutex);
  auto& found = stores[{device.index(), folder}];
  auto store = found.lock();
  if (!store) found = store = std::make_shared<StagedStore>(device, std::move(file));
  return store;
}

}  // namespace memsave_ext::store

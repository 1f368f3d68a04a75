// Counts the live bytes of a device, without a record of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <map>
#include <vector>

#include "memory/active.h"

namespace memsave_ext::remat {

// On the CPU: what is allocated while it runs, by any thread, and what add() names, from the
// allocator's reports; likewise fake memory, from a prediction's. On other devices the caching
// allocator's own figures, which include all. CUDA's says what it gives and takes, so that it need
// be asked at start() alone; others, and where the package was built without CUDA, are asked each
// time.
class Count final : public memory::Listener {
 public:
  // `counts_all`: of fake memory, which has the meta device; as on CUDA, all that is alive counts.
  explicit Count(at::Device device, bool counts_all = false)
      : device_(device), counts_all_(counts_all) {}
  ~Count() override;
  Count(const Count&) = delete;
  Count& operator=(const Count&) = delete;

  at::Device device() const override { return device_; }
  bool counts_all() const { return counts_all_; }
  bool hears_moments() const override { return false; }
  void start();  // from nothing
  void stop();
  // The most bytes since a step looked last. Steps that overlap have one each.
  struct Peak {
    int64_t bytes = 0;
  };
  void watch(Peak& peak);  // until unwatch()
  void unwatch(Peak& peak);

  // Counts memory from before, each storage once.
  void add(const std::vector<at::Tensor>& tensors, bool are_gradients);
  // Subtracts memory of add() that has been freed since without a report.
  void look();
  // Whether the memory lies in some that was allocated since start(). Looks through all that lives.
  bool holds(const void* memory) const;
  int64_t live() const;
  int64_t before() const;  // of what lived before: add()'s, or on other devices all at start()
  struct Bytes {
    int64_t live, peak;
  };
  // The live bytes, and the most since the last call with this peak. Where it asks, that
  // is exact where it is the most that the allocator has ever given out, or since its user has
  // reset its peak, which is the user's to reset; else the larger of then and now. `mark`: what is
  // allocated from here on has it; see Survivors.
  Bytes take(Peak& peak, std::optional<int32_t> mark = std::nullopt);
  // Whether take() asks the allocator, which locks it and copies all of its figures.
  bool asks() const { return !is_reported() && !hears_cuda_; }
  // What CUDA's allocator gives, or takes back where negative. On any thread, with the lock of the
  // allocator. The caller holds the tracking mutex.
  void changed_on_cuda(int64_t bytes) { set_live(live_ + bytes); }
  // Leaves what lived at the last call of take() out of the next one's.
  void forget(Peak& peak);

  // Bytes of add()'s memory that was allocated between the two latest calls of start(), by the
  // value that `mark` had then, and how many of them are gradients'.
  struct Survivors {
    std::map<int32_t, int64_t> bytes;
    int64_t of_gradients = 0;
  };
  Survivors survivors() const;
  // Bytes that were allocated since start() and live, by the value that `mark` had then.
  std::map<int32_t, int64_t> living() const;

  // Also for fake memory. The caller holds the tracking mutex.
  void allocated(void* ptr, int64_t size);
  void freed(void* ptr);
  void allocated(const memory::Moment&, void* ptr, int64_t size, std::optional<int64_t>,
                 const std::shared_ptr<const memory::Origin>&, memory::TrackingLock&) override {
    allocated(ptr, size);
  }
  void freed(const memory::Moment&, void* ptr, std::optional<int64_t>) override { freed(ptr); }

 private:
  static constexpr int32_t kFromBefore = -1;
  struct Block {
    int64_t size;
    int32_t mark;
  };
  struct Older {
    void* ptr;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  // The name of a storage's memory: its address, or the storage's own for a fake one.
  static void* address_of(const c10::StorageImpl& storage);
  bool is_reported() const { return device_.is_cpu() || device_.is_meta(); }
  // What the caching allocator says. Not while the tracking mutex is held: it takes its own lock,
  // whose holder may be waiting for this mutex, to report.
  Bytes ask() const;
  void add(const c10::Storage& storage, bool is_gradient);
  void set_live(int64_t live);
  void raise_peaks(int64_t bytes);

  const at::Device device_;
  const bool counts_all_;
  bool running_ = false;
  bool hears_cuda_ = false;
  int32_t mark_ = 0;
  int64_t live_ = 0;
  int64_t before_ = 0;
  std::vector<Peak*> peaks_;
  int64_t highest_ = 0;  // the caching allocator's own peak when it was last asked
  ska::flat_hash_map<void*, Block> blocks_;
  ska::flat_hash_map<void*, Block> earlier_;  // blocks_ as they were at start()
  Survivors survivors_;
  std::vector<Older> older_;
};

// Lets a device's count hear of what CUDA's caching allocator does, from now on and for good. Only
// builds with CUDA have it.
void count_on_cuda(Count& count);

}  // namespace memsave_ext::remat

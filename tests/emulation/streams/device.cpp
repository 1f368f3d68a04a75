// What torch asks a device for: streams, events, memory, and hooks that say that it is there.
#include "device.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <future>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/cuda/CUDAGeneratorImpl.h"
#include "c10/cuda/CUDACachingAllocator.h"
#include "locks.h"

namespace c10 {

C10_DEFINE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback)

}  // namespace c10

namespace emulated {
namespace {

thread_local StreamId current = 0;

c10::Stream stream_of(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

// The host learns that an event is past as late as it can: when it waited for it, or asked twice.
struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point at;
  int asked = 0;
};

Event& event_of(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(new_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize_all(); }
  bool isStreamCapturing(const c10::Stream&) const override { return capture() != 0; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    ++recorded_events;
    if (*event == nullptr) *event = new Event;
    event_of(*event) = {recorded(stream.id()), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(stream.id(), event_of(event).clock);
  }
  void synchronizeEvent(void* event) const override { synchronize(event_of(event).clock); }
  bool queryEvent(void* event) const override {
    if (capture() != 0) failed("an event is queried while a graph is captured");
    if (++event_of(event).asked < 2) return false;
    synchronizeEvent(event);
    return true;
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event_of(to).at - event_of(from).at).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data) used_on(data.get(), stream.id());
  }

  static inline std::atomic<int64_t> recorded_events = 0;
};

// An allocation that waits before it takes the allocator's lock, where a case asks for it.
class Stop {
 public:
  Stop() {
    std::unique_lock<std::mutex> lock(mutex);
    if (state != kNext) return;
    stopped_ = true;
    change_to(kStopped);
    changed.wait(lock, [] { return state == kGoesOn; });
  }
  ~Stop() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (stopped_) change_to(kNone);
  }

  static inline enum { kNone, kNext, kStopped, kGoesOn } state = kNone;
  static inline std::mutex mutex;
  static inline std::condition_variable changed;

  static void change_to(decltype(state) to) {
    state = to;
    changed.notify_all();
  }

 private:
  bool stopped_ = false;
};

// Like CUDA's it reports while it holds its lock. That one can be taken again by its holder, which
// would find the allocator in the middle of a change: here that is a failure.
class Allocator final : public c10::DeviceAllocator {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;

 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0) {
      const Stop stop;
      const Entered entered;
      if (memory_limit > 0) let_others_free();
      const bool fits = memory_limit == 0 || static_cast<size_t>(live) + bytes <= memory_limit;
      if (!fits) Entered::tell(Entry::OOM, nullptr, bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, fits, "CUDA out of memory (emulated): ", bytes,
                       " more than ", live, " bytes");
      data = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
      sizes[data] = static_cast<int64_t>(bytes);
      allocated(data, bytes, current);
      entered.report(data, static_cast<int64_t>(bytes));
    }
    return {data, data, &Allocator::release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    used_on(data.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    ++questions;
    if (checks_lock_of_stats) require_that_another_may_allocate();
    const Entered entered;
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = live;
    stats.allocated_bytes[0].peak = peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    const Entered entered;
    peak = live;
  }

  static inline std::atomic<bool> checks_lock_of_stats = false;
  static inline int64_t live = 0;
  static inline std::atomic<int64_t> questions = 0;
  static inline size_t memory_limit = 0;
  static inline std::vector<c10::CachingDeviceAllocator::AllocatorTraceTracker> trackers;

 private:
  // They may free memory, with this thread's lock.
  static void let_others_free() {
    const int before = std::exchange(depth, 0);
    auto* callbacks = c10::FreeCudaMemoryCallbacksRegistry();
    for (const auto& name : callbacks->Keys()) callbacks->Create(name)->Execute();
    depth = before;
  }

  class Entered {
   public:
    Entered() : lock_(mutex) {
      if (depth++ > 0) failed("the allocator is called by what it reports to");
    }
    ~Entered() { --depth; }
    void report(void* data, int64_t bytes) const {
      live += bytes;
      peak = std::max(peak, live);
      c10::reportMemoryUsageToProfiler(data, bytes, live, live, kDevice);
      const auto action = bytes > 0 ? Entry::ALLOC : Entry::FREE_REQUESTED;
      tell(action, data, static_cast<size_t>(std::abs(bytes)));
    }
    static void tell(Entry::Action action, void* data, size_t bytes) {
      const Entry entry(action, 0, reinterpret_cast<size_t>(data), bytes, nullptr, {}, {});
      for (const auto& tracker : trackers) tracker(entry);
    }

   private:
    const std::lock_guard<memsave_ext::RecursiveLock> lock_;
  };

  // Whoever asks for statistics takes the allocator's lock. Another thread may have it, and report.
  void require_that_another_may_allocate() {
    const at::ThreadLocalState reporting;
    auto allocation = std::async(std::launch::async, [this, reporting] {
      const at::ThreadLocalStateGuard as_here(reporting);
      allocate(1);
    });
    if (allocation.wait_for(std::chrono::seconds(2)) == std::future_status::ready) return;
    failed("statistics are asked for with a lock that a report waits for");
    static auto& waiting = *new std::vector<std::future<void>>();
    waiting.push_back(std::move(allocation));
  }

  static void release(void* data) {
    if (data == nullptr) return;
    const Entered entered;
    const int64_t bytes = sizes.extract(data).mapped();
    const bool gone = freed(data);
    entered.report(data, -bytes);
    if (gone) std::free(data);
  }

  static inline memsave_ext::RecursiveLock mutex{memsave_ext::LockOrder::kAllocator};
  static inline int depth = 0;
  static inline int64_t peak = 0;
  static inline std::unordered_map<void*, int64_t> sizes;
};

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = std::aligned_alloc(512, (bytes + 511) / 512 * 512 + 512);
    allocated_pinned(data, bytes);
    return {data, data, &Pinned::release, c10::DeviceType::CPU};
  }
  static void release(void* data) {
    if (freed(data)) std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

Allocator allocator;
Pinned pinned;

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &allocator)
REGISTER_HOST_ALLOCATOR(c10::DeviceType::CUDA, &pinned)

}  // namespace

StreamId current_stream() { return current; }

void stop_next_allocation() {
  const std::lock_guard<std::mutex> lock(Stop::mutex);
  Stop::change_to(Stop::kNext);
}

void wait_until_it_has_stopped() {
  std::unique_lock<std::mutex> lock(Stop::mutex);
  Stop::changed.wait(lock, [] { return Stop::state == Stop::kStopped; });
}

bool let_it_end(double seconds) {
  std::unique_lock<std::mutex> lock(Stop::mutex);
  if (Stop::state == Stop::kStopped) Stop::change_to(Stop::kGoesOn);
  return Stop::changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                [] { return Stop::state == Stop::kNone; });
}

int64_t bytes_allocated() { return Allocator::live; }

std::atomic<bool> records_history = false;

size_t memory() { return Allocator::memory_limit; }

void limit_memory(size_t bytes) { Allocator::memory_limit = bytes; }

int64_t questions() { return Allocator::questions; }

int64_t recorded_events() { return Guard::recorded_events; }

void allocate_for_a_moment(size_t bytes) {
  allocator.resetPeakStats(0);
  allocator.allocate(bytes);
}

void check_lock_of_stats(bool check) { Allocator::checks_lock_of_stats = check; }

c10::Allocator* device_allocator() { return &allocator; }

}  // namespace emulated

namespace at {
namespace {

// Under the name by which torch looks for it.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override { return emulated::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return getHostAllocator(kCUDA); }
  c10::Allocator* getCUDADeviceAllocator() const override { return emulated::device_allocator(); }
  const Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return cuda::detail::getDefaultCUDAGenerator(0);
  }
  Generator getNewGenerator(c10::DeviceIndex) const override {
    return make_generator<CUDAGeneratorImpl>(0);
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace
}  // namespace at

void c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
    c10::CachingDeviceAllocator::AllocatorTraceTracker tracker) {
  emulated::Allocator::trackers.push_back(std::move(tracker));
}

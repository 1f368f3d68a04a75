// The package's locks and their one order: a thread that holds some waits only for later ones. One
// that only tries to take a lock need not keep to it. Builds for tests check it (the emulated
// device and the sanitizers): MEMSAVE_EXT_CHECK_LOCKS is a function there, to be told what is
// wrong.
//
// The GIL comes first: what may run Python, as freeing a tensor does, holds none of these. Those of
// torch's nodes come before all but the GIL.
#pragma once

#include <mutex>

#ifdef MEMSAVE_EXT_CHECK_LOCKS
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#endif

namespace memsave_ext {

enum class LockOrder {
  // Held while operators run.
  kCollector = 1,    // gradients on their way to an optimizer
  kRegionRecompute,  // a region's recompute
  kRegionState,      // what a recompute of a region has made
  kRecompute,        // a block's recomputes
  // Held while an allocator may be asked for its statistics.
  kStep,           // what a block has seen of the step that runs
  kStepsOfDevice,  // which steps are known, by device
  kKnownSteps,     // those of a device
  kMovingPlans,
  kSchedules,  // of copies
  // That of a device's caching allocator, which is torch's. It calls what comes after it.
  kAllocator,
  // Of stores, as are those from kTrash to kSpeed: who holds them calls no allocator, rule S1 of
  // store/store.h.
  kHostStores,
  kHostSpeeds,
  kFileStores,
  kBlocks,           // those that give way; who holds it allocates nothing
  kContents,         // which memory is held, dropped and moved
  kSteppedStorages,  // what optimizers have stepped while regions waited
  kTrash,            // what is freed later
  kThreadsOfProcess,
  kCopies,  // jobs of the threads that copy
  kInFile,  // the state of copies to a file
  kOnHost,  // and of those to the host's memory
  kRoomInFile,
  kShares,     // who reads memory beside its storage
  kSpeed,      // of copies
  kOperators,  // what is known of operators
  kTracking,   // all that listens to allocations
  kLargeMemory,
};

#ifdef MEMSAVE_EXT_CHECK_LOCKS
// The locks that this thread holds.
class LocksHeld {
 public:
  static void await(const void* lock, LockOrder order) {
    auto& all = held();
    const auto is_it = [&](const Held& other) { return other.lock == lock; };
    if (std::any_of(all.begin(), all.end(), is_it)) return;  // a recursive one
    for (const Held& other : all) {
      if (other.order < order) continue;
      MEMSAVE_EXT_CHECK_LOCKS("lock " + std::to_string(static_cast<int>(order)) +
                              " of csrc/locks.h is awaited while " +
                              std::to_string(static_cast<int>(other.order)) + " is held");
    }
  }
  [[noreturn]] static void abort(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::abort();
  }
  static void took(const void* lock, LockOrder order) {
    auto& all = held();
    if (all.count == all.locks.size()) abort("a thread holds more locks than csrc/locks.h counts");
    all.locks[all.count++] = {lock, order};
  }
  static void left(const void* lock) {
    auto& all = held();
    auto* last = all.end();
    while ((--last)->lock != lock) continue;
    std::copy(last + 1, all.end(), last);
    --all.count;
  }

 private:
  struct Held {
    const void* lock;
    LockOrder order;
  };
  // Without a destructor, for locks are taken after those of thread_local objects have run: torch's
  // libraries leave at the end of the process, and whoever listens is told.
  struct HeldLocks {
    std::array<Held, 64> locks;
    size_t count;

    Held* begin() { return locks.data(); }
    Held* end() { return locks.data() + count; }
  };
  // One for all libraries of a process.
  __attribute__((visibility("default"))) static HeldLocks& held() {
    static thread_local HeldLocks all;
    static_assert(std::is_trivially_destructible_v<HeldLocks>);
    return all;
  }
};
#else
struct LocksHeld {
  static void await(const void*, LockOrder) {}
  static void took(const void*, LockOrder) {}
  static void left(const void*) {}
};
#endif

template <typename Mutex>
class OrderedLock {
 public:
  constexpr explicit OrderedLock(LockOrder order) : order_(order) {}

  void lock() {
    LocksHeld::await(this, order_);
    mutex_.lock();
    LocksHeld::took(this, order_);
  }
  bool try_lock() {
    if (!mutex_.try_lock()) return false;
    LocksHeld::took(this, order_);
    return true;
  }
  void unlock() {
    LocksHeld::left(this);
    mutex_.unlock();
  }

 private:
  Mutex mutex_;
  const LockOrder order_;
};

using Lock = OrderedLock<std::mutex>;
using RecursiveLock = OrderedLock<std::recursive_mutex>;

}  // namespace memsave_ext

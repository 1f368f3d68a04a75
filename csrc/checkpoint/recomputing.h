// Whether this thread is running a function again for its gradients.
#pragma once

#include <atomic>

namespace memsave_ext::checkpoint {

inline thread_local int recompute_depth = 0;

inline bool is_recomputing() { return recompute_depth > 0; }

// Whether this thread is inside the forward of a checkpointed region.
inline thread_local int region_depth = 0;

inline bool in_region() { return region_depth > 0; }

class RegionScope {
 public:
  RegionScope() { ++region_depth; }
  ~RegionScope() { --region_depth; }
  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;
};

// What runs again: a region's function, or single operators of a rematerialization.
enum class Again { kRegion, kOperators };

// Called at the begin and end of every recompute while memory is tracked; null otherwise.
inline std::atomic<void (*)(Again what, bool begins)> recompute_observer{nullptr};

class RecomputeScope {
 public:
  explicit RecomputeScope(Again what = Again::kRegion) : what_(what) {
    ++recompute_depth;
    tell(true);
  }
  ~RecomputeScope() {
    --recompute_depth;
    tell(false);
  }
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  void tell(bool begins) const {
    if (const auto observer = recompute_observer.load(std::memory_order_relaxed)) {
      observer(what_, begins);
    }
  }

  const Again what_;
};

}  // namespace memsave_ext::checkpoint

// Whether this thread is running a function again for its gradients.
#pragma once

namespace memsave_ext {

inline thread_local int recompute_depth = 0;

inline bool is_recomputing() { return recompute_depth > 0; }

class RecomputeScope {
 public:
  RecomputeScope() { ++recompute_depth; }
  ~RecomputeScope() { --recompute_depth; }
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;
};

}  // namespace memsave_ext

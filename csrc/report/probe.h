// Tests whether a kernel of this build runs on the present GPU, for memsave_ext.report.
#pragma once

namespace memsave_ext {

// Runs a one-thread kernel on the current device and returns the architecture it was compiled for
// (900 for sm_90). Throws std::runtime_error with CUDA's message when it does not run.
int probe_cuda();

}  // namespace memsave_ext

// A child process in which a step runs on fake tensors; memsave_ext/dry_run/child.py has the rest.
#pragma once

#include <pybind11/pybind11.h>

namespace memsave_ext::dry_run {

// As os.fork(), without the warning that Python gives where there are other threads. In the child
// backwards run on its one thread, and the process ends with its parent's thread. Returns 0 there.
// Throws an OSError.
int fork_child();

// All objects of two types that the garbage collector knows, also frozen ones. For a child: it
// writes to none of the others, whose memory would be copied, and moves all into the oldest
// generation.
pybind11::list instances(const pybind11::type& kind, const pybind11::type& other);

}  // namespace memsave_ext::dry_run

// Where a region was called from, and what is known of the graphs it builds: the look at a
// recompute's graph for tensors that were not listed is paid once per call site.
#pragma once

#include <Python.h>

#include <string>
#include <vector>

namespace memsave_ext {

enum class Listing {
  kUnchecked,   // no recompute from this call site has been looked at
  kComplete,    // every tensor that needs a gradient was listed
  kIncomplete,  // some were not: warned about, and their edges are cut at every recompute
};

// A line of Python code that calls CheckpointFunction.apply. Lives as long as the process, as code
// does. Read and written with the GIL.
struct CallSite {
  PyObject* code;
  int line;
  Listing listing = Listing::kUnchecked;

  std::string where() const;  // "file.py:12"
};

// Issues the UserWarning that names what was not listed; throws python_error where warnings are
// errors.
void warn_unlisted(const std::vector<std::string>& unlisted, const CallSite& site);

// The call site of the Python frame that is running now, or nullptr where there is none.
CallSite* current_call_site();

}  // namespace memsave_ext

// Where a region was called from, for the warning about tensors that were not listed.
#pragma once

#include <Python.h>

#include <set>
#include <string>
#include <vector>

namespace memsave_ext {

// A line of Python code that calls CheckpointFunction.apply. Lives as long as the process, as code
// does. Read and written with the GIL.
struct CallSite {
  PyObject* code;
  int line;
  std::set<std::string> warnings = {};  // that were given

  std::string where() const;  // "file.py:12"
};

// Issues the UserWarning that names what was not listed, each of them once; throws python_error
// where warnings are errors. Does nothing where nothing is unlisted.
void warn_unlisted(const std::vector<std::string>& unlisted, CallSite* site);

// The call site of the Python frame that is running now, or nullptr where there is none.
CallSite* current_call_site();

}  // namespace memsave_ext

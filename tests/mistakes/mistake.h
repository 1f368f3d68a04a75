// Included before all sources, into which run.py puts mistakes.
#pragma once

#include <cstdlib>

namespace mistakes {

// Whether this process runs the mistake of this number.
inline bool is_running(int number) {
  static const int running = [] {
    const char* const given = std::getenv("MEMSAVE_EXT_MISTAKE");
    return given == nullptr ? -1 : std::atoi(given);
  }();
  return running == number;
}

}  // namespace mistakes
